"""CPU time of the whole ``hpjob plan`` command, and of a candidate of the search.

    python -m benchmarks.planner_speed [--only 70b:64] [--out FILE]

With ``--only`` other cases of FILE stay as they are. Each case is a fresh process, so the interpreter's start and all
imports count; modules are compiled before, as they are wherever hpjob has run once.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_CASES: tuple[tuple[str, int, str], ...] = (
    *((recipe, 4, "dgx-a100-80g") for recipe in ("7b", "13b", "30b", "70b")),
    *((recipe, 4, "hgx-h100") for recipe in ("llama3-8b", "llama3-70b", "qwen3-8b", "qwen3-32b")),
    *((recipe, 4, "hgx-h100") for recipe in ("mixtral-8x7b", "qwen3-30b-a3b")),
    *(("llama3-405b", nodes, "hgx-h100") for nodes in (64, 512, 2048)),
    *(("70b", nodes, "hgx-h100") for nodes in (64, 512, 2048)),
)


def main() -> int:
    """Measure all cases and write or print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--only", metavar="RECIPE:NODES", action="append", help="one case; repeatable")
    options = parser.parse_args()
    chosen = [case for case in _CASES if not options.only or f"{case[0]}:{case[1]}" in options.only]
    records = {}
    if options.only and options.out and options.out.is_file():
        records = {case["command"]: case for case in json.loads(options.out.read_text(encoding="utf-8"))["cases"]}
    _hpjob("plan", "--help")
    for recipe, nodes, machine in chosen:
        record = _measured(recipe, nodes, machine)
        records[record["command"]] = record
        print(json.dumps(record), flush=True)
    document = {"cores": os.cpu_count(), "python": sys.version.split()[0], "cases": list(records.values())}
    if options.out:
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


def _measured(recipe: str, nodes: int, machine: str) -> dict[str, Any]:
    command = ["plan", "--recipe", recipe, "--nodes", str(nodes), "--machine", machine, "--json"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = _hpjob(*command)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    record: dict[str, Any] = {"command": f"hpjob {' '.join(command)}", "nodes": nodes, "cpu_s": round(cpu_s, 2)}
    if done.returncode:
        return record | {"failed": done.stderr.strip()[:200]}
    return record | _search(recipe, nodes, machine)


def _hpjob(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-m", "hpjob", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def _search(recipe: str, nodes: int, machine: str) -> dict[str, Any]:
    """Count the legal layouts of a case and time the search itself."""
    from hpjob.plan.enumeration import legal_layouts
    from hpjob.plan.memory import memory_limit_gib
    from hpjob.plan.planner import make_problem
    from hpjob.plan.search import survey
    from hpjob.recipe.load import load_recipe
    from hpjob.topology.load import load_machine, machine_topology

    topology = machine_topology(load_machine(machine), nodes)
    count = sum(1 for _ in legal_layouts(make_problem(load_recipe(recipe, []), topology)))
    problem = make_problem(load_recipe(recipe, []), topology)
    begin = time.process_time()
    priced = len(survey(problem, memory_limit_gib(problem.hardware)).candidates)
    search_s = time.process_time() - begin
    return {
        "legal_layouts": count,
        "priced": priced,
        "search_s": round(search_s, 2),
        "ms_a_layout": round(1000 * search_s / max(1, count), 4),
    }


if __name__ == "__main__":
    sys.exit(main())
