"""From the reports of all ranks to what is wrong, and whether that is a node's matter or the person's."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from hpjob.runtime.health.node_check import NodeReport

_CLOCK_WARN_S, _CLOCK_FAIL_S = 2.0, 30.0
_SHOWN = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One check that failed."""

    check: str
    message: str
    hint: str
    fault: Literal["node", "person"]
    """``node`` = others do not have it: go on without it; ``person`` = it would fail anywhere."""
    ranks: tuple[int, ...] = ()
    """Ranks of the node in question; empty when all are concerned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeVerdict:
    """What the preflight found."""

    problems: tuple[Problem, ...] = ()
    warnings: tuple[str, ...] = ()

    def dump(self) -> str:
        """Return the verdict as text for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> NodeVerdict:
        """Read what :meth:`dump` wrote."""
        document = json.loads(text)
        problems = tuple(Problem(**entry | {"ranks": tuple(entry["ranks"])}) for entry in document["problems"])
        return cls(problems=problems, warnings=tuple(document["warnings"]))


def judge(
    reports: Sequence[NodeReport],
    *,
    need_gib: Mapping[int, float],
    asked_at: float,
    answered_at: Mapping[int, float],
    unseen: Mapping[str, str],
) -> NodeVerdict:
    """Compare the reports of all ranks.

    Args:
        reports: One a rank, by rank.
        need_gib: GPU memory that the plan needs, by rank.
        asked_at: When rank 0 asked for the time, by its clock.
        answered_at: When each rank's answer was read, by rank 0's clock.
        unseen: Node -> why rank 0 does not see its file.
    """
    problems = [*_devices(reports), *_memory(reports, need_gib), *_files(reports, unseen), *_versions(reports)]
    late, warnings = _clocks(reports, asked_at, answered_at)
    return NodeVerdict(problems=tuple(problems + late), warnings=tuple(warnings))


def _devices(reports: Sequence[NodeReport]) -> list[Problem]:
    hint = "`nvidia-smi` on the node shows its GPUs; tell the administrator of the cluster"
    problems = [
        _of_node(report, "device", report.device_problem, hint)
        for report in reports
        if report.device_problem is not None
    ]
    kinds = Counter(report.device for report in reports)
    if len(kinds) > 1:
        problems += [
            _of_node(report, "device", "torch finds no GPU, while other nodes have theirs", hint)
            for report in reports
            if report.device == "cpu"
        ]
    return _once_a_node(problems, reports)


def _memory(reports: Sequence[NodeReport], need_gib: Mapping[int, float]) -> list[Problem]:
    problems = []
    for report in reports:
        need = need_gib.get(report.rank, 0.0)
        if report.free_gib is None or report.total_gib is None or report.free_gib >= need:
            continue
        if report.total_gib < need:
            text = f"the plan needs {need:.1f} GiB a GPU, this one has {report.total_gib:.1f}"
            problems.append(
                Problem(
                    check="memory", message=f"{report.node}: {text}", hint="plan for this kind of GPU", fault="person"
                )
            )
        else:
            text = f"only {report.free_gib:.1f} of {report.total_gib:.1f} GiB are free, the plan needs {need:.1f}"
            hint = "something else uses the GPU: `nvidia-smi` on the node shows what was left behind"
            problems.append(_of_node(report, "memory", text, hint))
    return _once_a_node(problems, reports)


def _files(reports: Sequence[NodeReport], unseen: Mapping[str, str]) -> list[Problem]:
    found = {report.node: report.file_problem for report in reports if report.file_problem is not None}
    found = {**{node: why for node, why in unseen.items()}, **found}
    nodes = {report.node for report in reports}
    if not found:
        return []
    hint = "the run folder has to be on storage that all nodes share, with space and permission to write"
    if set(found) == nodes:
        return [Problem(check="file system", message=next(iter(found.values())), hint=hint, fault="person")]
    first = {report.node: report for report in reversed(reports)}
    problems = [_of_node(first[node], "file system", why, hint) for node, why in found.items()]
    return _once_a_node(problems, reports)


def _versions(reports: Sequence[NodeReport]) -> list[Problem]:
    reference = reports[0]
    for report in reports[1:]:
        differing = [
            f"{name} is {report.versions.get(name, 'missing')} on {report.node}, {version} on {reference.node}"
            for name, version in reference.versions.items()
            if report.versions.get(name) != version
        ]
        if differing:
            hint = "install one environment on storage that all nodes share, and submit from there"
            return [Problem(check="versions", message="; ".join(differing[:_SHOWN]), hint=hint, fault="person")]
    return []


def _clocks(
    reports: Sequence[NodeReport], asked_at: float, answered_at: Mapping[int, float]
) -> tuple[list[Problem], list[str]]:
    """The clock was read between question and answer; what lies outside of that is wrong at least by so much."""
    worst: dict[str, tuple[float, NodeReport]] = {}
    for report in reports:
        ahead = report.clock - answered_at.get(report.rank, report.clock)
        behind = asked_at - report.clock
        off = ahead if ahead > 0 else -behind if behind > 0 else 0.0
        if abs(off) > abs(worst.get(report.node, (0.0, report))[0]):
            worst[report.node] = (off, report)
    problems, warnings = [], []
    for node, (off, report) in worst.items():
        text = f"its clock is {abs(off):.1f} s {'ahead' if off > 0 else 'behind'} of {reports[0].node}"
        if abs(off) >= _CLOCK_FAIL_S:
            problems.append(_of_node(report, "clock", text, "its time service (chrony, ntp) does not work"))
        elif abs(off) >= _CLOCK_WARN_S:
            warnings.append(f"{node}: {text}; times in its records are off by that")
    return _once_a_node(problems, reports), warnings


def _of_node(report: NodeReport, check: str, text: str, hint: str) -> Problem:
    return Problem(check=check, message=f"{report.node}: {text}", hint=hint, fault="node", ranks=(report.rank,))


def _once_a_node(problems: Sequence[Problem], reports: Sequence[NodeReport]) -> list[Problem]:
    """Keep the first problem of each node; one that all of several nodes have is the person's."""
    node_of = {report.rank: report.node for report in reports}
    nodes = set(node_of.values())
    kept: dict[str, Problem] = {}
    for problem in problems:
        kept.setdefault(node_of[problem.ranks[0]] if problem.ranks else "", problem)
    if len(nodes) > 1 and set(kept) >= nodes:
        first = next(iter(kept.values()))
        return [
            Problem(check=first.check, message=f"{first.message}; so on all nodes", hint=first.hint, fault="person")
        ]
    return list(kept.values())
