"""Recipes from packaged names and files, with ``extends``, ``model.config`` and ``a.b=c`` overrides."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpjob.core import yaml_text
from hpjob.core.errors import UserInputError
from hpjob.core.resources import data_file, data_names
from hpjob.core.schema import nearest, parse
from hpjob.recipe.config_json import shape_from_config
from hpjob.recipe.model import Recipe

_SUFFIX = ".yaml"


def recipe_names() -> list[str]:
    """Return the names of the packaged recipes."""
    return data_names("recipes", _SUFFIX)


def load_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> Recipe:
    """Resolve a packaged recipe or a file.

    Args:
        name_or_path: A name such as ``70b`` or a path that ends in ``.yaml`` or ``.yml``.
        overrides: ``a.b=c`` each; the value is read as YAML.

    Raises:
        UserInputError: Unknown name, unreadable file, or wrong values; all of them at once.
    """
    problems: list[str] = []
    document = _document(name_or_path, problems, chain=())
    _apply_overrides(document, overrides, problems)
    base = Path(name_or_path).parent if _is_path(name_or_path) else Path()
    hints: list[str] = _resolve_model(document, base, problems)
    document.setdefault("name", Path(name_or_path).stem if _is_path(name_or_path) else name_or_path)
    source = f"recipe {name_or_path}"
    try:
        recipe = parse(Recipe, document, source=source)
    except UserInputError as error:
        # A config that cannot be used was said already; the model is missing for that reason.
        more = [line for line in error.message.splitlines() if not hints or line != f"{source}: model: missing"]
        problems.extend(more)
        hints += [error.hint] if more else []
        recipe = None
    if problems or recipe is None:
        lines = [line if line.startswith((source, "--set")) else f"{source}: {line}" for line in problems]
        raise UserInputError("\n".join(lines), hint="; ".join(hints) or "correct the lines above")
    return recipe


def dump_recipe(recipe: Recipe) -> str:
    """Write every value of a recipe as YAML that :func:`load_recipe` reads back unchanged."""
    return yaml_text.dump(recipe.model_dump(mode="json"))


def _is_path(name: str) -> bool:
    return name.endswith((".yaml", ".yml")) or "/" in name


def _document(name: str, problems: list[str], chain: tuple[str, ...]) -> dict[str, Any]:
    if name in chain:
        raise UserInputError(
            f"recipe {chain[0]}: `extends` goes in a circle: {' -> '.join((*chain, name))}", hint="remove one"
        )
    path = Path(name) if _is_path(name) else data_file("recipes", name + _SUFFIX)
    if not path.is_file():
        raise _unknown(name)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserInputError(f"recipe {name}: cannot be read: {error}", hint="give a readable UTF-8 file") from None
    document, refused = yaml_text.load(text, source=f"recipe {name}")
    problems.extend(refused)
    if document is None:
        document = {}
    if not isinstance(document, dict):
        raise UserInputError(
            f"recipe {name}: expected keys such as model, data, training, found {type(document).__name__}",
            hint="`hpjob recipes show tiny` prints a complete recipe",
        )
    parent = document.pop("extends", None)
    if parent is None:
        return document
    if not isinstance(parent, str):
        raise UserInputError(
            f"recipe {name}: extends: expected a recipe's name", hint=f"one of {', '.join(recipe_names())}"
        )
    beside = path.parent / parent
    base = _document(str(beside) if _is_path(parent) else parent, problems, (*chain, name))
    base.pop("name", None)
    return _merged(base, document)


def _unknown(name: str) -> UserInputError:
    if _is_path(name):
        what = "is a folder, no file" if Path(name).is_dir() else "no such file"
        return UserInputError(f"recipe {name}: {what}", hint="`hpjob recipes list` shows the packaged ones")
    names = recipe_names()
    guess = nearest(name, names) or nearest(name.lower(), names)
    asked = f"did you mean `{guess}`? " if guess else ""
    return UserInputError(
        f"unknown recipe `{name}`", hint=f"{asked}packaged recipes are {', '.join(names)}; a file's name ends in .yaml"
    )


def _merged(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = copy.deepcopy(base)
    for key, value in over.items():
        old = merged.get(key)
        # A new model.config replaces the shape that the parent wrote out.
        inherits = isinstance(old, dict) and isinstance(value, Mapping) and "config" not in value
        merged[key] = _merged(old, value) if inherits and isinstance(old, dict) else copy.deepcopy(value)
    return merged


def _apply_overrides(document: dict[str, Any], overrides: Sequence[str], problems: list[str]) -> None:
    for override in overrides:
        key, equals, text = override.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            problems.append(f"--set {override}: expected KEY=VALUE such as training.steps=100")
            continue
        value, refused = yaml_text.load(text, source=f"--set {override}")
        problems.extend(f"--set {override}: {line.removeprefix('line 1: ')}" for line in refused)
        target = document
        for part in parts[:-1]:
            inner = target.setdefault(part, {})
            if not isinstance(inner, dict):
                problems.append(f"--set {override}: `{part}` is a single value and has no keys")
                break
            target = inner
        else:
            if parts == ["model", "config"]:
                target.clear()
            target[parts[-1]] = value


def _resolve_model(document: dict[str, Any], base: Path, problems: list[str]) -> list[str]:
    """Replace ``model: {config: PATH, ...}`` by the shape that the file holds."""
    model = document.get("model")
    if not isinstance(model, dict) or "config" not in model:
        return []
    path = Path(str(model["config"])).expanduser()
    if not path.is_absolute() and not path.exists():
        path = base / path
    rest = {key: value for key, value in model.items() if key != "config"}
    try:
        document["model"] = {**shape_from_config(path), **rest}
    except UserInputError as error:
        problems.extend(error.message.splitlines())
        document.pop("model")
        return [error.hint]
    return []
