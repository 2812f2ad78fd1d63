"""The shape of a sandbox: what ``up`` was asked for."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

from sandbox.errors import USER_INPUT, SandboxError

TOPOLOGIES = ("tree", "block")
PREEMPT_MODES = ("requeue", "cancel", "suspend", "off")


@dataclass(frozen=True)
class Options:
    """Nodes, switches and preemption of a sandbox.

    Attributes:
        nodes: Virtual nodes, named n1, n2, ….
        gpus: GPUs a node.
        gpu_type: Type in ``--gres=gpu:TYPE:N``.
        cpus: CPUs a node; they may be more than the machine has.
        leafs: Leaf switches (or blocks); nodes are shared out evenly, in order.
        topology: What links the nodes: a ``tree`` of switches, or a ``block`` of nodes for each leaf.
        release: Code name of the Debian whose Slurm runs; empty = this machine's own Slurm.
        grace: GraceTime of partition ``batch``, s.
        preempt_mode: What happens to a preempted job of partition ``batch``.
        kill_wait: KillWait, s: time between SIGTERM and SIGKILL.
        requeue_delay: For how long a requeued job waits at least, s.
        conf: Further slurm.conf lines; a line with a known key replaces the built-in one.
    """

    nodes: int = 4
    gpus: int = 8
    gpu_type: str = "h100"
    cpus: int = 64
    leafs: int = 2
    topology: str = "tree"
    release: str = ""
    grace: int = 30
    preempt_mode: str = "requeue"
    kill_wait: int = 5
    requeue_delay: int = 6
    conf: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise :class:`SandboxError` with all mistakes at once."""
        problems = []
        if not 1 <= self.nodes <= 64:
            problems.append(f"--nodes is {self.nodes}, it can be 1 to 64")
        if not 0 <= self.gpus <= 64:
            problems.append(f"--gpus is {self.gpus}, it can be 0 to 64")
        if not 1 <= self.cpus <= 1024:
            problems.append(f"--cpus is {self.cpus}, it can be 1 to 1024")
        problems += self._wrong_leafs()
        if not 0 <= self.grace <= 65533:
            problems.append(f"--grace is {self.grace}, it can be 0 to 65533 seconds")
        if not 0 <= self.kill_wait <= 65533:
            problems.append(f"--kill-wait is {self.kill_wait}, it can be 0 to 65533 seconds")
        if not 2 <= self.requeue_delay <= 65533:
            problems.append(f"--requeue-delay is {self.requeue_delay}, it can be 2 to 65533 seconds")
        if not (self.gpu_type and self.gpu_type.replace("_", "").replace("-", "").isalnum()):
            problems.append(f"--gpu-type is {self.gpu_type!r}, it can hold letters, digits, '-' and '_'")
        problems += [f"--conf {line!r} is not KEY=VALUE" for line in self.conf if not conf_key(line)]
        if problems:
            raise SandboxError(
                "\n".join(problems), hint="`scripts/slurm-sandbox up --help` lists the options", exit_code=USER_INPUT
            )

    def _wrong_leafs(self) -> list[str]:
        if not 1 <= self.leafs <= max(self.nodes, 1):
            return [f"--leafs is {self.leafs}, it can be 1 to {max(self.nodes, 1)} (one node a switch)"]
        if self.topology == "block" and self.nodes % self.leafs:
            return [f"--leafs is {self.leafs}, which does not share {self.nodes} nodes into equal blocks"]
        return []

    def node_names(self) -> list[str]:
        return [f"n{index + 1}" for index in range(self.nodes)]

    def leaf_nodes(self) -> list[list[str]]:
        """Node names below each leaf switch."""
        names = self.node_names()
        bounds = [index * self.nodes // self.leafs for index in range(self.leafs + 1)]
        return [names[start:end] for start, end in pairwise(bounds)]

    def to_json(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Options:
        return Options(**{**data, "conf": tuple(data["conf"])})

    def differences(self, other: Options) -> list[str]:
        """Fields that differ, as ``--name here (there)``."""
        return [
            f"--{f.name.replace('_', '-')} {_shown(getattr(other, f.name))} (not {_shown(getattr(self, f.name))})"
            for f in fields(self)
            if getattr(self, f.name) != getattr(other, f.name)
        ]


def _shown(value: object) -> object:
    return "left out" if value in ("", ()) else value


def conf_key(line: str) -> str:
    """Return the key of a slurm.conf line in lower case, or an empty text if it has none."""
    key, equals, value = line.strip().partition("=")
    return key.strip().lower() if equals and value.strip() and key.strip().isidentifier() and "\n" not in line else ""
