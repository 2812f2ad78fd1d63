"""The whole chain as a person uses it: the `hpjob` command, a real Slurm, the real runtime."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from hpjob.core.run_dir import RunDir
from hpjob.core.run_records import read_json
from tests.support.corpus import write_corpus
from tests.support.runs import REPOSITORY, trained_in
from tests.support.slurm_sandbox import SlurmSandbox, processes_of, wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.distributed, pytest.mark.timeout(1800)]
STEPS = 24
HELD = REPOSITORY / "tests" / "support" / "held_ranks"
PATIENCE_S = 600.0


def hpjob(slurm: SlurmSandbox, folder: Path, *arguments: str, **variables: str) -> str:
    """Run a command in ``folder`` and return what it prints."""
    script = f'cd "$0" && exec {sys.executable} -m hpjob "$@"'
    environment = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"} | variables
    return slurm.run("bash", "-c", script, folder, *arguments, env=environment, timeout=PATIENCE_S).stdout


def submit(slurm: SlurmSandbox, folder: Path, name: str, **variables: str) -> RunDir:
    """Two nodes with two ranks each: a pipeline and two data-parallel ranks that share the optimizer's state."""
    settings = ["data.path=corpus", f"training.steps={STEPS}", "checkpoint.every_steps=7"]
    settings += ["job.gpus_per_node=2", "parallel.tp_size=1"]
    options = [word for setting in settings for word in ("--set", setting)]
    hpjob(slurm, folder, "submit", "--nodes", "2", "--recipe", "tiny", "--name", name, *options, **variables)
    return RunDir(folder / "runs" / name)


def steps_and_losses(run: RunDir) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in run.metrics.read_text(encoding="utf-8").splitlines()]
    return [(line["step"], line["loss"]) for line in lines]


def saved(run: RunDir, attempt: int) -> bool:
    """Whether an attempt ended; a run that failed is told at once, not after all patience."""
    end = read_json(run.attempt(attempt).end)
    if end is not None and end["decision"] == "stop":
        pytest.fail(f"attempt {attempt} ended: {end['reason']}\n{run.attempt(attempt).outcome.read_text()}")
    return end is not None


def weights(run: RunDir) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run.checkpoint(STEPS) / "data").glob("*.distcp")}


def test_preempted_twice_or_never_gives_the_same_bits(slurm_sandbox: SlurmSandbox, tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", num_tokens=100_000)
    held = {"PYTHONPATH": f"{HELD}{os.pathsep}{REPOSITORY}", "HPJOB_HANG_FLOOR_S": "600"}
    run = submit(slurm_sandbox, tmp_path, "preempted", **held)
    for attempt in (0, 1):
        wait_for(
            lambda attempt=attempt: trained_in(run, attempt) >= 4 or saved(run, attempt),
            f"attempt {attempt} trains",
            PATIENCE_S,
        )
        urgent = ("--partition=urgent", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
        slurm_sandbox.submit(*urgent)
        wait_for(lambda attempt=attempt: saved(run, attempt), f"attempt {attempt} saved", PATIENCE_S)
    wait_for(run.finished.exists, "the run is finished", PATIENCE_S)
    assert [trained_in(run, attempt) > 0 for attempt in range(4)] == [True, True, True, False]
    undisturbed = submit(slurm_sandbox, tmp_path, "undisturbed")
    wait_for(undisturbed.finished.exists, "the other run is finished", PATIENCE_S)
    assert len(undisturbed.attempt_list()) == 1
    assert [step for step, _ in steps_and_losses(run)] == list(range(1, STEPS + 1))
    assert steps_and_losses(run) == steps_and_losses(undisturbed)
    assert len(weights(run)) == 4 and weights(run) == weights(undisturbed)
    wait_for(lambda: not processes_of(run.path), "nothing of the run is left")
    assert json.loads(hpjob(slurm_sandbox, tmp_path, "status", "preempted", "--json"))["state"] == "finished"
