"""``hpjob plan``: the best layout of a recipe on a cluster, and why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from hpjob.core.run_dir import RunDir
    from hpjob.plan.model import Plan
    from hpjob.recipe.model import Recipe
    from hpjob.topology.model import Topology


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(name="plan")(plan)


def plan(
    recipe: str | None = typer.Option(None, "--recipe", "-r", help="Packaged recipe or a .yaml file."),
    nodes: int | None = typer.Option(None, "--nodes", "-N", min=1, help="Number of nodes."),
    run: str | None = typer.Option(None, "--from", metavar="RUN", help="Name or folder of a run: plan it anew."),
    machine: str | None = typer.Option(None, "--machine", help="Plan for this kind of node instead of asking Slurm."),
    topology: str | None = typer.Option(None, "--topology", help="Plan for the nodes of this topology file."),
    gpus_per_node: int | None = typer.Option(None, "--gpus-per-node", min=1, help="Ranks a node; all GPUs by default."),
    partition: str | None = typer.Option(None, "--partition", "-p", help="Slurm partition; the recipe's by default."),
    overrides: list[str] = typer.Option([], "--set", help="Change a value: --set training.lr=3e-4. Repeatable."),
    site: str | None = typer.Option(None, "--site", help="File with measured constants. [default: the user's, if any]"),
    pictures: Path | None = typer.Option(None, "--pictures", metavar="DIR", help="Write SVG pictures of the plan."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
) -> None:
    """Choose degrees, schedule and placement for a recipe; print memory, time, reasons and runners-up."""
    from hpjob.plan.explain import render_plan, render_replan
    from hpjob.plan.planner import make_plan

    resolved, old = _recipe_of(recipe, run, overrides)
    if old is None:
        where = find_topology(nodes, machine, topology, partition or resolved.job.partition)
        made = make_plan(resolved, where, gpus_per_node=gpus_per_node, site=site)
        document, text = made.model_dump_json(indent=2), render_plan(made)
    else:
        from hpjob.plan.replan import replan
        from hpjob.slurm.attempt_begin import read_plan

        where = _nodes_of_run(old, nodes, machine, topology, partition or resolved.job.partition)
        found = replan(resolved, where, previous=read_plan(old.plan), gpus_per_node=gpus_per_node, site=site)
        made, resolved = found.plan, found.recipe
        document, text = found.model_dump_json(indent=2), render_replan(found)
    if pictures is not None:
        _draw(pictures, resolved, where, made, site)
    if as_json:
        typer.echo(document)
        return
    typer.echo(text)
    for note in where.notes:
        typer.echo(f"note: {note}", err=True)


def _draw(folder: Path, recipe: Recipe, where: Topology, plan: Plan, site: str | None) -> None:
    from hpjob.core.errors import UserInputError
    from hpjob.plan.legality import layout_of
    from hpjob.plan.placement import place
    from hpjob.plan.planner import make_problem
    from hpjob.report.plan_pictures import draw_plan

    problem = make_problem(recipe, where, gpus_per_node=plan.gpus_per_node, site=site)
    ordered, _ = place(plan.degrees, where, plan.gpus_per_node)
    try:
        paths = draw_plan(folder, plan, problem, layout_of(plan), ordered)
    except OSError as error:
        raise UserInputError(f"cannot write pictures: {error}", hint="give --pictures a folder to write to") from None
    for path in paths:
        typer.echo(f"wrote {path}", err=True)


def _recipe_of(recipe: str | None, run: str | None, overrides: list[str]) -> tuple[Recipe, RunDir | None]:
    """Return the recipe to plan, and the run that it belongs to."""
    from hpjob.cli.find_run import find_run
    from hpjob.core.errors import UserInputError
    from hpjob.recipe.load import load_recipe

    if recipe is not None and run is None:
        return load_recipe(recipe, overrides), None
    if run is None or recipe is not None:
        raise UserInputError("give one of --recipe and --from", hint="--recipe 7b, or --from runs/NAME for a run")
    found = find_run(run, Path("runs"))
    return load_recipe(str(found.recipe), overrides), found


def _nodes_of_run(
    run: RunDir, nodes: int | None, machine: str | None, path: str | None, partition: str | None
) -> Topology:
    """Return the nodes to plan a run for: those asked for, else nodes like the ones that it had."""
    from hpjob.core.errors import EnvironmentProblemError
    from hpjob.topology.load import load_topology, local_topology, machine_topology

    if machine or path or nodes is None:
        return find_topology(nodes, machine, path, partition)
    had = load_topology(str(run.topology))
    if had.source == "local":
        return local_topology(nodes, len(had.nodes[0].gpus) or None)
    try:
        return find_topology(nodes, None, None, partition)
    except EnvironmentProblemError:
        if had.machine is None:
            raise
        return machine_topology(had.machine, nodes)


def find_topology(nodes: int | None, machine: str | None, path: str | None, partition: str | None) -> Topology:
    """Return the topology of a file, of a kind of machine, or of the nodes that Slurm reports."""
    from hpjob.core.errors import UserInputError
    from hpjob.topology.load import load_machine, load_topology, machine_topology

    if machine and path:
        raise UserInputError("--machine and --topology exclude each other", hint="give one of them")
    if path:
        found = load_topology(path)
        if nodes is None or nodes == len(found.nodes):
            return found
        if nodes > len(found.nodes):
            raise UserInputError(
                f"{nodes} nodes asked for, but {path} has {len(found.nodes)}", hint=f"use --nodes {len(found.nodes)}"
            )
        return found.model_copy(update={"nodes": found.nodes[:nodes]})
    if nodes is None:
        raise UserInputError("--nodes is missing", hint="say how many nodes to plan for, such as --nodes 4")
    if machine:
        return machine_topology(load_machine(machine), nodes)
    from hpjob.topology.slurm import cluster_topology

    return cluster_topology(partition, nodes)
