"""``hpjob rehearse``: any rank of a plan alone on this machine's device, for its real memory and times."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from pathlib import Path

    from hpjob.plan.model import Plan
    from hpjob.plan.rehearsal import RankRehearsal
    from hpjob.recipe.model import Recipe


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(name="rehearse")(rehearse)


def rehearse(
    recipe: str = typer.Option(..., "--recipe", "-r", help="Packaged recipe or a .yaml file."),
    nodes: int | None = typer.Option(None, "--nodes", "-N", min=1, help="Number of nodes."),
    machine: str | None = typer.Option(None, "--machine", help="Plan for this kind of node instead of asking Slurm."),
    topology: str | None = typer.Option(None, "--topology", help="Plan for the nodes of this topology file."),
    gpus_per_node: int | None = typer.Option(None, "--gpus-per-node", min=1, help="Ranks a node; all GPUs by default."),
    partition: str | None = typer.Option(None, "--partition", "-p", help="Slurm partition; the recipe's by default."),
    rank: int | None = typer.Option(None, "--rank", min=0, help="Be this rank."),
    all_stages: bool = typer.Option(False, "--all-stages", help="Be the first rank of every stage; the default."),
    device: str | None = typer.Option(None, "--device", help="cpu or cuda; a GPU by default where there is one."),
    site: str | None = typer.Option(None, "--site", help="Put the times into this site file, which plans then use."),
    overrides: list[str] = typer.Option([], "--set", help="Change a value: --set training.lr=3e-4. Repeatable."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
) -> None:
    """Run single ranks of a plan on one device: memory and time of their own work, then the step's time."""
    import json

    from hpjob.cli.plan import find_topology
    from hpjob.core.errors import UserInputError
    from hpjob.plan.planner import make_plan
    from hpjob.plan.rehearsal_text import render_rehearsal
    from hpjob.plan.rehearsed_site import add_to_site, layers_of, refuse_site
    from hpjob.recipe.load import load_recipe

    if rank is not None and all_stages:
        raise UserInputError("--rank and --all-stages exclude each other", hint="give one of them")
    if device not in (None, "cpu", "cuda"):
        raise UserInputError(f"--device {device}: no such device", hint="use cpu or cuda")
    resolved = load_recipe(recipe, overrides)
    where = find_topology(nodes, machine, topology, partition or resolved.job.partition)
    plan = make_plan(resolved, where, gpus_per_node=gpus_per_node)
    if site:
        refuse_site(site, plan)
    reports = rehearse_ranks(plan, resolved, _ranks(plan, rank), device)
    if site:
        add_to_site(site, layers_of(plan, resolved, reports), f"{plan.recipe} on {reports[0].device}")
    if as_json:
        ranks = [report.model_dump(mode="json") for report in reports]
        typer.echo(json.dumps({"version": 1, "plan": plan.model_dump(mode="json"), "ranks": ranks}, indent=2))
        return
    typer.echo(render_rehearsal(plan, reports))
    if site:
        typer.echo(f"\nwritten to {site}; with it, plans are made from rehearsed times: hpjob plan --site {site} …")


def _ranks(plan: Plan, rank: int | None) -> list[int]:
    from hpjob.core.errors import UserInputError

    world = plan.degrees.world_size
    if rank is None:
        return list(range(0, world, world // plan.degrees.pp))
    if rank >= world:
        raise UserInputError(f"--rank {rank}: the plan has {world} ranks", hint=f"use 0 to {world - 1}")
    return [rank]


def rehearse_ranks(plan: Plan, recipe: Recipe, ranks: list[int], device: str | None) -> list[RankRehearsal]:
    """Rehearse ranks one after the other, each in a process of its own.

    Raises:
        EnvironmentProblemError: No torch, or a rank does not fit on the device.
        UserInputError: The runtime cannot run this plan.
    """
    import tempfile
    from importlib.util import find_spec
    from pathlib import Path

    from hpjob.core.errors import EnvironmentProblemError
    from hpjob.recipe.load import dump_recipe

    if find_spec("torch") is None or find_spec("transformers") is None:
        raise EnvironmentProblemError(
            "a rehearsal needs torch and transformers", hint="install them with: pip install 'hpjob[train]'"
        )
    with tempfile.TemporaryDirectory(prefix="hpjob-rehearse-") as name:
        folder = Path(name)
        (folder / "plan.json").write_text(plan.model_dump_json(), encoding="utf-8")
        (folder / "recipe.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
        reports = []
        for rank in ranks:
            reports.append(_one_rank(folder, rank, device))
            if len(ranks) > 1:
                said = f"rank {rank}: peak {reports[-1].peak_gib:.1f} GiB ({len(reports)} of {len(ranks)} rehearsed)"
                typer.echo(said, err=True)
        return reports


def _one_rank(folder: Path, rank: int, device: str | None) -> RankRehearsal:
    import os
    import subprocess
    import sys

    from hpjob.core.errors import EnvironmentProblemError
    from hpjob.plan.rehearsal import RankRehearsal

    out = folder / f"rank-{rank}.json"
    command = [sys.executable, "-m", "hpjob.runtime.rehearsal", "--rank", str(rank), "--out", str(out)]
    command += ["--plan", str(folder / "plan.json"), "--recipe", str(folder / "recipe.yaml")]
    command += ["--device", device] if device else []
    environment = {"OMP_NUM_THREADS": "1", **os.environ}  # as a job has it: ranks share the cores
    ended = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if ended.returncode == 0:
        return RankRehearsal.model_validate_json(out.read_text(encoding="utf-8"))
    said = [line for line in ended.stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in said if line.startswith("error: ")]
    hints = [line.removeprefix("hint: ") for line in said if line.startswith("hint: ")]
    raise EnvironmentProblemError(
        f"the rehearsal of rank {rank} failed: {(errors or said or [f'exit code {ended.returncode}'])[-1]}",
        hint=hints[-1] if hints else "run it with --device cpu and a small recipe to see whether the plan runs at all",
    )
