"""YAML as people mean it: YAML 1.2's scalars on top of PyYAML's safe loader.

YAML 1.1 reads ``3e-4`` as text, ``1:30`` as 90, ``on`` as true and ``0123`` as 83. Here ``3e-4`` is a
number, ``1:30`` and ``on`` stay text (a typed field then accepts or refuses them), a number with a
leading zero and a key that is written twice are refused.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from hpjob.core.errors import UserInputError

_INT = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)")
_FLOAT = re.compile(r"[-+]?(?:[0-9][0-9_]*\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_NULL = re.compile(r"~|null|Null|NULL|")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9_]+")
_TAG = "tag:yaml.org,2002:"


def _resolvers() -> dict[str | None, list[tuple[str, re.Pattern[str]]]]:
    table: dict[str | None, list[tuple[str, re.Pattern[str]]]] = {}
    kinds: tuple[tuple[str, re.Pattern[str], list[str]], ...] = (
        ("bool", _BOOL, list("tTfF")),
        ("int", _INT, list("-+0123456789")),
        ("float", _FLOAT, list("-+0123456789.")),
        ("null", _NULL, ["~", "n", "N", ""]),
        ("merge", re.compile("<<"), ["<"]),
    )
    for name, pattern, first_characters in kinds:
        full = re.compile(rf"(?:{pattern.pattern})$")
        for character in first_characters:
            table.setdefault(character, []).append((_TAG + name, full))
    return table


class _Loader(yaml.SafeLoader):
    """Safe loader that keeps a list of what it refuses, so that all of it is reported at once."""

    yaml_implicit_resolvers = _resolvers()

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.problems: list[str] = []

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.value == "<<":
                continue
            line = key.start_mark.line + 1
            if key.value in seen:
                self.problems.append(
                    f"line {line}: key `{key.value}` is written twice (first in line {seen[key.value]})"
                )
            seen.setdefault(key.value, line)
        return super().construct_mapping(node, deep=deep)


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    return int(node.value.replace("_", ""))


def _construct_float(loader: _Loader, node: yaml.ScalarNode) -> float:
    return float(node.value.replace("_", ""))


def _construct_text(loader: _Loader, node: yaml.ScalarNode) -> str:
    if node.style is None and _LEADING_ZERO.fullmatch(node.value):
        line = node.start_mark.line + 1
        plain = node.value.lstrip("+-").lstrip("0") or "0"
        loader.problems.append(
            f'line {line}: {node.value} has a leading zero: write {plain} for a number or "{node.value}" for text'
        )
    return str(loader.construct_scalar(node))


_Loader.add_constructor(_TAG + "int", _construct_int)
_Loader.add_constructor(_TAG + "float", _construct_float)
_Loader.add_constructor(_TAG + "str", _construct_text)


class _Dumper(yaml.SafeDumper):
    """Safe dumper that quotes every text which :func:`load` would read as something else."""

    yaml_implicit_resolvers = _resolvers()

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "'" if _LEADING_ZERO.fullmatch(text) else None
    return dumper.represent_scalar(_TAG + "str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def load(text: str, *, source: str) -> tuple[Any, list[str]]:
    """Read one YAML document.

    Args:
        text: The document.
        source: Where it came from; begins the message of a syntax error.

    Returns:
        The document and the list of values that were refused, one sentence each.

    Raises:
        UserInputError: The text is no YAML.
    """
    try:
        # The reader looks at all characters before the first token, so even making it can fail.
        loader = _Loader(text)
        document = loader.get_single_data()
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserInputError(
            f"{source}: {_syntax_message(error)}", hint="indent with spaces; quote text that holds `: ` or ` #`"
        ) from None
    return document, loader.problems


def dump(document: Any) -> str:
    """Write a document so that :func:`load` gives the same one back; keys keep their order."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=100)


def _syntax_message(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem or 'no YAML'}"
    return " ".join(str(error).split())
