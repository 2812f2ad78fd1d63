"""A rank that fails ends the attempt: everywhere, soon, with the first failure named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpjob.core.run_dir import AttemptDir
from hpjob.core.run_records import first_failure, read_failures
from tests.support.faults import before_step, kill_self, raise_error
from tests.support.run_folder import Run, rank_env, small_recipe, write_tokens

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("made") / "data")


@pytest.fixture
def run(tmp_path: Path, data: Path) -> Run:
    return Run.create(tmp_path / "run", small_recipe(data, checkpoint={"every_steps": 2}))


def test_rank_that_raises_is_the_first_failure(run: Run) -> None:
    fault = before_step(raise_error, rank=2, step=4, after=run.dir.checkpoint(2))
    attempt = run.start(tp=2, pp=2, fault=fault)
    assert all(code not in (0, None, -9) for code in attempt.wait())
    failures = read_failures(attempt.dir)
    first = first_failure(failures)
    assert first is not None
    assert (first.rank, first.node, first.kind, first.step) == (2, "local-1", "exception", 4)
    assert (first.exception, first.message) == ("ValueError", "a made-up fault")
    assert "in raise_error" in (first.traceback or "")
    assert {failure.kind for failure in failures if failure.rank != 2} == {"peer-lost"}
    assert "in raise_error" in attempt.log(2)
    assert attempt.outcome()["kind"] == "failed"
    assert attempt.outcome()["step"] == 2


def test_killed_rank_takes_the_others_with_it(run: Run) -> None:
    attempt = run.start(tp=2, pp=2, fault=before_step(kill_self, rank=1, step=3))
    codes = attempt.wait()
    assert codes[1] == -9
    assert all(code not in (0, None, -9) for rank, code in enumerate(codes) if rank != 1)
    failures = read_failures(attempt.dir)
    assert {failure.rank for failure in failures} == {0, 2, 3}
    assert {failure.kind for failure in failures} == {"peer-lost"}


def test_killed_rank_zero_takes_the_others_with_it(run: Run) -> None:
    attempt = run.start(pp=2, fault=before_step(kill_self, rank=0, step=3))
    codes = attempt.wait()
    assert codes[0] == -9
    assert codes[1] not in (0, None, -9)


def test_rank_that_fails_before_it_joins_ends_those_who_wait(run: Run) -> None:
    attempt = run.start(dp=2, env={"HPJOB_NODE_NAME": "elsewhere"}, fault=only_rank_1_is_elsewhere)
    codes = attempt.wait()
    assert codes == [3, 3], attempt.log()
    first = first_failure(read_failures(attempt.dir))
    assert first is not None
    assert (first.rank, first.step) == (1, 0)
    assert "rank 1 runs on elsewhere" in first.message


def only_rank_1_is_elsewhere(rank: int) -> None:
    if rank == 0:
        os.environ["HPJOB_NODE_NAME"] = "local-0"


def test_missing_data_are_found_without_torch(run: Run, tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path / "nowhere")
    broken = Run.create(tmp_path / "broken", recipe)
    attempt = broken.begin()
    result = run_module(broken, attempt.dir, block_torch=True)
    assert result.returncode == 2
    assert "nowhere does not exist" in result.stderr
    assert "hpjob data prepare" in attempt.failures()[0]["message"]


def test_module_trains_without_any_launcher(tmp_path: Path, data: Path) -> None:
    run = Run.create(tmp_path / "run", small_recipe(data, training={"steps": 3}))
    result = run_module(run, run.begin().dir)
    assert result.returncode == 0, result.stderr
    assert "step 3/3  loss" in result.stderr
    assert run.dir.finished.exists()


def test_plan_for_another_world_is_refused(run: Run) -> None:
    attempt = run.begin(dp=2)
    attempt.dir.hosts.write_text("local-0\n")
    result = run_module(run, attempt.dir, block_torch=True)
    assert result.returncode == 2
    assert "is for 2 ranks, the attempt has 1" in result.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"HPJOB_RANK": "7"}, "this is rank 7, but"),
        ({"HPJOB_RANK": "x"}, "HPJOB_RANK='x' is no number"),
        ({"HPJOB_NODE_NAME": ""}, "neither HPJOB_NODE_NAME nor SLURMD_NODENAME is set"),
    ],
)
def test_wrong_variables_are_named(run: Run, change: dict[str, str], message: str) -> None:
    result = run_module(run, run.begin().dir, env=change, block_torch=True)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def run_module(
    run: Run, attempt: AttemptDir, *, env: dict[str, str] | None = None, block_torch: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m hpjob.runtime`` as rank 0; with ``block_torch`` any import of torch fails."""
    start = "import sys, runpy; sys.modules['torch'] = None; " if block_torch else "import runpy; "
    start += "runpy.run_module('hpjob.runtime', run_name='__main__', alter_sys=True)"
    arguments = ["--run-dir", str(run.dir.path), "--attempt-dir", str(attempt.path)]
    root = str(Path(__file__).parents[3])
    variables = {**os.environ, **rank_env(attempt, 0), "PYTHONPATH": root, **(env or {})}
    return subprocess.run(
        [sys.executable, "-c", start, *arguments], capture_output=True, text=True, check=False, env=variables
    )
