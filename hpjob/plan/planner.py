"""Chooses a plan: the fastest layout that is legal, fits into memory and can be executed."""

from __future__ import annotations

from dataclasses import replace

from hpjob.core.errors import NothingFitsError, UserInputError
from hpjob.plan.constants import held_out_error
from hpjob.plan.hardware import Hardware, hardware_of
from hpjob.plan.layout import stage_layers
from hpjob.plan.legality import RUNTIME, model_problems, unsupported_layout
from hpjob.plan.memory import memory_limit_gib
from hpjob.plan.model import ParallelDegrees, Pipeline, Plan, TimeEstimate
from hpjob.plan.offload import exceeds_host, host_gib, why_no_offload
from hpjob.plan.placement import place
from hpjob.plan.placement_gpus import lines_up
from hpjob.plan.problem import Problem
from hpjob.plan.reasons import explain_choice
from hpjob.plan.refusal import no_legal_layout, nothing_fits
from hpjob.plan.search import Candidate, best_of, survey
from hpjob.plan.shape import shape_of
from hpjob.plan.site import default_site, load_site, with_site
from hpjob.plan.what_if import binding, changes
from hpjob.recipe.model import Recipe
from hpjob.topology.groups import connected_size, largest_group_size, usable_gpus
from hpjob.topology.load import load_machine
from hpjob.topology.model import MachineType, Node, Topology

_FALLBACK_MACHINE = "dgx-a100-40g"
_WIDTHS = 2.0
"""Mean errors on unseen families that the interval around a predicted step time spans to each side."""


def make_plan(recipe: Recipe, topology: Topology, *, gpus_per_node: int | None = None, site: str | None = None) -> Plan:
    """Return the best plan of a recipe for the nodes of a topology.

    Args:
        recipe: Values that it fixes are kept; ``auto`` ones are chosen.
        topology: Its nodes are all used.
        gpus_per_node: Ranks a node; None = the recipe's value, else all GPUs of a node.
        site: File with constants that were measured; None = the user's, where there is one.

    Raises:
        UserInputError: Fixed values contradict each other or the nodes.
        NothingFitsError: Every legal layout needs more memory than a GPU has.
    """
    contradictions = model_problems(recipe.model)
    if contradictions:
        raise UserInputError(
            "\n".join(f"recipe {recipe.name}: {problem}" for problem in contradictions),
            hint="correct the model section of the recipe",
        )
    problem, warnings = _problem(recipe, topology, gpus_per_node, site)
    hardware = problem.hardware
    limit = memory_limit_gib(hardware)
    found = survey(problem, limit)
    if not found.any_legal:
        raise no_legal_layout(problem, recipe.name)
    if problem.settings.cpu_offload is True and (words := exceeds_host(problem, len(topology.nodes))):
        raise NothingFitsError(
            f"recipe {recipe.name}: {words}", hint="use more nodes, or leave parallel.cpu_offload auto"
        )
    candidates = found.candidates
    fitting = [candidate for candidate in candidates if candidate.memory_gib <= limit]
    if not fitting and found.least is not None:
        offloaded = _offloaded(problem, limit, len(topology.nodes))
        if offloaded is None:
            raise nothing_fits(problem, found.least, limit, recipe.name, len(topology.nodes))
        problem, fitting, note = offloaded
        candidates, warnings = fitting, (*warnings, note)
    # What the recipe fixes may be more than the runtime can do; nothing else may add to that.
    fewest = min(candidate.num_unsupported for candidate in fitting)
    runnable = [candidate for candidate in fitting if candidate.num_unsupported == fewest]
    best = best_of(runnable)
    warnings += tuple(unsupported_layout(best.layout))
    if problem.hardware.gpu.name == "v100" and recipe.parallel.precision == "bf16":
        warnings += ("V100 has no tensor cores for bf16: the times are those of parallel.precision=fp16",)
    further = recipe.model.config_values or {}
    if further.get("mlp_only_layers") or further.get("decoder_sparse_step", 1) != 1:
        warnings += (
            "layers without experts are priced like those with experts (mlp_only_layers, decoder_sparse_step)",
        )
    if recipe.model.model_type not in RUNTIME.families:
        warnings += (f"the runtime has no {recipe.model.model_type} models (it has {', '.join(RUNTIME.families)})",)
    return _plan(recipe, topology, problem, best, candidates, warnings)


