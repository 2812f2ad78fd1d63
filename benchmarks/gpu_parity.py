"""Layouts on GPUs through NCCL against one GPU: the same losses, gradients and weights."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import Any

from benchmarks.layouts import expert_parallel
from hpjob.core.errors import HpjobError
from hpjob.runtime.model.families import family_of
from hpjob.runtime.parity.case import Case, parse_case
from hpjob.runtime.parity.compare import Outcome, assemble, compare_case
from hpjob.runtime.parity.reference import Trajectory
from hpjob.runtime.parity.worker import RankRecord, train_case
from hpjob.runtime.process_pool import ProcessPool
from hpjob.runtime.support import refuse_unsupported

_BATCH = 8


def parity(
    pool: ProcessPool,
    gpus: int,
    layouts: Mapping[str, str],
    *,
    steps: int,
    extra: str,
    precisions: Sequence[str] = ("fp32", "bf16"),
    deadline: float = inf,
) -> Iterator[dict[str, Any]]:
    """Yield one record a layout and precision, each against the engine on one GPU with the same batch.

    Args:
        pool: Of as many ranks.
        gpus: How many there are.
        layouts: As parity cases write them, by name; a mixture of experts comes after them.
        steps: Of a case.
        extra: Further settings of all cases.
        precisions: One after the other.
        deadline: Monotonic; no case starts later.
    """
    experts = moe(gpus)
    families = [("llama", layout, name) for name, layout in layouts.items()]
    families += [("mixtral", f"{layout} {experts}", name) for name, layout in expert_parallel(gpus).items()]
    for precision in precisions:
        references: dict[str, Trajectory] = {}
        for model_type, layout, name in families:
            settings = (
                f"precision={precision} num_key_value_heads=8 {experts if model_type == 'mixtral' else ''} {extra}"
            )
            record: dict[str, Any] = {"layout": name, "precision": precision}
            if time.monotonic() > deadline:
                yield record | {"ok": False, "reason": "out of time"}
                continue
            try:
                _refuse(f"{layout} {settings}", gpus, steps, model_type)
                if model_type not in references:
                    references[model_type] = _on_one_gpu(pool, settings, steps, model_type)
                outcome = _against(pool, references[model_type], f"{layout} {settings}", gpus, steps, model_type)
                yield record | outcome.as_json()
            except HpjobError as error:
                yield record | {"ok": False, "reason": error.message}
            except Exception as error:
                # Whatever is wrong with one layout, the others have their turn.
                yield record | {"ok": False, "reason": f"{type(error).__name__}: {error}"[-1500:]}


def moe(gpus: int) -> str:
    """Return the experts of a small model, at least one a GPU."""
    return f"num_experts={max(4, gpus)} num_experts_per_tok=2"


def _on_one_gpu(pool: ProcessPool, settings: str, steps: int, model_type: str) -> Trajectory:
    case = parse_case(f"num_microbatches={_BATCH} {settings}", world=1, steps=steps, model_type=model_type)
    (record,) = pool.run(train_case, case, steps, None, world=1)
    return _trajectory([record])


def _trajectory(records: list[RankRecord]) -> Trajectory:
    gradients, _ = assemble(part for record in records for part in record.gradients)
    weights, _ = assemble(part for record in records for part in record.weights)
    return Trajectory(records[0].losses, records[0].skipped, gradients, weights)


def _against(pool: ProcessPool, reference: Trajectory, text: str, gpus: int, steps: int, model_type: str) -> Outcome:
    return compare_case(pool, _case(text, gpus, steps, model_type), reference, steps, None)


def _case(text: str, gpus: int, steps: int, model_type: str) -> Case:
    """Return a case with the batch of the reference."""
    probe = parse_case(f"{text} num_microbatches=1", world=gpus, steps=steps, model_type=model_type)
    microbatches = _BATCH // probe.plan.degrees.dp
    return parse_case(f"{text} num_microbatches={microbatches}", world=gpus, steps=steps, model_type=model_type)


def _refuse(text: str, gpus: int, steps: int, model_type: str) -> None:
    """Raise what the runtime has against a layout, before anything runs."""
    family_of(model_type)
    case = _case(text, gpus, steps, model_type)
    refuse_unsupported(case.plan, case.recipe)
