#!/usr/bin/env python3
"""Prints digests of the plans of all packaged recipes, so that interpreters and revisions can be compared.

    scripts/plan_digest.py > before.txt            less than a minute of one core; neither network nor GPU
    scripts/plan_digest.py --compare before.txt    the same, and exits 1 if a plan differs

A line a case: SHA-256 of the plan's canonical JSON (of the error, where there is no plan), the machine, the number of
nodes, the recipe, and the plan in short. The last line digests all lines before it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hpjob.core.errors import HpjobError
from hpjob.plan.planner import make_plan
from hpjob.plan.site import default_site
from hpjob.recipe.load import load_recipe, recipe_names
from hpjob.topology.load import load_machine, machine_topology
from hpjob.topology.model import Island, Topology

_CASES: tuple[tuple[str, int], ...] = (
    ("dgx-a100-80g", 4),
    ("dgx-a100-80g", 16),
    ("hgx-h100", 1),
    ("hgx-h100", 4),
    ("gb200-nvl72", 16),
    ("pcie-l40s", 1),
)


def main() -> int:
    """Plan all cases, print their digests, compare them with earlier ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compare", type=Path, metavar="FILE", help="output of an earlier call")
    options = parser.parse_args()
    if options.compare is not None and not options.compare.is_file():
        parser.error(f"no such file: {options.compare}")
    if site := default_site():
        parser.error(f"the constants of {site[1]} would be used: move it away, or unset HPJOB_SITE")
    lines = []
    for line in _digests():
        lines.append(line)
        print(line, flush=True)
    print(f"{_sha256(''.join(line + chr(10) for line in lines))} all {len(lines)} plans")
    if options.compare is None:
        return 0
    before = options.compare.read_text(encoding="utf-8").splitlines()[:-1]
    differing = sorted(set(lines).symmetric_difference(before), key=lambda line: line.split(" ", 1)[1])
    for line in differing:
        print(f"{'now   ' if line in lines else 'before'} {line}", file=sys.stderr)
    return 1 if differing else 0


def _digests() -> Iterator[str]:
    cases = [(f"{machine} {nodes}", machine_topology(load_machine(machine), nodes)) for machine, nodes in _CASES]
    cases.append(("hgx-h100-dead-link 4", _with_a_dead_link(machine_topology(load_machine("hgx-h100"), 4))))
    for where, topology in cases:
        for recipe in recipe_names():
            document, words = _plan(recipe, topology)
            yield f"{_sha256(document)} {where} {recipe}: {words}"


def _plan(recipe: str, topology: Topology) -> tuple[str, str]:
    """Return canonical JSON of a plan or of the reason why there is none, and either in short."""
    try:
        plan = make_plan(load_recipe(recipe), topology)
    except HpjobError as error:
        return json.dumps([error.message, error.hint]), "no plan"
    canonical = json.dumps(plan.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return canonical, f"{plan.summary}, {plan.time.step_s:g} s"


def _with_a_dead_link(topology: Topology) -> Topology:
    """GPUs 0 and 1 of the first node no longer reach each other over NVLink."""
    cliques = (tuple(range(1, 8)), (0, *range(2, 8)))
    island = Island(kind="nvlink", gpus=tuple(range(8)), all_to_all=False, cliques=cliques)
    first = topology.nodes[0].model_copy(update={"islands": (island,)})
    return topology.model_copy(update={"nodes": (first, *topology.nodes[1:])})


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
