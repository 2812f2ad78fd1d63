"""``python -m hpjob.runtime.rehearsal``: one rank, in a process of its own so that its memory is its own."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hpjob.core.errors import EnvironmentProblemError, ExitCode, HpjobError


def main(arguments: list[str] | None = None) -> int:
    """Rehearse a rank, write its report as JSON, return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m hpjob.runtime.rehearsal", description=__doc__)
    parser.add_argument("--plan", type=Path, required=True, help="plan.json")
    parser.add_argument("--recipe", type=Path, required=True, help="recipe.yaml, resolved")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--device", default=None, help="cpu or cuda; by default a GPU where there is one")
    parser.add_argument("--out", type=Path, required=True, help="file of the report")
    options = parser.parse_args(arguments)
    try:
        options.out.write_text(_rehearse(options), encoding="utf-8")
    except HpjobError as error:
        sys.stderr.write(f"error: {error.message}\nhint: {error.hint}\n")
        return int(error.exit_code)
    return int(ExitCode.DONE)


def _rehearse(options: argparse.Namespace) -> str:
    import torch  # noqa: PLC0415

    from hpjob.plan.model import Plan  # noqa: PLC0415
    from hpjob.recipe.load import load_recipe  # noqa: PLC0415
    from hpjob.runtime.rehearsal.rehearse import rehearse_rank  # noqa: PLC0415

    plan = Plan.model_validate_json(options.plan.read_text(encoding="utf-8"))
    if options.device == "cuda" and not torch.cuda.is_available():
        raise EnvironmentProblemError("torch sees no GPU here", hint="use --device cpu, or run it on a node with GPUs")
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        report = rehearse_rank(plan, load_recipe(str(options.recipe), []), options.rank, device)
    except torch.OutOfMemoryError as error:
        raise EnvironmentProblemError(
            f"rank {options.rank} does not fit on this device: {str(error).splitlines()[0]}",
            hint="a plan for GPUs with more memory than this one has can only be rehearsed on such a GPU",
        ) from None
    return report.model_dump_json(indent=2) + "\n"


if __name__ == "__main__":
    sys.exit(main())
