"""The preflight's judgement: which node, which check, and whose matter it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hpjob.runtime.health.link_check import LinkRate, as_event, slow_links
from hpjob.runtime.health.node_check import NodeReport, check_device, find_probe, versions, write_probe
from hpjob.runtime.health.node_verdict import NodeVerdict, judge

HOSTS = ("n1", "n1", "n2", "n2", "n3", "n3")


def reports(**changes: dict[str, Any]) -> list[NodeReport]:
    """Sound reports of three nodes with two ranks each; ``n2={…}`` changes a node's, ``r3={…}`` a rank's."""
    found = []
    for rank, node in enumerate(HOSTS):
        values: dict[str, Any] = {"device": "cuda", "free_gib": 79.0, "total_gib": 80.0, "clock": 100.5}
        values |= {"versions": {"torch": "2.13", "python": "3.12"}}
        found.append(NodeReport(rank=rank, node=node, **(values | changes.get(node, {}) | changes.get(f"r{rank}", {}))))
    return found


def verdict(found: list[NodeReport], unseen: dict[str, str] | None = None, need_gib: float = 60.0) -> NodeVerdict:
    return judge(
        found,
        need_gib=dict.fromkeys(range(6), need_gib),
        asked_at=100.0,
        answered_at=dict.fromkeys(range(6), 101.0),
        unseen=unseen or {},
    )


def test_sound_nodes_pass() -> None:
    assert verdict(reports()) == NodeVerdict()


@pytest.mark.parametrize(
    ("changes", "check", "words"),
    [
        ({"r3": {"device_problem": "cuda:1 does not work: CUDA error"}}, "device", "n2: cuda:1 does not work"),
        ({"n2": {"device": "cpu"}}, "device", "n2: torch finds no GPU, while other nodes have theirs"),
        ({"r3": {"free_gib": 12.0}}, "memory", "n2: only 12.0 of 80.0 GiB are free, the plan needs 60.0"),
        ({"n2": {"file_problem": "/r cannot be written: Read-only file system"}}, "file system", "Read-only"),
        ({"n2": {"clock": 40.0}}, "clock", "n2: its clock is 60.0 s behind of n1"),
        ({"n2": {"clock": 171.0}}, "clock", "n2: its clock is 70.0 s ahead of n1"),
    ],
)
def test_what_one_node_has_is_its_own_matter(changes: dict[str, Any], check: str, words: str) -> None:
    (problem,) = verdict(reports(**changes)).problems
    assert (problem.check, problem.fault) == (check, "node")
    assert words in problem.message and problem.hint
    assert problem.ranks and {HOSTS[rank] for rank in problem.ranks} == {"n2"}


def test_a_file_that_is_not_seen() -> None:
    (problem,) = verdict(reports(), unseen={"n3": "a file that n3 wrote is not seen here"}).problems
    assert (problem.check, problem.fault, problem.ranks) == ("file system", "node", (4,))


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({node: {"device_problem": "no kernel image"} for node in ("n1", "n2", "n3")}, "device"),
        ({node: {"file_problem": "No space left on device"} for node in ("n1", "n2", "n3")}, "file system"),
        ({"n2": {"versions": {"torch": "2.11", "python": "3.12"}}}, "versions"),
        ({"n2": {"total_gib": 40.0, "free_gib": 39.0}}, "memory"),
    ],
)
def test_what_would_fail_anywhere_is_the_persons(changes: dict[str, Any], check: str) -> None:
    (problem,) = verdict(reports(**changes)).problems
    assert (problem.check, problem.fault, problem.ranks) == (check, "person", ())


def test_a_small_clock_error_is_only_said() -> None:
    found = verdict(reports(n2={"clock": 105.0}))
    assert not found.problems and "n2: its clock is 4.0 s ahead of n1" in found.warnings[0]


def test_a_verdict_survives_the_store() -> None:
    found = verdict(reports(r3={"device_problem": "x"}, n3={"clock": 105.0}))
    assert NodeVerdict.load(found.dump()) == found
    assert NodeReport.load(reports()[2].dump()) == reports()[2]


def test_the_own_device_works_and_versions_are_known() -> None:
    assert check_device(torch.device("cpu")) is None
    assert versions()["torch"] == torch.__version__


def test_a_file_is_written_and_found(tmp_path: Path) -> None:
    folder = tmp_path / "preflight"
    assert write_probe(folder, "n1") is None
    assert find_probe(folder, "n1") is None
    missing = find_probe(folder, "n2", within_s=0.0)
    assert missing is not None and "a file that n2 wrote" in missing
    (tmp_path / "file").write_text("")
    problem = write_probe(tmp_path / "file" / "x", "n1")
    assert problem is not None and "cannot be written" in problem


def rates(*values: float) -> list[LinkRate]:
    """Rates of dp groups of two ranks; group i has nodes n(i) and n(i+1)."""
    return [LinkRate(axis="dp", ranks=(i, i + 1), gb_s=value) for i, value in enumerate(values)]


def test_links_are_compared_among_groups() -> None:
    hosts = ["a", "b", "c", "d", "e"]
    assert slow_links(rates(40.0, 41.0, 39.0, 40.0), hosts) == ([], {})
    warnings, suspects = slow_links(rates(40.0, 41.0, 9.0, 40.0), hosts)
    assert "ranks 2 to 3 (c, d) exchanges 9 GB/s, others 40" in warnings[0] and not suspects
    _, suspects = slow_links(rates(40.0, 41.0, 39.0, 0.5), hosts)
    assert list(suspects) == ["e"]  # d works in the group before
    assert slow_links(rates(40.0, 0.5), hosts) == ([], {})  # two groups: which is the usual one?
    assert as_event(rates(40.0, 9.0, 40.0)) == {"dp": {"usual_gb_s": 40.0, "slowest_gb_s": 9.0}}
