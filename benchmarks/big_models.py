"""Whole models that are trained on all GPUs of a host, and the layouts that the planner's choice is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.workload import work_case
from hpjob.core.errors import HpjobError
from hpjob.core.schema import parse
from hpjob.plan.layout import Layout, stage_layers
from hpjob.plan.memory import memory_limit_gib
from hpjob.plan.planner import make_problem
from hpjob.plan.problem import Problem
from hpjob.plan.search import Candidate, best_of, survey
from hpjob.recipe.load import load_recipe
from hpjob.recipe.model import Recipe
from hpjob.runtime.parity.case import Case
from hpjob.topology.load import load_machine, machine_topology

CHOICE = "planner's choice"
WHOLE = f"{CHOICE}, whole batch"
RUNNERS_UP = 2
_LONG = 131072
_SLICE_LAYERS = 4
_SHAPE = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "num_experts",
    "num_experts_per_tok",
)
_OF_THE_MODEL = ("num_microbatches=", "microbatch_size=", "layers_per_stage=", "precision=", "every_kth_layer=")


@dataclass(frozen=True, kw_only=True)
class Work:
    """A model with its sequences.

    Attributes:
        name: Model and tokens of a sequence.
        recipe: Leaves the layout open.
    """

    name: str
    recipe: Recipe

    @property
    def shape(self) -> dict[str, Any]:
        """Sizes of the model as cases write them."""
        sizes = {key: getattr(self.recipe.model, key) for key in _SHAPE}
        return {key: size for key, size in sizes.items() if size is not None}


@dataclass(frozen=True, kw_only=True)
class Target:
    """One layout to measure; what its settings leave open is the planner's to choose.

    Attributes:
        work: What is trained.
        name: Of the layout.
        settings: Of the recipe's ``parallel`` section.
        place: 0 = the best layout with these settings, 1 and so on = the next ones of other degrees.
        is_whole: Trains the whole batch, whatever share of it the others train.
    """

    work: Work
    name: str
    settings: Mapping[str, object] = field(default_factory=dict)
    place: int = 0
    is_whole: bool = False


def targets(gpus: int, *, tiny: bool, whole: bool) -> list[Target]:
    """Return what is to be measured on so many GPUs, in the order of worth.

    Args:
        gpus: Of one host.
        tiny: Toy models in place of the real ones.
        whole: Also train the whole batch of the first model in the planner's layout.
    """
    dense, long, experts, short = works(gpus, tiny=tiny)
    layouts = dense_layouts(gpus)
    first = [Target(work=dense, name=CHOICE), *_named(dense, layouts, f"zero 2 dp {gpus}")]
    runners_up = [Target(work=dense, name=f"runner-up {place}", place=place) for place in range(1, RUNNERS_UP + 1)]
    ring: dict[str, object] = {"tp_size": 1, "pp_size": 1, "sp_size": gpus, "sequence_parallelism_mode": "ring_attn"}
    others = [name for name in layouts if name != f"zero 2 dp {gpus}"]
    whole_batch = [Target(work=dense, name=WHOLE, is_whole=True)] if whole else []
    second = [Target(work=short, name=CHOICE), *_named(short, layouts, f"zero 2 dp {gpus}")]
    second += [Target(work=short, name=f"runner-up {place}", place=place) for place in range(1, RUNNERS_UP + 1)]
    return [
        *first,
        *whole_batch,
        *runners_up,
        Target(work=long, name=f"sp {gpus} ring_attn", settings=ring),
        Target(work=experts, name=f"ep {gpus}", settings={"ep_size": gpus, "tp_size": 1, "pp_size": 1, "sp_size": 1}),
        *_named(dense, layouts, *others),
        *second,
        *_named(short, layouts, *others),
    ]


def works(gpus: int, *, tiny: bool) -> tuple[Work, Work, Work, Work]:
    """Return the dense model, the same with one long sequence, a slice of one with experts, and short sequences."""
    if tiny:
        # Two stages a rank, which zbv needs.
        layers = 2 * gpus
        experts = {"num_experts": max(2, gpus), "num_experts_per_tok": 2}
        return (
            Work(name="toy, 32", recipe=_toy(32, 4 * gpus, layers)),
            Work(name=f"toy, {32 * gpus}", recipe=_toy(32 * gpus, 1, layers)),
            Work(name="toy with experts, 32", recipe=_toy(32, 2 * gpus, 2, **experts)),
            Work(name="toy, 16", recipe=_toy(16, 4 * gpus, layers)),
        )
    mixtral = [f"model.num_hidden_layers={_SLICE_LAYERS}", f"training.global_batch_size={16 * gpus}"]
    return (
        Work(name="Llama-2-7B, 4,096", recipe=_packaged("7b", 4096, 288)),
        Work(name="Llama-2-7B, 131,072", recipe=_packaged("7b", _LONG, 1)),
        Work(name=f"Mixtral, {_SLICE_LAYERS} layers, 4,096", recipe=load_recipe("mixtral-8x7b", mixtral)),
        Work(name="Llama-2-7B, 2,048", recipe=_packaged("7b", 2048, 1024)),
    )


def dense_layouts(gpus: int) -> dict[str, dict[str, object]]:
    """Return the layouts that are given by hand, in the order of worth; without those that need more GPUs."""
    plain: dict[str, object] = {"tp_size": 1, "pp_size": 1, "sp_size": 1}
    one = {"zero_stage": 1, "sp_size": 1}
    found: dict[str, dict[str, object]] = {
        f"zero 2 dp {gpus}": {**plain, "zero_stage": 2},
        "tp 2 zero 1": {**plain, **one, "tp_size": 2},
        f"pp {gpus} zbv": {**plain, "pp_size": gpus, "pp_style": "zbv", "zero_stage": 1},
    }
    if gpus >= 4:
        found["tp 2 pp 2 zero 1"] = {**one, "tp_size": 2, "pp_size": 2, "pp_style": "1f1b"}
    if gpus == 4:
        found["tp 2 pp 2 interleaved"] = {**one, "tp_size": 2, "pp_size": 2, "pp_style": "interleaved"}
    if gpus >= 8:
        found["tp 4 pp 2 interleaved"] = {**one, "tp_size": 4, "pp_size": 2, "pp_style": "interleaved"}
    return found


def left_out(gpus: int) -> list[str]:
    """Return the names of the layouts that need more GPUs than there are."""
    return [name for name in dense_layouts(8) if "8" not in name and name not in dense_layouts(gpus)]


def _named(work: Work, layouts: Mapping[str, Mapping[str, object]], *names: str) -> list[Target]:
    return [Target(work=work, name=name, settings=layouts[name]) for name in names]


def _packaged(name: str, seq: int, batch: int) -> Recipe:
    longest = f"model.max_position_embeddings={max(seq, 4096)}"
    return load_recipe(name, [f"data.seq_length={seq}", f"training.global_batch_size={batch}", longest])


def _toy(seq: int, batch: int, layers: int, **model: object) -> Recipe:
    sizes = {
        "model_type": "mixtral" if "num_experts" in model else "llama",
        "num_hidden_layers": layers,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": 320,
        **model,
    }
    document = {
        "name": "toy",
        "model": sizes,
        "data": {"seq_length": seq},
        "training": {"global_batch_size": batch, "steps": 1000},
    }
    return parse(Recipe, document, source="toy")


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """What is run for a target.

    Attributes:
        case: As ranks take it.
        layout: The same for the planner.
        predicted_s: Of a step.
        predicted_gib: Of the fullest GPU.
        share: Part of the batch that is trained.
    """

    case: Case
    layout: Layout
    predicted_s: float
    predicted_gib: float
    share: float


class Planner:
    """Completes layouts for one machine; it keeps what it has found.

    Args:
        gpus: Of one host.
        machine: Kind of node, whose constants price them.
    """

    def __init__(self, gpus: int, machine: str) -> None:
        self._gpus = gpus
        self._topology = machine_topology(load_machine(machine), 1)
        self._found: dict[str, tuple[Problem, list[Candidate]]] = {}

    def choose(self, target: Target, share: float) -> Chosen:
        """Return the layout of a target with a share of its batch.

        Raises:
            HpjobError: No layout with these settings is legal and fits.
        """
        problem, candidates = self._candidates(target)
        if target.place >= len(candidates):
            raise HpjobError(f"{target.name}: only {len(candidates)} layouts fit", hint="leave it out")
        whole = candidates[target.place].layout
        layout = shortened(whole, 1.0 if target.is_whole else share)
        work = target.work
        settings = {
            "model_type": work.recipe.model.model_type,
            "max_position_embeddings": work.recipe.model.max_position_embeddings,
            "seq_length": layout.seq,
        }
        case = work_case(case_text(layout, work.recipe.model.num_hidden_layers), work.shape, settings, world=self._gpus)
        return Chosen(
            case=case,
            layout=layout,
            predicted_s=problem.runtime.step(layout).step,
            predicted_gib=problem.runtime.worst_gib(layout),
            share=layout.num_microbatches / whole.num_microbatches,
        )

    def _candidates(self, target: Target) -> tuple[Problem, list[Candidate]]:
        """The planner's choice, then the fastest layout that fits of each further (tp, pp, sp)."""
        key = f"{target.work.name} {sorted(target.settings.items())}"
        if key not in self._found:
            recipe = target.work.recipe
            parallel = recipe.parallel.model_dump() | dict(target.settings)
            recipe = parse(Recipe, recipe.model_dump() | {"parallel": parallel}, source=target.name)
            problem = make_problem(recipe, self._topology, gpus_per_node=self._gpus)
            limit = memory_limit_gib(problem.hardware)
            fitting = [c for c in survey(problem, limit).candidates if c.memory_gib <= limit and c.supported]
            first = [best_of(fitting)] if fitting else []
            best: dict[tuple[int, int, int], Candidate] = {}
            for candidate in first + sorted(fitting, key=lambda candidate: candidate.order):
                best.setdefault((candidate.layout.tp, candidate.layout.pp, candidate.layout.sp), candidate)
            self._found[key] = problem, list(best.values())
        return self._found[key]


