"""``hpjob plan``: the best layout of a recipe on a cluster, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from hpjob.topology.model import Topology


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(name="plan")(plan)


def plan(
    recipe: str = typer.Option(..., "--recipe", "-r", help="Packaged recipe or a .yaml file."),
    nodes: int | None = typer.Option(None, "--nodes", "-N", min=1, help="Number of nodes."),
    machine: str | None = typer.Option(None, "--machine", help="Plan for this kind of node instead of asking Slurm."),
    topology: str | None = typer.Option(None, "--topology", help="Plan for the nodes of this topology file."),
    gpus_per_node: int | None = typer.Option(None, "--gpus-per-node", min=1, help="Ranks a node; all GPUs by default."),
    partition: str | None = typer.Option(None, "--partition", "-p", help="Slurm partition; the recipe's by default."),
    overrides: list[str] = typer.Option([], "--set", help="Change a value: --set training.lr=3e-4. Repeatable."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
) -> None:
    """Choose degrees, schedule and placement for a recipe; print memory, time, reasons and runners-up."""
    from hpjob.plan.explain import render_plan
    from hpjob.plan.planner import make_plan
    from hpjob.recipe.load import load_recipe

    resolved = load_recipe(recipe, overrides)
    where = find_topology(nodes, machine, topology, partition or resolved.job.partition)
    made = make_plan(resolved, where, gpus_per_node=gpus_per_node)
    if as_json:
        typer.echo(made.model_dump_json(indent=2))
        return
    typer.echo(render_plan(made))
    for note in where.notes:
        typer.echo(f"note: {note}", err=True)


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
