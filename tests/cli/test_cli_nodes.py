"""`hpjob nodes`: what is remembered of nodes, and taking them back."""

from __future__ import annotations

import json
import time

from hpjob.slurm.bad_nodes import NodeMemory, Strike
from tests.cli.conftest import Cli


def remember(node: str, *attempts: int) -> None:
    NodeMemory("fake").add(
        [
            Strike(node=node, time=time.time(), kind="hang", run="/runs/a", attempt=attempt, what="rank 3 hangs")
            for attempt in attempts
        ]
    )


def test_nothing_is_known_at_first(cli: Cli) -> None:
    assert "no node is known to have failed" in cli("nodes").out
    assert json.loads(cli("nodes", "--json").out) == {"version": 1, "clusters": []}


def test_nodes_are_shown_and_taken_back(cli: Cli) -> None:
    remember("n3", 0, 1)
    remember("n4", 0)
    shown = cli("nodes").out
    assert "fake  n3  left out" in shown and "fake  n4  watched" in shown
    assert "hang, attempt 1 of /runs/a: rank 3 hangs" in shown
    nodes = json.loads(cli("nodes", "--json").out)["clusters"][0]["nodes"]
    assert [(entry["node"], entry["left_out"], len(entry["failures"])) for entry in nodes] == [
        ("n3", True, 2),
        ("n4", False, 1),
    ]
    assert cli("nodes", "forget", "n[3]").out == "forgot n3\n"
    assert "n3" not in cli("nodes").out
    assert cli("nodes", "forget", "--all").out == "forgot n4\n"


def test_forgetting_what_is_not_known(cli: Cli) -> None:
    for arguments in (("forget", "n9"), ("forget",), ("forget", "n9", "--all")):
        result = cli("nodes", *arguments)
        assert result.code == 2 and "hint: " in result.err
