"""``hpjob nodes``: which nodes failed, and which are left out of jobs for that."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpjob.slurm.bad_nodes import NodeMemory, Strike

nodes_app = typer.Typer(help="Show nodes that failed, and take them back.", invoke_without_command=True)


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.add_typer(nodes_app, name="nodes")


@nodes_app.callback()
def show(
    context: typer.Context, as_json: bool = typer.Option(False, "--json", help="Print one JSON document.")
) -> None:
    """Show nodes that failed in your runs; those that failed twice in a week are left out of new jobs."""
    if context.invoked_subcommand is not None:
        return
    import json

    from hpjob.slurm.bad_nodes import remembered_clusters

    memories = remembered_clusters()
    if as_json:
        clusters = [_document(memory) for memory in memories]
        typer.echo(json.dumps({"version": 1, "clusters": clusters}, indent=2))
        return
    lines = [line for memory in memories for line in _lines(memory)]
    typer.echo("\n".join(lines) if lines else "no node is known to have failed in the last week")


@nodes_app.command("forget")
def forget(
    nodes: list[str] = typer.Argument(None, help="Nodes, such as n[01-04],n7."),
    everything: bool = typer.Option(False, "--all", help="All nodes."),
) -> None:
    """Forget that nodes failed, for example after their repair."""
    from hpjob.core.errors import UserInputError
    from hpjob.core.hostlist import expand
    from hpjob.slurm.bad_nodes import remembered_clusters

    if nodes and everything:
        raise UserInputError("names of nodes and --all exclude each other", hint="give one of them")
    if not nodes and not everything:
        raise UserInputError("which nodes?", hint="name nodes, or give --all")
    wanted = None if everything else [name for text in nodes for name in expand(text)]
    forgotten = [name for memory in remembered_clusters() for name in memory.forget(wanted)]
    if wanted is not None and (unknown := [name for name in wanted if name not in forgotten]):
        raise UserInputError(f"{', '.join(unknown)} has not failed lately", hint="`hpjob nodes` lists those that have")
    typer.echo(f"forgot {', '.join(forgotten)}" if forgotten else "there was nothing to forget")


def _document(memory: NodeMemory) -> dict[str, object]:
    from dataclasses import asdict

    nodes = [
        {"node": node, "left_out": node in memory.bad(), "failures": [asdict(strike) for strike in strikes]}
        for node, strikes in _by_node(memory).items()
    ]
    return {"cluster": memory.cluster, "file": str(memory.path), "nodes": nodes}


def _lines(memory: NodeMemory) -> list[str]:
    import time

    lines = []
    for node, strikes in _by_node(memory).items():
        left_out = "left out" if node in memory.bad() else "watched"
        lines.append(f"{memory.cluster}  {node}  {left_out}")
        lines += [
            f"    {time.strftime('%Y-%m-%d %H:%M', time.localtime(strike.time))}  {strike.kind}, "
            f"attempt {strike.attempt} of {strike.run}: {strike.what}"
            for strike in strikes
        ]
    return lines


def _by_node(memory: NodeMemory) -> dict[str, Sequence[Strike]]:
    strikes = memory.strikes()
    return {node: [s for s in strikes if s.node == node] for node in sorted({s.node for s in strikes})}
