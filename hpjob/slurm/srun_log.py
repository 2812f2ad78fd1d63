"""Which ranks srun says were killed or left with an error, from what it writes to stderr.

Slurm 22.05 to 25.11 write, for one task or several::

    srun: error: n1: task 3: Killed
    srun: error: n1: tasks 0,2-3: Exited with exit code 1
    srun: error: n2: task 5: Out Of Memory
    srun: error: Node failure on n2
    srun: launch/slurm: _step_signal: Terminating StepId=7.0       (from here on srun itself ends tasks)
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hpjob.core.hostlist import expand

_TASK_LINE = re.compile(r"srun: error: (?P<node>[^\s:]+): tasks? (?P<tasks>[\d,\-\[\]]+): (?P<what>.+)")
_NODE_FAILURE = re.compile(r"srun: error: Node failure on (?P<nodes>\S+)")
_ABORT = re.compile(
    r"srun: (?:error: )?(?:launch/slurm: \w+: )?"
    r"(?:(?:Terminating|Force Terminated) (?:StepId|job step)|Job step aborted|Timed out waiting)"
)
_STOP_SIGNALS = ("Terminated", "User defined signal 1", "User defined signal 2")


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskEnd:
    """How some ranks of one node ended."""

    node: str
    ranks: tuple[int, ...]
    """Empty for a failed node: all its ranks."""
    what: str
    """srun's words, such as ``Killed`` or ``Exited with exit code 1``."""
    after_abort: bool
    """srun was already ending the step: a consequence, no cause."""

    @property
    def by_stop_signal(self) -> bool:
        """Whether the ranks died of a signal that only asks them to save."""
        return self.what.startswith(_STOP_SIGNALS)

    @property
    def exited(self) -> bool:
        """Whether the ranks left by themselves with an error code."""
        return self.what.startswith("Exited")


def parse_srun_log(text: str) -> list[TaskEnd]:
    """Return the ends that srun reports, in the order written."""
    ends: list[TaskEnd] = []
    aborted = False
    for line in text.splitlines():
        if match := _TASK_LINE.search(line):
            ranks = _numbers(match["tasks"])
            ends.append(TaskEnd(node=match["node"], ranks=ranks, what=match["what"].strip(), after_abort=aborted))
        elif match := _NODE_FAILURE.search(line):
            ends += [
                TaskEnd(node=node, ranks=(), what="Node failure", after_abort=aborted)
                for node in expand(match["nodes"].rstrip(".,"))
            ]
        elif _ABORT.search(line):
            aborted = True
    return ends


def _numbers(text: str) -> tuple[int, ...]:
    found: list[int] = []
    for part in text.strip("[]").split(","):
        first, _, last = part.partition("-")
        found.extend(range(int(first), int(last or first) + 1))
    return tuple(found)