def shortened(layout: Layout, share: float) -> Layout:
    """Return a layout with a share of its microbatches, as many as its schedule needs to be told from others."""
    least = 2 * layout.pp if layout.pp > 1 else 1
    count = max(least, round(layout.num_microbatches * share))
    if layout.style == "interleaved":
        count = -(-count // layout.pp) * layout.pp
    return layout._replace(num_microbatches=min(count, layout.num_microbatches))


def case_text(layout: Layout, num_layers: int) -> str:
    """Return a layout as parity cases write it."""
    words: dict[str, object] = {
        "tp_size": layout.tp,
        "pp_size": layout.pp,
        "dp_size": layout.dp,
        "sp_size": layout.sp,
        "ep_size": layout.ep,
        "zero_stage": layout.zero,
        "num_microbatches": layout.num_microbatches,
        "microbatch_size": layout.microbatch,
        "recompute": layout.recompute,
        "every_kth_layer": layout.every_kth,
        "precision": layout.precision,
    }
    if layout.sequence_mode is not None:
        words |= {"enable_sequence_parallelism": "true", "sequence_parallelism_mode": layout.sequence_mode}
    if layout.pp > 1:
        stages = ",".join(str(count) for count in stage_layers(num_layers, layout))
        words |= {"pp_style": layout.style, "num_model_chunks": layout.chunks, "layers_per_stage": stages}
    return " ".join(f"{key}={value}" for key, value in words.items())


def parity_text(layout: Layout) -> str:
    """Return a layout for a small model of another batch and number of layers."""
    kept = [word for word in case_text(layout, 16 * layout.pp).split() if not word.startswith(_OF_THE_MODEL)]
    return " ".join(kept)
