"""Run folders for tests: as `hpjob submit` writes them, with a stand-in for the runtime."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpjob.core.run_dir import RunDir
from hpjob.core.run_records import read_json_lines
from hpjob.plan.planner import make_plan
from hpjob.recipe.load import load_recipe
from hpjob.slurm.prepare import Prepared, job_spec
from hpjob.slurm.render import render_script
from hpjob.slurm.submit import write_inputs
from hpjob.topology.load import local_topology
from hpjob.topology.model import Topology

REPOSITORY = Path(__file__).resolve().parents[2]
_PYTHON = """#!/bin/bash
# The ranks run the stand-in; everything else is real.
export PYTHONPATH={repository}
if [[ $2 == hpjob.runtime ]]; then shift 2; exec {python} {standin} "$@"; fi
exec {python} "$@"
"""


def standin_python(folder: Path) -> Path:
    """Write an interpreter that runs the stand-in for ``-m hpjob.runtime``."""
    path = folder / "python"
    standin = REPOSITORY / "tests" / "support" / "standin_runtime.py"
    path.write_text(_PYTHON.format(repository=REPOSITORY, python=sys.executable, standin=standin), encoding="utf-8")
    path.chmod(0o755)
    return path


def trained_in(run: RunDir, attempt: int) -> int:
    """How many steps in the metrics are an attempt's."""
    return sum(line.get("attempt") == attempt for line in read_json_lines(run.metrics))


def make_run(
    folder: Path,
    *,
    topology: Topology | None = None,
    executor: str = "local",
    steps: int = 4,
    spec_changes: dict[str, Any] | None = None,
    overrides: Sequence[str] = (),
    **behaviour: Any,
) -> Prepared:
    """Write the folder of a tiny run of 2 nodes with 4 ranks each."""
    run = RunDir(folder)
    run.path.mkdir(parents=True)
    recipe = load_recipe("tiny", [f"training.steps={steps}", *overrides])
    topology = topology or local_topology(2, 4)
    plan = make_plan(recipe, topology)
    spec = job_spec(run, recipe, topology, plan, executor="local" if executor == "local" else "slurm")
    changes = {"python": str(standin_python(folder))} | (spec_changes or {})
    spec = spec.model_copy(update=changes)
    prepared = Prepared(
        run=run,
        executor="local" if executor == "local" else "slurm",
        recipe=recipe,
        topology=topology,
        plan=plan,
        spec=spec,
        script=render_script(spec),
        notes=(),
    )
    write_inputs(prepared, ["hpjob", "submit"])
    (folder / "behaviour.json").write_text(json.dumps({"steps": steps} | behaviour), encoding="utf-8")
    return prepared
