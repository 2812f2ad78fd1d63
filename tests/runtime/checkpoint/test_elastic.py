"""One run over changing numbers of ranks; `scripts/elastic.py` is the long form, through the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpjob.core.run_dir import AttemptDir, RunDir
from hpjob.plan.planner import make_plan
from hpjob.recipe.load import load_recipe
from hpjob.recipe.model import Recipe
from hpjob.runtime.data.sample_log import sample_log_path
from hpjob.slurm.attempt_begin import Start, begin, read_plan
from hpjob.topology.load import local_topology
from tests.support.faults import Fault, before_step, terminate_self
from tests.support.run_folder import FORKSERVER, Attempt, Run, _be_rank, rank_env, read_lines, write_tokens

pytestmark = pytest.mark.distributed
STEPS = 8


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    data = write_tokens(tmp_path_factory.mktemp("made") / "data", num_tokens=40_000, vocab_size=1024)
    small = ("num_hidden_layers=2", "hidden_size=32", "intermediate_size=64")
    return load_recipe(
        "tiny",
        [
            *(f"model.{value}" for value in small),
            f"data.path={data}",
            "data.log_samples=true",
            f"training.steps={STEPS}",
            "checkpoint.every_steps=100",
            # Half the microbatches of the recipe: four ranks are the plan, two are not.
            "parallel.microbatch_size=8",
        ],
    )


def start(run: Run, nodes: int, fault: Fault | None = None) -> Attempt:
    """Begin an attempt as the launcher does, one rank a node, and start its ranks."""
    topology = local_topology(nodes, 1)
    addresses = {node.name: "127.0.0.1" for node in topology.nodes}
    facts = dict(job_id="1", executor="local", restart_count=0, own_node=topology.nodes[0].name, site={})
    made = begin(run.dir, Start(topology=topology, addresses=addresses, **facts))  # type: ignore[arg-type]
    attempt = Attempt(AttemptDir(made.path))
    for rank in range(len(made.hosts.read_text().split())):
        arguments = (run.dir.path, made.path, rank, rank_env(made, rank), fault)
        process = FORKSERVER.Process(target=_be_rank, args=arguments)
        process.start()
        attempt.ranks.append(process)
    return attempt


def create(path: Path, recipe: Recipe) -> Run:
    run = Run.create(path, recipe)
    run.dir.plan.write_text(make_plan(recipe, local_topology(4, 1), gpus_per_node=1).model_dump_json())
    return run


def samples(run: RunDir, metrics: list[dict[str, int]]) -> Iterator[list[int]]:
    """Yield the samples of every step, from the attempt whose step counts."""
    for line in metrics:
        attempt = run.attempt(line["attempt"])
        step: list[int] = []
        for rank in range(read_plan(attempt.plan).degrees.dp):
            lines = read_lines(sample_log_path(attempt, rank))
            (found,) = [entry["samples"] for entry in lines if entry["step"] == line["step"]]
            step += found
        yield step


def test_four_ranks_then_two_then_four_train_like_four(tmp_path: Path, recipe: Recipe) -> None:
    plain = create(tmp_path / "plain", recipe)
    assert start(plain, 4).wait() == [0] * 4

    run = create(tmp_path / "run", recipe)
    for nodes, stop in ((4, 3), (2, 6)):
        attempt = start(run, nodes, before_step(terminate_self, rank=0, step=stop))
        assert attempt.wait() == [0] * nodes, attempt.log()
        assert attempt.outcome()["step"] == stop
    attempt = start(run, 4)
    assert attempt.wait() == [0] * 4, attempt.log()

    plans = [read_plan(attempt.plan) for attempt in run.dir.attempt_list()]
    assert [plan.degrees.world_size for plan in plans] == [4, 2, 4]
    assert {plan.global_batch_size for plan in plans} == {16}
    assert dict(run.losses()) == pytest.approx(dict(plain.losses()), rel=1e-5)
    assert [line["step"] for line in run.metrics()] == list(range(1, STEPS + 1))

    seen = list(samples(run.dir, run.metrics()))
    assert seen == list(samples(plain.dir, plain.metrics()))
    flat = [sample for step in seen for sample in step]
    assert len(flat) == len(set(flat)) == 16 * STEPS
    assert json.loads(run.dir.finished.read_text())["step"] == STEPS
