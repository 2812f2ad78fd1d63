"""Nodes that failed, remembered for a site: which to leave out of the next job, and how a person takes one back.

One file a cluster, ``$XDG_STATE_HOME/hpjob/nodes-CLUSTER.json``, that a person can read. A node counts as bad after two
failures in a week, over attempts and runs. The file is a help, never a condition: a home that cannot be written costs
the memory, not the run.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpjob.core.run_records import read_json, write_json

logger = logging.getLogger("hpjob")
STRIKES = 2
"""Failures that make a node bad."""
MEMORY_S = 7 * 24 * 3600.0
"""For how long a failure counts."""
_MOST_STRIKES = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Strike:
    """One failure that points to a node."""

    node: str
    time: float
    """Seconds since the epoch."""
    kind: str
    """``hang``, ``killed``, ``preflight`` or ``node-failure``."""
    run: str
    """Folder of the run."""
    attempt: int
    what: str


class NodeMemory:
    """Failures of the nodes of one cluster.

    Args:
        cluster: Its name, as Slurm has it.
        folder: Where the files are; None = the person's state folder.
        clock: Seconds since the epoch.
    """

    def __init__(self, cluster: str, folder: Path | None = None, clock: Callable[[], float] = time.time) -> None:
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", cluster) or "cluster"
        self.cluster = cluster
        self.path = (folder or state_folder()) / f"nodes-{name}.json"
        self._clock = clock

    def strikes(self) -> list[Strike]:
        """Return the failures that still count, oldest first."""
        oldest = self._clock() - MEMORY_S
        return [strike for strike in _read(self.path) if strike.time >= oldest]

    def bad(self) -> dict[str, list[Strike]]:
        """Return the nodes that failed too often, each with its failures."""
        by_node: dict[str, list[Strike]] = {}
        for strike in self.strikes():
            by_node.setdefault(strike.node, []).append(strike)
        return {node: strikes for node, strikes in by_node.items() if len(strikes) >= STRIKES}

    def add(self, strikes: Sequence[Strike]) -> None:
        """Remember failures; a node fails at most once an attempt."""

        def merged(known: list[Strike]) -> list[Strike]:
            seen = {(strike.node, strike.run, strike.attempt) for strike in known}
            new = [strike for strike in strikes if (strike.node, strike.run, strike.attempt) not in seen]
            return [*known, *new][-_MOST_STRIKES:]

        if strikes:
            self._change(merged)

    def forget(self, nodes: Sequence[str] | None = None) -> list[str]:
        """Forget the failures of some nodes, or of all; return the names of those that had any."""
        had = [name for name in dict.fromkeys(s.node for s in self.strikes()) if nodes is None or name in nodes]
        self._change(lambda known: [strike for strike in known if strike.node not in had])
        return had

    def _change(self, change: Callable[[list[Strike]], list[Strike]]) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(self.path.with_suffix(".lock")):
                strikes = [asdict(strike) for strike in change(self.strikes())]
                write_json(self.path, {"version": 1, "cluster": self.cluster, "strikes": strikes})
        except OSError as error:
            logger.warning("failures of nodes cannot be remembered in %s: %s", self.path, error.strerror or error)


def state_folder() -> Path:
    """Return the folder for what this program remembers between runs."""
    home = os.environ.get("XDG_STATE_HOME")
    return (Path(home) if home else Path.home() / ".local" / "state") / "hpjob"


def remembered_clusters() -> list[NodeMemory]:
    """Return the memory of every cluster that has one."""
    memories = []
    for path in sorted(state_folder().glob("nodes-*.json")):
        document = read_json(path)
        if document is not None and "cluster" in document:
            memories.append(NodeMemory(str(document["cluster"])))
    return memories


def _read(path: Path) -> list[Strike]:
    document = read_json(path) or {}
    entries = document.get("strikes")
    return [strike for entry in entries if (strike := _strike(entry))] if isinstance(entries, list) else []


def _strike(entry: Any) -> Strike | None:
    try:
        return Strike(
            node=str(entry["node"]),
            time=float(entry["time"]),
            kind=str(entry["kind"]),
            run=str(entry.get("run", "")),
            attempt=int(entry.get("attempt", 0)),
            what=str(entry.get("what", "")),
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