def _offloaded(problem: Problem, limit_gib: float, num_nodes: int) -> tuple[Problem, list[Candidate], str] | None:
    """Search once more with the optimizer's states in the host's memory, where the recipe leaves that open."""
    if why_no_offload(problem, num_nodes):
        return None
    problem = replace(problem, settings=problem.settings.model_copy(update={"cpu_offload": True}))
    fitting = [found for found in survey(problem, limit_gib).candidates if found.memory_gib <= limit_gib]
    if not fitting:
        return None
    known = problem.hardware.host_memory_gib
    size = f"of {known:,.0f} GiB" if known else "(how much a node has is not known)"
    note = (
        "nothing fits without offloading: master weights and optimizer state lie in the host's memory, "
        f"about {host_gib(problem, num_nodes):,.0f} GiB a node {size}"
    )
    return problem, fitting, note


def make_problem(
    recipe: Recipe, topology: Topology, *, gpus_per_node: int | None = None, site: str | None = None
) -> Problem:
    """Return what a plan has to solve: sizes, fixed values and the speeds of the nodes."""
    return _problem(recipe, topology, gpus_per_node, site)[0]


def _problem(
    recipe: Recipe, topology: Topology, gpus_per_node: int | None, site: str | None
) -> tuple[Problem, tuple[str, ...]]:
    machine, warnings = _machine(topology)
    per_node = _ranks_per_node(recipe, topology, machine, gpus_per_node)
    machine, found_links = _with_seen_links(machine, topology)
    warnings += found_links
    if recipe.parallel.enable_flash_attention is False:
        warnings += ("enable_flash_attention false: memory and time are those of a score matrix in memory",)
    problem = Problem(
        shape=shape_of(recipe.model),
        settings=recipe.parallel,
        seq=recipe.data.seq_length,
        global_batch=recipe.training.global_batch_size,
        world_size=len(topology.nodes) * per_node,
        hardware=_hardware(machine, topology, per_node),
    )
    found = (load_site(site), site) if site else default_site()
    if found is None:
        return problem, warnings
    hardware, words = with_site(problem.hardware, found[0], machine.gpu_model)
    if not words:
        return problem, (*warnings, f"{found[1]} says nothing of {machine.gpu_model}")
    text = f"{', '.join(words)} from {found[1]}" + (f" ({found[0].note})" if found[0].note else "")
    return replace(problem, hardware=hardware, basis=found[0].basis, basis_words=text), warnings


def _machine(topology: Topology) -> tuple[MachineType, tuple[str, ...]]:
    if topology.machine is not None:
        return topology.machine, ()
    machine = load_machine(_FALLBACK_MACHINE)
    memory = [gpu.memory_gib for node in topology.nodes for gpu in node.gpus if gpu.memory_gib]
    if memory:
        machine = machine.model_copy(update={"gpu_memory_gib": min(memory)})
    count = len(topology.nodes[0].gpus)
    if count:
        island = min(machine.island_size, count)
        machine = machine.model_copy(update={"gpus_per_node": count, "island_size": island})
    note = f"the kind of GPU is not known: estimates are those of {_FALLBACK_MACHINE} (--machine names another)"
    return machine, (note,)


def _with_seen_links(machine: MachineType, topology: Topology) -> tuple[MachineType, tuple[str, ...]]:
    """Shrink the island of a machine to what was seen linked in every node."""
    if machine.island_kind not in ("nvlink", "xgmi"):
        return machine, ()
    sizes = {node.name: largest_group_size(node) for node in _seen(topology)}
    expected = min(machine.island_size, machine.gpus_per_node)
    worst = min(sizes, key=lambda name: sizes[name], default=None)
    if worst is None or sizes[worst] >= expected:
        return machine, ()
    size = sizes[worst]
    note = f"{worst}: its GPUs are all linked in groups of {size}, not {expected}; tp is kept inside such groups"
    return machine.model_copy(update={"island_size": size}), (note,)


def _seen(topology: Topology) -> list[Node]:
    return [node for node in topology.nodes if node.gpus and node.islands is not None]


def _hardware(machine: MachineType, topology: Topology, per_node: int | None) -> Hardware:
    """Speeds of the nodes; islands with a link missing still connect all their GPUs."""
    hardware = hardware_of(machine, per_node)
    if hardware.island_size >= hardware.gpus_per_node or not _seen(topology):
        return hardware
    count = hardware.gpus_per_node
    if min(connected_size(node) for node in _seen(topology)) < count:
        return hardware
    return replace(hardware, linked_size=count, lines_up=all(lines_up(node, count) for node in _seen(topology)))


