"""Slurm host lists, kept in order.

ClusterShell's ``NodeSet`` is a set: it sorts what it expands. Ranks are numbered by position, so
:func:`expand` cuts a list at its top-level commas first and keeps that order.
"""

from __future__ import annotations

from collections.abc import Iterable

from hpjob.core.errors import UserInputError


def expand(text: str) -> list[str]:
    """Return the names of a host list such as ``n[01-03,7],gpu5`` in the order written.

    Raises:
        UserInputError: The brackets do not match or a range is malformed.
    """
    # Imported late: this module is on the path of `hpjob --help`.
    from ClusterShell.NodeSet import NodeSet, NodeSetException  # noqa: PLC0415

    names: list[str] = []
    for piece in _split_top_level(text):
        for part in _split_brackets(piece):
            try:
                names.extend(str(name) for name in NodeSet(part))
            except NodeSetException as error:
                raise UserInputError(f"host list {text!r}: {error}", hint="write it as n[01-04,07],gpu5") from None
    return list(dict.fromkeys(names))


def fold(names: Iterable[str]) -> str:
    """Return the shortest host list that names the same hosts; order is not kept."""
    from ClusterShell.NodeSet import NodeSet  # noqa: PLC0415

    return str(NodeSet.fromlist(list(names)))


def _split_top_level(text: str) -> list[str]:
    pieces: list[str] = [""]
    depth = 0
    for char in text.strip():
        depth += (char == "[") - (char == "]")
        if char == "," and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += char
    return [piece.strip() for piece in pieces if piece.strip()]


def _split_brackets(piece: str) -> list[str]:
    """Cut ``n[001-003,7]`` into ``n[001-003]`` and ``n7`` when there is just one bracket."""
    if piece.count("[") != 1 or piece.count("]") != 1:
        return [piece]
    before, rest = piece.split("[", 1)
    inside, after = rest.split("]", 1)
    return [f"{before}[{part}]{after}" if "-" in part else f"{before}{part}{after}" for part in inside.split(",")]
