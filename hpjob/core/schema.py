"""Base of every persisted type, and the translation of its errors into words.

All persisted types are frozen, refuse unknown keys and carry a ``version``. :func:`parse` reports
every problem of a document at once, each with its path, and guesses the right name for a wrong one.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from hpjob.core.errors import UserInputError


class Persisted(BaseModel):
    """A frozen record that is written to and read from files; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


ModelT = TypeVar("ModelT", bound=Persisted)


def parse(model: type[ModelT], document: object, *, source: str) -> ModelT:
    """Build ``model`` from plain data.

    Args:
        model: The type to build.
        document: What a YAML or JSON file held.
        source: Where the document came from; it begins every message.

    Raises:
        UserInputError: One line a problem, each with its path inside the document.
    """
    if not isinstance(document, Mapping):
        raise UserInputError(
            f"{source}: expected a mapping of keys, found {type(document).__name__}",
            hint=f"the top level needs keys such as {', '.join(list(model.model_fields)[:4])}",
        )
    try:
        return model.model_validate(document)
    except ValidationError as error:
        lines, hints = _describe(model, error)
        raise UserInputError(
            "\n".join(f"{source}: {line}" for line in lines),
            hint="; ".join(dict.fromkeys(hints)) or "correct the values above",
        ) from None


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """Return the choice that ``word`` was most likely meant to be, or None."""
    matches = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.6)
    return matches[0] if matches else None


def _describe(model: type[Persisted], error: ValidationError) -> tuple[list[str], list[str]]:
    lines: list[str] = []
    hints: list[str] = []
    for item in error.errors(include_url=False):
        path = ".".join(str(part) for part in item["loc"]) or "(top level)"
        if item["type"] == "extra_forbidden":
            known = _known_keys(model, item["loc"][:-1])
            guess = nearest(str(item["loc"][-1]), known)
            lines.append(f"{path}: unknown key")
            hints.append(f"did you mean `{guess}`?" if guess else f"known keys are {', '.join(known)}")
        elif item["type"] == "missing":
            lines.append(f"{path}: missing")
            hints.append(f"add `{path}`")
        else:
            message = item["msg"].removeprefix("Value error, ")
            lines.append(f"{path}: {message[:1].lower() + message[1:]}, found {_shown(item['input'])}")
    return lines, hints


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _known_keys(model: type[Persisted], path: tuple[int | str, ...]) -> list[str]:
    current: type[BaseModel] | None = model
    for part in path:
        field = current.model_fields.get(str(part)) if current else None
        current = _model_in(field.annotation) if field else None
    return list(current.model_fields) if current else []


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in get_args(annotation):
        found = _model_in(argument)
        if found is not None:
            return found
    return None