def _ranks_per_node(recipe: Recipe, topology: Topology, machine: MachineType, asked: int | None) -> int:
    wanted = asked or (recipe.job.gpus_per_node if isinstance(recipe.job.gpus_per_node, int) else None)
    # Sliced GPUs and display cards carry no rank; a machine that has nothing else is taken as it is.
    have = min(len(usable_gpus(node)) or len(node.gpus) for node in topology.nodes) or None
    if machine.island_kind == "host":
        return wanted or machine.gpus_per_node
    if wanted and have and wanted > have:
        raise UserInputError(
            f"{wanted} GPUs a node asked for, but the nodes have {have}",
            hint=f"use --set job.gpus_per_node={have} or less, or leave it `auto`",
        )
    return wanted or have or machine.gpus_per_node


def _plan(
    recipe: Recipe,
    topology: Topology,
    problem: Problem,
    best: Candidate,
    candidates: list[Candidate],
    warnings: tuple[str, ...],
) -> Plan:
    layout, hardware = best.layout, problem.hardware
    degrees = ParallelDegrees(pp=layout.pp, dp=layout.dp, sp=layout.sp, tp=layout.tp, ep=layout.ep)
    ordered, placement = place(degrees, topology, hardware.gpus_per_node)
    warnings += tuple(note for note in ordered.notes if note not in topology.notes)
    limit = memory_limit_gib(hardware)
    reasons, runners_up = explain_choice(problem, best, candidates, limit)
    return Plan(
        recipe=recipe.name,
        model_type=recipe.model.model_type,
        machine=hardware.name,
        num_nodes=len(ordered.nodes),
        gpus_per_node=hardware.gpus_per_node,
        degrees=degrees,
        zero_stage=layout.zero,
        zero_shard_size=layout.zero_shard,
        sequence_parallelism_mode=layout.sequence_mode,
        pipeline=Pipeline(
            style=layout.style,
            num_model_chunks=layout.chunks,
            num_microbatches=layout.num_microbatches,
            microbatch_size=layout.microbatch,
            layers_per_stage=stage_layers(problem.shape.num_layers, layout),
            stage_costs=problem.runtime.time_model(layout).zbv_costs(layout),
        ),
        recompute=layout.recompute,
        recompute_every_kth_layer=layout.every_kth,
        recompute_layers_per_stage=recipe.parallel.gradient_checkpoint_config.num_ckpt_layers_per_stage,
        precision=layout.precision,
        cpu_offload=layout.cpu_offload,
        global_batch_size=problem.global_batch,
        seq_length=problem.seq,
        placement=placement,
        memory=tuple(problem.runtime.rank_memory(layout, rank) for rank in range(layout.pp)),
        memory_limit_gib=limit,
        time=_time_estimate(best, problem),
        reasons=reasons,
        binding=binding(best, candidates, limit),
        runners_up=runners_up,
        changes=changes(problem, best, candidates, limit, len(ordered.nodes)),
        basis=problem.basis,
        basis_note="; ".join(filter(None, (problem.basis_words, _interval_words()))),
        warnings=warnings,
    )


def _interval_words() -> str:
    return (
        f"the interval is {_WIDTHS:g} times {100 * held_out_error():.1f} %, the mean error on families of published "
        "runs that the fit had not seen"
    )


def _time_estimate(best: Candidate, problem: Problem) -> TimeEstimate:
    t = best.time
    width = _WIDTHS * held_out_error()
    return TimeEstimate(
        step_s=round(t.step, 4),
        compute_s=round(t.compute, 4),
        bubble_s=round(t.bubble, 4),
        tp_comm_s=round(t.tp_comm, 4),
        pp_comm_s=round(t.pp_comm, 4),
        dp_comm_s=round(t.dp_comm, 4),
        optimizer_s=round(t.optimizer, 4),
        tokens_per_s=round(problem.global_batch * problem.seq / t.step, 1),
        low_s=round(t.step * (1 - width), 4),
        high_s=round(t.step * (1 + width), 4),
    )


def hardware_for(topology: Topology, gpus_per_node: int | None = None) -> Hardware:
    """Return the speeds that plans for a topology are priced with."""
    machine, _ = _with_seen_links(_machine(topology)[0], topology)
    return _hardware(machine, topology, gpus_per_node)
