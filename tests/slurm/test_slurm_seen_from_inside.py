"""What the nodes of a job say of themselves is joined with Slurm's view, and never ends the job."""

import pytest

from hpjob.core.errors import EnvironmentProblemError
from hpjob.slurm.seen_from_inside import seen_from_inside
from hpjob.topology.detect import cluster
from hpjob.topology.model import Gpu, Island, Node, Topology

SLURM = Topology(
    nodes=tuple(Node(name=name, gpus=tuple(Gpu(index=i) for i in range(4))) for name in ("n2", "n1")), source="slurm"
)


def answer(monkeypatch: pytest.MonkeyPatch, found: Topology | Exception) -> None:
    def detect(*, known: Topology, timeout_s: float) -> Topology:
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(cluster, "detect_allocation", detect)


def test_nodes_keep_slurms_order_and_tell_their_islands(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = tuple(Island(kind="nvlink", gpus=pair, all_to_all=True) for pair in ((0, 2), (1, 3)))
    nodes = tuple(node.model_copy(update={"islands": pairs}) for node in reversed(SLURM.nodes))
    answer(monkeypatch, SLURM.model_copy(update={"nodes": nodes}))
    found = seen_from_inside(SLURM, 4)
    assert [node.name for node in found.nodes] == ["n2", "n1"]
    assert all(node.islands == pairs for node in found.nodes)


@pytest.mark.parametrize("error", [EnvironmentProblemError("no node answered", hint="-"), RuntimeError("driver")])
def test_a_failing_detector_leaves_slurms_view_and_a_note(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    answer(monkeypatch, error)
    found = seen_from_inside(SLURM, 4)
    assert found.nodes == SLURM.nodes
    assert any(note.startswith("only what Slurm knows of the nodes") for note in found.notes)


def test_a_node_that_sees_too_few_gpus_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    few = SLURM.nodes[0].model_copy(update={"gpus": SLURM.nodes[0].gpus[:3]})
    answer(monkeypatch, SLURM.model_copy(update={"nodes": (few, SLURM.nodes[1])}))
    found = seen_from_inside(SLURM, 4)
    assert len(found.nodes[0].gpus) == 4
    assert len(seen_from_inside(SLURM, 2).nodes[0].gpus) == 3
    assert "n2: sees 3 GPUs, the plan needs 4; Slurm is believed" in found.notes


def test_asking_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, RuntimeError("asked all the same"))
    monkeypatch.setenv("HPJOB_DETECT_TIMEOUT_S", "0")
    assert seen_from_inside(SLURM, 4) is SLURM
