"""Properties that every plan has, whatever the model and the machine."""

from hypothesis import given, settings
from hypothesis import strategies as st

from hpjob.core.errors import HpjobError
from hpjob.plan.enumeration import legal_layouts
from hpjob.plan.hardware import hardware_of
from hpjob.plan.layout import Layout
from hpjob.plan.legality import problems, unsupported_by_runtime
from hpjob.plan.memory import GIB, memory_limit_gib
from hpjob.plan.model import Plan
from hpjob.plan.planner import make_plan, make_problem
from hpjob.plan.problem import Problem
from hpjob.plan.search import SAME, survey
from hpjob.plan.shape import shape_of
from hpjob.recipe.load import load_recipe
from hpjob.recipe.model import Recipe
from hpjob.topology.load import load_machine, machine_topology
from hpjob.topology.model import MachineType

_MACHINES = st.sampled_from(["dgx-a100-40g", "dgx-a100-80g", "hgx-h100", "gb200-nvl72", "mi250x", "pcie-l40s"])
_NODES = st.sampled_from([1, 2, 3, 4, 6])


@st.composite
def _recipes(draw: st.DrawFn) -> Recipe:
    heads = draw(st.sampled_from([16, 24, 32]))
    hidden = heads * 128
    values = {
        "num_hidden_layers": draw(st.integers(4, 40)),
        "hidden_size": hidden,
        "intermediate_size": draw(st.sampled_from([2, 3, 4])) * hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": draw(st.sampled_from([8, heads])),
    }
    overrides = [f"model.{name}={value}" for name, value in values.items()]
    overrides.append(f"training.global_batch_size={draw(st.sampled_from([48, 96, 192]))}")
    return load_recipe("7b", overrides)


def _made(recipe: Recipe, machine: str, nodes: int) -> Plan | None:
    try:
        return make_plan(recipe, machine_topology(load_machine(machine), nodes))
    except HpjobError:
        return None


@given(recipe=_recipes(), machine=_MACHINES, nodes=_NODES)
@settings(max_examples=8, deadline=None)
def test_plans_fill_the_world_run_and_fit(recipe: Recipe, machine: str, nodes: int) -> None:
    plan = _made(recipe, machine, nodes)
    if plan is None:
        return
    assert plan.degrees.world_size == nodes * plan.gpus_per_node
    assert plan.degrees.dp * plan.pipeline.num_microbatches * plan.pipeline.microbatch_size == plan.global_batch_size
    assert sum(plan.pipeline.layers_per_stage) == recipe.model.num_hidden_layers
    assert unsupported_by_runtime(plan) == []
    assert max(rank.total_gib for rank in plan.memory) <= plan.memory_limit_gib + 0.01
    assert plan == _made(recipe, machine, nodes)


@given(recipe=_recipes(), machine=_MACHINES, nodes=st.sampled_from([1, 2, 4]), factor=st.floats(1.05, 3))
@settings(max_examples=5, deadline=None)
def test_more_memory_never_makes_the_best_plan_slower(recipe: Recipe, machine: str, nodes: int, factor: float) -> None:
    """As far as predicted times tell plans apart: of those that they do not, the simplest one is taken."""
    base = load_machine(machine)
    larger = base.model_copy(update={"gpu_memory_gib": base.gpu_memory_gib * factor})
    small = _made(recipe, machine, nodes)
    if small is None:
        return
    large = make_plan(recipe, machine_topology(larger, nodes))
    assert large.time.step_s <= small.time.step_s * (1 + SAME + 1e-6)
    assert _fastest(recipe, larger, nodes) <= _fastest(recipe, base, nodes) * (1 + 1e-6)


def _fastest(recipe: Recipe, machine: MachineType, nodes: int) -> float:
    problem = make_problem(recipe, machine_topology(machine, nodes))
    limit = memory_limit_gib(problem.hardware)
    fitting = [found for found in survey(problem, limit).candidates if found.memory_gib <= limit]
    return min(candidate.time.step for candidate in fitting if candidate.supported)


@given(recipe=_recipes(), machine=_MACHINES)
@settings(max_examples=8, deadline=None)
def test_layouts_ruled_out_for_memory_are_over_the_limit_by_hand(recipe: Recipe, machine: str) -> None:
    hardware = hardware_of(load_machine(machine))
    shape = shape_of(recipe.model)
    problem = Problem(shape, recipe.parallel, recipe.data.seq_length, 96, hardware.gpus_per_node, hardware)
    limit = hardware.memory_gib / 2
    candidates = survey(problem, limit).candidates
    best = min((c.time.step for c in candidates if c.memory_gib <= limit), default=float("inf"))
    for candidate in candidates:
        assert (candidate.memory_gib <= limit) == (_by_hand(problem, candidate.layout) <= limit)
    for layout in list(legal_layouts(problem))[::97]:
        assert problems(shape, layout, problem.world_size) == []
        if problem.runtime.step(layout, simulate=False).step < best * 0.97:
            assert _by_hand(problem, layout) > limit, "nothing that fits is faster than the best plan"


def _by_hand(problem: Problem, layout: Layout) -> float:
    ranks = [problem.runtime.rank_bytes(layout, rank) for rank in range(layout.pp)]
    return max(r.weights + r.gradients + r.optimizer + r.activations + r.logits + r.reserve for r in ranks) / GIB
