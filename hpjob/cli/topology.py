"""``hpjob topology``: read what machines print, detect this one, show the known ones."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from hpjob.plan.model import Plan
    from hpjob.topology.model import Topology
    from hpjob.topology.read.reading import Reading

_VERSION = 1


class GroupBy(StrEnum):
    """Axes by which a placement can be coloured."""

    TP = "tp"
    PP = "pp"
    DP = "dp"


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    group = typer.Typer(name="topology", help="Read, detect and show topologies.", no_args_is_help=True)
    group.command("read")(read)
    group.command("detect")(detect)
    group.command("list")(list_machines)
    group.command("show")(show)
    app.add_typer(group)


def read(
    files: list[str] = typer.Argument(..., help="Files with what a tool printed; - is the standard input."),
    kind: str | None = typer.Option(None, "--kind", help="Kind of the text; recognised by content when left out."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
    svg: Path | None = typer.Option(None, "--svg", help="Write a picture of the joined topology to this file."),
) -> None:
    """Read topology sources of any kind; several of one machine are joined and their disagreements reported."""
    from hpjob.core.errors import UserInputError
    from hpjob.topology.merge import merge

    readings = [_read_one(name, kind) for name in files]
    found = [reading.topology for reading in readings if reading.topology is not None]
    joined = merge(found) if len(found) > 1 else (found[0] if found else None)
    if svg is not None:
        if joined is None:
            raise UserInputError("these texts show no node that could be drawn", hint="leave --svg out")
        _write_svg(svg, joined)
    if as_json:
        typer.echo(json.dumps(_document(files, readings, joined), ensure_ascii=False))
        return
    for name, reading in zip(files, readings, strict=True):
        _print_reading(name, reading)
    if joined is not None:
        _print_topology(joined)


def detect(
    node_only: bool = typer.Option(False, "--node", help="Look at this host alone, even inside a job."),
    login: bool = typer.Option(False, "--login", help="Ask Slurm about all nodes, and nothing else."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
    svg: Path | None = typer.Option(None, "--svg", help="Write a picture to this file."),
) -> None:
    """Detect this node; inside a job all its nodes. Says what was not found and why."""
    from hpjob.topology.detect.cluster import detect_allocation, detect_login, in_allocation
    from hpjob.topology.detect.node import detect_node

    if login:
        found = detect_login()
    elif in_allocation() and not node_only:
        found = detect_allocation()
    else:
        found = detect_node()
    if svg is not None:
        _write_svg(svg, found)
    if as_json:
        typer.echo(found.model_dump_json())
        return
    _print_topology(found)


def list_machines(as_json: bool = typer.Option(False, "--json", help="Print one JSON document.")) -> None:
    """List the known machines."""
    from hpjob.topology.load import load_machine, machine_names

    machines = [load_machine(name) for name in machine_names()]
    if as_json:
        typer.echo(json.dumps({"version": _VERSION, "machines": [m.model_dump(mode="json") for m in machines]}))
        return
    width = max((len(machine.name) for machine in machines), default=0)
    for machine in machines:
        typer.echo(f"{machine.name:{width}}  {machine.gpus_per_node} x {machine.gpu_model}: {machine.description}")


def show(
    name: str = typer.Argument(..., help="A known machine, a machine file, or a topology file."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
    svg: Path | None = typer.Option(None, "--svg", help="Write a picture to this file."),
    plan: Path | None = typer.Option(None, "--plan", help="Colour the picture by this plan.json."),
    color_by: GroupBy = typer.Option(GroupBy.PP, "--color-by", help="Axis whose groups are coloured."),
) -> None:
    """Show a known machine with the source of every value, or a topology file as a tree."""
    from hpjob.core.errors import UserInputError
    from hpjob.topology.load import load_machine, load_topology, machine_topology

    try:
        machine = load_machine(name)
    except UserInputError:
        if not Path(name).is_file():
            raise
        machine = None
    topology = load_topology(name) if machine is None else machine_topology(machine, 1)
    if plan is not None and svg is None:
        raise UserInputError("--plan colours a picture, and none was asked for", hint="add --svg FILE")
    if svg is not None:
        _write_svg(svg, topology, plan, color_by)
    if as_json:
        typer.echo((machine or topology).model_dump_json())
    elif machine is None:
        _print_topology(topology)
    else:
        for field, value in machine.model_dump(mode="json", exclude={"sources", "version"}).items():
            source = machine.sources.get(field)
            typer.echo(f"{field}: {value}" + (f"  ({source})" if source else ""))


def _read_one(name: str, kind: str | None) -> Reading:
    from hpjob.core.errors import UserInputError
    from hpjob.topology.read.recognise import read_bytes

    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise UserInputError(f"{name}: cannot be read: {error.strerror}", hint="check the path") from None
    return read_bytes(data, kind=kind, name="standard input" if name == "-" else name)


def _document(files: list[str], readings: list[Reading], joined: Topology | None) -> dict[str, Any]:
    """One text gives its facts at the top; several give a list of texts."""
    parts = [
        {"file": name, "kind": reading.kind, "facts": reading.facts, "notes": list(reading.notes)}
        for name, reading in zip(files, readings, strict=True)
    ]
    topology = joined.model_dump(mode="json") if joined is not None else None
    if len(parts) == 1:
        return {"version": _VERSION, **parts[0], "topology": topology}
    return {"version": _VERSION, "texts": parts, "topology": topology}


def _print_reading(name: str, reading: Reading) -> None:
    typer.echo(f"{name}: {reading.kind}")
    for field, value in reading.facts.items():
        text = "not seen" if value is None else json.dumps(value, ensure_ascii=False)
        typer.echo(f"  {field}: {text if len(text) <= 200 else text[:197] + '...'}")
    for note in reading.notes:
        typer.echo(f"note: {note}", err=True)


def _print_topology(topology: Topology) -> None:
    from hpjob.report.topology_text import topology_tree

    typer.echo(topology_tree(topology))
    for note in topology.notes:
        typer.echo(f"note: {note}", err=True)


def _write_svg(path: Path, topology: Topology, plan: Path | None = None, color_by: GroupBy = GroupBy.PP) -> None:
    from hpjob.core.errors import EnvironmentProblemError
    from hpjob.report.topology_svg import topology_svg

    made = None if plan is None else _load_plan(plan)
    try:
        path.write_text(topology_svg(topology, made, group_by=color_by.value), encoding="utf-8")
    except OSError as error:
        raise EnvironmentProblemError(
            f"{path}: cannot be written: {error.strerror}", hint="choose another place"
        ) from None


def _load_plan(path: Path) -> Plan:
    from hpjob.core.errors import UserInputError
    from hpjob.core.schema import parse
    from hpjob.plan.model import Plan

    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserInputError(f"{path}: cannot be read: {error}", hint="give the plan.json of a run folder") from None
    return parse(Plan, document, source=str(path))
