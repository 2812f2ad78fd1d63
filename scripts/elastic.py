#!/usr/bin/env python3
"""Trains one run on changing numbers of nodes and compares it with one rank that nothing disturbed.

    scripts/elastic.py --nodes 4,2,4,1 --ranks-per-node 2

Everything goes through the command line: `hpjob submit`, `hpjob cancel` in mid-training, `hpjob resume --nodes N`,
with the local executor and virtual nodes. The undisturbed rank trains in this process, without a checkpoint. Losses
must agree within fp32 parity, every step must be there once, and the samples of every step, as the data-parallel
ranks logged them, must be those of the undisturbed rank, each once.
The last line reads ``elastic: ok``; exit code 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hpjob.core.run_dir import RunDir
from hpjob.core.run_records import read_json, read_json_lines
from hpjob.runtime.data.sample_log import sample_log_path
from hpjob.slurm.attempt_begin import read_plan

REPOSITORY = Path(__file__).resolve().parent.parent
PARITY = 1e-5
"""Relative difference of a loss in fp32 over different layouts."""
PATIENCE_S = 900.0
LEAST_STEPS = 3
"""Of a part; it gets some more while it is cancelled."""
LOOK_EVERY_S = 5.0
"""Between questions whether the run lives; its steps are looked at all the time."""


class Failed(Exception):
    """The run did not do what it should."""


def hpjob(*arguments: str, cwd: Path) -> str:
    """Run a command; return what it printed."""
    env = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "hpjob", *arguments]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failed(f"hpjob {' '.join(arguments)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def last_step(run: RunDir) -> int:
    """Return the newest step that was trained."""
    return max((line["step"] for line in read_json_lines(run.metrics)), default=0)


def wait_until(run: RunDir, step: int | None, work: Path) -> None:
    """Wait for a step of the run, or for its end."""
    deadline, look = time.monotonic() + PATIENCE_S, 0.0
    while time.monotonic() < deadline:
        if step is not None and last_step(run) >= step:
            return
        if time.monotonic() > look:
            look = time.monotonic() + LOOK_EVERY_S
            state = json.loads(hpjob("status", run.name, "--json", cwd=work))["state"]
            if state not in ("running", "waiting"):
                if step is None or last_step(run) >= step:
                    return
                raise Failed(f"{run.name} is {state} before step {step}\n{hpjob('logs', run.name, cwd=work)}")
        time.sleep(0.1)
    raise Failed(f"{run.name} did not get to {'its end' if step is None else f'step {step}'} in {PATIENCE_S:.0f} s")


def submit(work: Path, name: str, nodes: int, options: argparse.Namespace) -> RunDir:
    """Start a run of the tiny recipe."""
    settings = (
        "data.path=data",
        "data.log_samples=true",
        f"training.steps={options.steps}",
        f"job.gpus_per_node={options.ranks_per_node}",
        "checkpoint.every_steps=1000",
        "checkpoint.ephemeral_every_steps=5",
    )
    overrides = [word for setting in settings for word in ("--set", setting)]
    base = ["submit", "--recipe", "tiny", "--name", name, "--nodes", str(nodes), "--executor", "local"]
    hpjob(*base, *overrides, cwd=work)
    return RunDir(work / "runs" / name)


def train_elastically(work: Path, nodes: list[int], options: argparse.Namespace) -> RunDir:
    """Train in as many parts as there are numbers of nodes."""
    run = submit(work, "elastic", nodes[0], options)
    for count in nodes[1:]:
        wait_until(run, last_step(run) + LEAST_STEPS, work)
        hpjob("cancel", run.name, cwd=work)
        wait_until(run, None, work)
        print(hpjob("resume", run.name, "--nodes", str(count), "--yes", cwd=work).strip(), flush=True)
    wait_until(run, None, work)
    if not run.finished.exists():
        raise Failed(f"the run did not finish\n{hpjob('status', run.name, cwd=work)}")
    return run


def samples_of_steps(run: RunDir) -> list[list[int]]:
    """Return the samples of every step, from the attempt whose step counts.

    Raises:
        Failed: A step was not logged once.
    """
    logged: dict[tuple[int, int], dict[int, list[int]]] = {}
    for attempt in run.attempt_list():
        for rank in range(read_plan(attempt.plan).degrees.dp):
            for line in read_json_lines(sample_log_path(attempt, rank)):
                logged.setdefault((attempt.index, line["step"]), {})[rank] = line["samples"]
    result = []
    for line in read_json_lines(run.metrics):
        by_rank = logged.get((line["attempt"], line["step"]), {})
        if len(by_rank) != read_plan(run.attempt(line["attempt"]).plan).degrees.dp:
            raise Failed(f"step {line['step']}: not every data-parallel rank logged its samples")
        result.append([sample for _, part in sorted(by_rank.items()) for sample in part])
    return result


def train_alone(run: RunDir) -> list[tuple[float, list[int]]]:
    """Train the recipe of a run on one rank, in this process; return loss and samples of every step."""
    import torch
    import torch.distributed as dist

    from hpjob.plan.replan import replan
    from hpjob.recipe.load import load_recipe
    from hpjob.runtime.data.batches import BatchReader
    from hpjob.runtime.data.tokens import TokenDataset
    from hpjob.runtime.engine import Engine
    from hpjob.runtime.mesh import build_mesh
    from hpjob.topology.load import local_topology

    torch.set_num_threads(1)
    recipe, device = load_recipe(str(run.recipe), []), torch.device("cpu")
    plan = replan(recipe, local_topology(1, 1), previous=read_plan(run.plan), gpus_per_node=1).plan
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    data = TokenDataset(recipe)
    engine, batches = Engine(plan, recipe, build_mesh(plan, "cpu"), device), BatchReader(data, 0, 1, device)
    steps = range(1, recipe.training.steps + 1)
    result = [(engine.train_step(batches.read(step), step).loss, data.sample_indices(step, 0, 1)) for step in steps]
    dist.destroy_process_group()
    return result


def compare(run: RunDir, alone: list[tuple[float, list[int]]]) -> None:
    """Compare losses and samples.

    Raises:
        Failed: They differ.
    """
    lines: list[dict[str, Any]] = read_json_lines(run.metrics)
    if [line["step"] for line in lines] != list(range(1, len(alone) + 1)):
        raise Failed("steps are missing or doubled")
    worst = max(abs(line["loss"] - loss) / abs(loss) for line, (loss, _) in zip(lines, alone, strict=True))
    print(f"losses: {len(alone)} steps, largest relative difference {worst:.1e} (allowed {PARITY:g})")
    ours, theirs = samples_of_steps(run), [samples for _, samples in alone]
    flat = [sample for step in ours for sample in step]
    order = "equal" if ours == theirs else "DIFFERS"
    print(f"samples: {len(flat)} trained on, {len(set(flat))} different ones, order {order}")
    if worst > PARITY:
        raise Failed("losses differ by more than fp32 parity")
    if ours != theirs or len(set(flat)) != len(flat):
        raise Failed("the samples are not those of the undisturbed rank, each once")


def write_data(folder: Path) -> None:
    """Write token files with some structure, more than the run needs."""
    from tests.support.run_folder import write_tokens

    write_tokens(folder, num_tokens=1_000_000, vocab_size=1024)


def main() -> int:
    """Run and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="4,2,4,1", help="numbers of virtual nodes, in order (default: %(default)s)")
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--steps", type=int, default=120)
    options = parser.parse_args()
    nodes = [int(count) for count in options.nodes.split(",")]
    with tempfile.TemporaryDirectory(prefix="elastic-") as folder:
        work = Path(folder)
        write_data(work / "data")
        try:
            run = train_elastically(work, nodes, options)
            for attempt in run.attempt_list():
                step, plan = (read_json(attempt.outcome) or {}).get("step"), read_plan(attempt.plan)
                print(f"attempt {attempt.index}: {plan.degrees.world_size} ranks, {plan.summary}; to step {step}")
            if len(run.attempt_list()) != len(nodes):
                raise Failed("the run was finished before its last part: give it more --steps")
            compare(run, train_alone(run))
        except Failed as error:
            print(f"elastic: {error}")
            return 1
    print("elastic: ok")
    return 0


if __name__ == "__main__":
    sys.exit(main())
