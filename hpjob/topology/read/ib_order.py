"""Whether the lines of an ``ibnetdiscover`` listing still stand in the order in which it prints them.

Before each record stand its attributes, each once (``vendid=``, ``devid=``, …, ``switchguid=`` or ``caguid=``),
and its ports behind it. A port line of a switch does not say whose it is, so in a text whose lines were
moved it would be taken for one of the record above it.
"""

from __future__ import annotations

import re

_ATTRIBUTE = re.compile(r"\s*(vendid|devid|sysimgguid|switchguid|caguid|rtguid)=(?:0x([0-9a-fA-F]{1,16})\b)?")
_OWN = ("switchguid", "caguid", "rtguid")


class RecordOrder:
    """Counts the places where lines do not follow each other as printed."""

    def __init__(self) -> None:
        self._pending: dict[str, str] = {}
        self._faults = 0

    @property
    def is_broken(self) -> bool:
        """Lines were moved."""
        return self._faults > 0

    def attribute(self, line: str) -> bool:
        """Note a line outside records; True when it is an attribute of the record that follows."""
        match = _ATTRIBUTE.match(line)
        if match is None:
            return False
        self._faults += match[1] in self._pending
        self._pending[match[1]] = match[2] or ""
        return True

    def elision(self) -> None:
        """Note a line by which an author says that others were left out."""
        self._pending.clear()

    def record(self, node_id: str) -> None:
        """Note the line that begins a record."""
        for key in _OWN:
            guid, own = self._pending.get(key, ""), node_id[2:]
            if guid and re.fullmatch(r"[0-9a-fA-F]{1,16}", own):
                self._faults += int(guid, 16) != int(own, 16)
        self._pending.clear()

    def port(self) -> None:
        """Note a port line: no attribute stands between it and its record."""
        if self._pending:
            self._faults += 1
            self._pending.clear()
