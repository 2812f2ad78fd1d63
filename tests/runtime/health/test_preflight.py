"""The preflight with real ranks: quick where all is well, and the right rank says what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpjob.core.run_records import first_failure, read_failures
from tests.support.faults import broken_device, other_versions
from tests.support.run_folder import Run, small_recipe, write_tokens

pytestmark = pytest.mark.distributed


@pytest.fixture
def run(tmp_path: Path) -> Run:
    data = write_tokens(tmp_path / "data")
    return Run.create(tmp_path / "run", small_recipe(data, training={"steps": 2}))


def test_sound_ranks_train_and_the_findings_are_kept(run: Run) -> None:
    attempt = run.start(tp=2, dp=2)
    assert attempt.wait() == [0] * 4, attempt.log()
    events = {event["event"]: event for event in attempt.events()}
    assert events["preflight"]["warnings"] == []
    assert set(events["links"]["rates"]) == {"dp", "tp"}
    assert events["links"]["rates"]["tp"]["usual_gb_s"] > 0
    assert not (attempt.dir.path / "preflight").exists()


def test_a_broken_device_is_its_nodes_matter(run: Run) -> None:
    attempt = run.start(dp=2, fault=broken_device)
    assert attempt.wait() == [3, 3], attempt.log()
    first = first_failure(read_failures(attempt.dir))
    assert first is not None
    assert (first.rank, first.node, first.kind) == (1, "local-1", "preflight")
    assert "preflight, device: local-1: cpu does not work: uncorrectable" in first.message
    assert "nvidia-smi" in first.message


def test_another_environment_is_the_persons_matter(run: Run) -> None:
    attempt = run.start(dp=2, fault=other_versions)
    assert attempt.wait() == [2, 3], attempt.log()
    first = first_failure(read_failures(attempt.dir))
    assert first is not None
    assert (first.rank, first.kind) == (0, "exception")
    assert "torch is 1.0 on local-1" in first.message


def test_it_can_be_left_out(run: Run) -> None:
    attempt = run.start(dp=2, fault=broken_device, env={"HPJOB_PREFLIGHT": "0"})
    assert attempt.wait() == [0, 0], attempt.log()
