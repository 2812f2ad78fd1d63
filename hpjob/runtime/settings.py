"""Reads what an attempt is to run: recipe, plan, data. Needs no torch, so mistakes show in a second."""

from __future__ import annotations

import json
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path

from hpjob.core.errors import UserInputError
from hpjob.core.schema import parse
from hpjob.plan.model import Plan
from hpjob.recipe.data_files import check_token_files
from hpjob.recipe.load import load_recipe
from hpjob.recipe.model import Recipe
from hpjob.runtime.rank import Rank


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptSettings:
    """What to run and how it is laid out."""

    recipe: Recipe
    plan: Plan


def read_settings(rank: Rank) -> AttemptSettings:
    """Read recipe and plan of an attempt and check them against the world and the data.

    Raises:
        UserInputError: A file is missing or wrong, the plan is for another world, or the data do not fit.
    """
    recipe = load_recipe(str(rank.run_dir.recipe))
    plan = _read_plan(rank.attempt.plan)
    if plan.degrees.world_size != rank.world_size:
        raise UserInputError(
            f"{rank.attempt.plan} is for {plan.degrees.world_size} ranks, the attempt has {rank.world_size}",
            hint="start as many ranks as the plan has, or plan again",
        )
    check_token_files(
        recipe.data.path, recipe.model.vocab_size, recipe.data.seq_length, recipe.training.global_batch_size
    )
    return AttemptSettings(recipe=recipe, plan=plan)


def prepare_environment(env: MutableMapping[str, str], *, deterministic: bool) -> None:
    """Set what torch reads when it is imported, unless a person has set it.

    One thread a rank: several ranks share the cores of a host, and the number of threads changes
    the order of sums on a CPU, hence the last bits of a result.
    """
    env.setdefault("OMP_NUM_THREADS", "1")
    env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # The plan numbers GPUs as the driver does, by PCI bus id.
    env.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if deterministic:
        env.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def _read_plan(path: Path) -> Plan:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserInputError(f"{path} cannot be read: {error}", hint="submit the run again") from None
    return parse(Plan, document, source=str(path))
