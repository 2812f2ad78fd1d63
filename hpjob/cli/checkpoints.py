"""``hpjob checkpoints``: what a run has saved, and whether it is whole."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from hpjob.core.run_dir import RunDir
    from hpjob.runtime.checkpoint.listing import CheckpointEntry

_HEADS = ("step", "kind", "size", "age", "mesh", "state")
_NUMBERS = (0, 2, 3)
"""Columns that are aligned to the right."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(name="checkpoints")(checkpoints)


def checkpoints(
    run: str | None = typer.Argument(None, help="Name, folder or job id of a run. [default: the newest]"),
    run_dir: Path = typer.Option(Path("runs"), "--run-dir", help="Folder of all runs."),
    verify: bool = typer.Option(False, "--verify", help="Read every file and compare its checksum."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
) -> None:
    """List the checkpoints of a run; exit code 3 when one is damaged."""
    import json

    from hpjob.cli.find_run import find_run
    from hpjob.core.errors import ExitCode
    from hpjob.runtime.checkpoint.listing import list_checkpoints

    found = find_run(run, run_dir)
    entries = list(list_checkpoints(found, verify=verify))
    if as_json:
        typer.echo(json.dumps(as_document(found, entries, verified=verify), indent=2))
    else:
        typer.echo("\n".join(as_lines(found, entries, verified=verify)))
    if any(entry.state == "damaged" for entry in entries):
        raise typer.Exit(int(ExitCode.ENVIRONMENT))


def as_document(run: RunDir, entries: list[CheckpointEntry], *, verified: bool) -> dict[str, Any]:
    """Return the list as plain data."""
    return {
        "version": 1,
        "run": run.name,
        "run_dir": str(run.path),
        "verified": verified,
        "checkpoints": [_entry_document(entry) for entry in entries],
    }


def _entry_document(entry: CheckpointEntry) -> dict[str, Any]:
    manifest = entry.manifest
    return {
        "step": entry.step,
        "state": entry.state,
        "complete": entry.state == "complete",
        "problems": list(entry.problems),
        "path": str(entry.path),
        "kind": manifest.kind if manifest else None,
        "size_bytes": manifest.size_bytes if manifest else None,
        "time": manifest.time if manifest else None,
        "plan": manifest.plan if manifest else None,
        "world_size": manifest.world_size if manifest else None,
        "num_samples": manifest.num_samples if manifest else None,
        "files": len(manifest.files) if manifest else None,
    }


def as_lines(run: RunDir, entries: list[CheckpointEntry], *, verified: bool) -> list[str]:
    """Return the list as a table, what is damaged below it."""
    if not entries:
        return [f"{run.name} has no checkpoints yet"]
    rows = [_HEADS, *(_row(entry) for entry in entries)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADS))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(widths[column]) if column in _NUMBERS else cell.ljust(widths[column])
            for column, cell in enumerate(row)
        ]
        lines.append("  ".join(cells).rstrip())
    problems = [f"{entry.path / problem}" for entry in entries for problem in entry.problems]
    if problems:
        lines += ["", *problems, "", "a resume sets a damaged checkpoint aside and takes the one before"]
    elif verified:
        count = sum(len(entry.manifest.files) for entry in entries if entry.verified and entry.manifest)
        lines += ["", f"{count} files have the checksums they were written with"]
    else:
        lines += ["", "sizes compared; --verify reads every file and compares its checksum"]
    return lines


def _row(entry: CheckpointEntry) -> tuple[str, ...]:
    import time

    from hpjob.core.quantity import duration

    manifest = entry.manifest
    if manifest is None:
        return (str(entry.step), "?", "?", "?", "?", entry.state)
    return (
        str(entry.step),
        manifest.kind,
        _size(manifest.size_bytes),
        duration(max(0.0, time.time() - manifest.time)),
        manifest.plan,
        entry.state,
    )


def _size(size_bytes: int) -> str:
    size, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
