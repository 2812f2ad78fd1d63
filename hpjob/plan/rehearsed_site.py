"""Times of a rehearsal as entries of a site file, so that later plans are made from them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpjob.core import yaml_text
from hpjob.core.errors import EnvironmentProblemError, UserInputError
from hpjob.plan.model import Plan
from hpjob.plan.rehearsal import RankRehearsal
from hpjob.plan.shape import shape_of
from hpjob.plan.site import Site, SiteLayer, load_site
from hpjob.recipe.model import Recipe

_ELSEWHERE = "name a file in a folder of yours"


def refuse_site(path: str, plan: Plan) -> None:
    """Refuse before anything runs what could not be written, or would say nothing of a plain layer.

    Raises:
        UserInputError: Some layers are recomputed and others not, or the file holds something else.
        EnvironmentProblemError: The folder of the file is not there and cannot be made.
    """
    if plan.recompute == "selective" or plan.recompute_every_kth_layer > 1 or plan.recompute_layers_per_stage:
        raise UserInputError(
            "the time of a plain layer cannot be told from stages that recompute parts of it",
            hint="rehearse with --set parallel.gradient_checkpoint_config.policy=none (or full), or without --site",
        )
    file = Path(path).expanduser()
    if file.exists():
        load_site(path)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentProblemError(f"site file {path}: {error}", hint=_ELSEWHERE) from None


def layers_of(plan: Plan, recipe: Recipe, reports: Sequence[RankRehearsal]) -> list[SiteLayer]:
    """Return the seconds of one decoder layer, from the stage with the least beside its layers.

    Recomputed forward passes are taken away: the planner adds them where a plan has them.
    """
    timings = [timing for report in reports for timing in report.stages]
    last = plan.degrees.pp * plan.pipeline.num_model_chunks - 1
    # The last stage also has the head, the first only the look-up of the embedding.
    best = min(timings, key=lambda timing: (timing.stage == last, timing.stage == 0, timing.stage))
    forward = best.forward_s / best.num_layers
    backward = (best.backward_s + (best.weight_s or 0.0)) / best.num_layers
    if plan.recompute == "full":
        backward = max(backward - forward, forward)
    if best.stage == last and plan.degrees.pp > 1:
        raise UserInputError(
            "only the last stage was rehearsed, whose head is no part of a layer", hint="rehearse with --all-stages"
        )
    shape, d = shape_of(recipe.model), plan.degrees
    return [
        SiteLayer(
            hidden=shape.hidden,
            ffn=shape.ffn,
            tokens=plan.pipeline.microbatch_size * plan.seq_length // d.sp,
            seq=plan.seq_length,
            tp=d.tp,
            sp=d.sp,
            ep=d.ep,
            sequence_mode=plan.sequence_parallelism_mode,
            precision=plan.precision,
            forward_s=forward,
            backward_s=backward,
        )
    ]


def add_to_site(path: str, layers: Sequence[SiteLayer], note: str) -> None:
    """Add layers to a site file, in place of those of the same sizes; make it if it is not there.

    Raises:
        EnvironmentProblemError: It cannot be written.
    """
    file = Path(path).expanduser()
    site = load_site(path) if file.exists() else Site()
    new = {_sizes(layer): layer for layer in (*site.layers, *layers)}
    notes = [part for part in site.note.split("; ") if part and part != note]
    site = site.model_copy(
        update={"basis": "rehearsed", "layers": tuple(new.values()), "note": "; ".join([*notes, note])}
    )
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(yaml_text.dump(site.model_dump(mode="json", exclude_none=True)), encoding="utf-8")
    except OSError as error:
        raise EnvironmentProblemError(f"site file {path}: {error}", hint=_ELSEWHERE) from None


def _sizes(layer: SiteLayer) -> tuple[object, ...]:
    return tuple(value for name, value in layer if name not in ("forward_s", "backward_s"))
