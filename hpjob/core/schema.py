"""Base of every persisted type, and the translation of its errors into words.

All persisted types are frozen, refuse unknown keys and carry a ``version``. :func:`parse` reports
every problem of a document at once, each with its path, and guesses the right name for a wrong one.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, get_args, get_origin

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
    known = list(choices)
    longer = sorted(choice for choice in known if word and choice.startswith(word))
    matches = longer or difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return matches[0] if matches else None


def _describe(model: type[Persisted], error: ValidationError) -> tuple[list[str], list[str]]:
    lines: list[str] = []
    hints: list[str] = []
    wrong: dict[str, tuple[list[str], Any]] = {}
    for item in error.errors(include_url=False):
        location = tuple(part for part in item["loc"] if not _UNION_TAG.match(str(part)))
        path = ".".join(str(part) for part in location) or "(top level)"
        if item["type"] == "extra_forbidden":
            known = _known_keys(model, location[:-1])
            guess = nearest(str(location[-1]), known)
            lines.append(f"{path}: unknown key")
            hints.append(f"did you mean `{guess}`?" if guess else f"known keys are {', '.join(known)}")
        elif item["type"] == "missing":
            lines.append(f"{path}: missing")
            hints.append(f"add `{path}`")
        else:
            messages, _ = wrong.setdefault(path, ([], item["input"]))
            messages.append(_in_words(item["type"], item["msg"], item.get("ctx", {})))
    # The members of a union each report the same value; one line says all that would have been right.
    for path, (messages, value) in wrong.items():
        first, *others = dict.fromkeys(messages)
        expected = " or ".join((first, *(other.removeprefix("expected ") for other in others)))
        lines.append(f"{path}: {expected}, found {_shown(value)}")
    return lines, hints


_UNION_TAG = re.compile(r"(?:literal|constrained-|function-|lax-or-strict|nullable)|(?:int|bool|str|float)$")
_PHRASES = {
    "int_type": "expected a whole number",
    "int_parsing": "expected a whole number",
    "int_from_float": "expected a whole number",
    "float_type": "expected a number",
    "float_parsing": "expected a number",
    "bool_type": "expected true or false",
    "bool_parsing": "expected true or false",
    "string_type": "expected text",
    "model_type": "expected keys with values",
    "dict_type": "expected keys with values",
    "tuple_type": "expected a list",
}


def _in_words(kind: str, message: str, context: Mapping[str, Any]) -> str:
    if kind == "literal_error":
        return f"expected {context.get('expected')}"
    if kind == "greater_than":
        return f"expected more than {context.get('gt')}"
    phrase = _PHRASES.get(kind)
    if phrase:
        return phrase
    text = message.removeprefix("Value error, ")
    return text[:1].lower() + text[1:]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _known_keys(model: type[Persisted], path: tuple[int | str, ...]) -> list[str]:
    current: type[BaseModel] | None = model
    inside = False
    for part in path:
        if inside:  # The key or place inside a mapping or list says nothing of its values' type.
            inside = False
            continue
        field = current.model_fields.get(str(part)) if current else None
        current = _model_in(field.annotation) if field else None
        inside = field is not None and get_origin(field.annotation) in (dict, tuple, list)
    return list(current.model_fields) if current else []


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in get_args(annotation):
        found = _model_in(argument)
        if found is not None:
            return found
    return None
