"""From what a person asked for to a job that is ready to be written and submitted. Writes nothing."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpjob.core.errors import EnvironmentProblemError, UserInputError
from hpjob.core.quantity import parse_duration_s
from hpjob.core.run_dir import RunDir
from hpjob.plan.legality import unsupported_by_runtime
from hpjob.plan.model import Plan
from hpjob.plan.planner import make_plan
from hpjob.recipe.data_files import check_token_files
from hpjob.recipe.load import load_recipe
from hpjob.recipe.model import Recipe
from hpjob.recipe.weight_files import check_weight_files
from hpjob.slurm.checks import check_against_site, check_name, check_save_window, find_partition
from hpjob.slurm.continuation import decide_chain, preemption, shared_folder_note, window_note
from hpjob.slurm.lead import bound_loss, expected_save_s, signal_lead_s
from hpjob.slurm.leave_out import leave_out_bad_nodes
from hpjob.slurm.live import ExecutorName
from hpjob.slurm.model import JobSpec
from hpjob.slurm.options import pass_through
from hpjob.slurm.render import render_script
from hpjob.slurm.segment import wanted_segment
from hpjob.slurm.site import NoSlurmError, Site, read_site
from hpjob.slurm.submit_environment import override_warnings
from hpjob.topology.load import load_machine, local_topology, machine_topology
from hpjob.topology.model import Topology
from hpjob.topology.slurm import cluster_topology

_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
"""Shorter than a file system's 255 bytes, since names of other files begin with it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What a person typed."""

    recipe: str
    nodes: int
    machine: str | None = None
    overrides: Sequence[str] = ()
    name: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None
    runs: Path
    """Folder of all runs."""
    executor: str = "auto"
    dry_run: bool = False
    sbatch_options: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A job that passed all checks."""

    run: RunDir
    executor: ExecutorName
    recipe: Recipe
    topology: Topology
    plan: Plan
    spec: JobSpec
    script: str
    notes: tuple[str, ...]
    """What a person has to know; one sentence each."""


def prepare(request: Request) -> Prepared:
    """Resolve, plan, render and check.

    Raises:
        HpjobError: Anything that would make the job fail, wait for ever or surprise its owner.
    """
    options = pass_through(request.sbatch_options)
    recipe = _recipe(request)
    executor, site, notes = choose_executor(request.executor, machine=request.machine, dry_run=request.dry_run)
    if site is not None:
        # Said before planning: a plan for a partition that does not exist helps nobody.
        find_partition(recipe.job.partition, site)
    topology = _topology(request, recipe, executor)
    plan = make_plan(recipe, topology)
    notes += _check_runnable(request, recipe, plan)
    run = RunDir(_run_path(request, recipe))
    spec = job_spec(run, recipe, topology, plan, executor=executor, options=options)
    spec, left_out = leave_out_bad_nodes(spec, site)
    notes += left_out
    spec, recipe, more = settle(spec, recipe, plan, site)
    notes += more
    if executor == "slurm":
        notes += override_warnings(os.environ)
    if spec.segment:
        notes.append(
            f"asks for nodes in groups of {spec.segment} that share a block, as pipeline and tensor groups want; "
            "`-- --segment=1` would let Slurm scatter them"
        )
    return Prepared(
        run=run,
        executor=executor,
        recipe=recipe,
        topology=topology,
        plan=plan,
        spec=spec,
        script=render_script(spec),
        notes=tuple(dict.fromkeys(notes)),
    )


def choose_executor(
    asked: str, *, machine: str | None = None, dry_run: bool = False
) -> tuple[ExecutorName, Site | None, list[str]]:
    """Decide who runs the job.

    Args:
        asked: ``slurm``, ``local`` or ``auto``.
        machine: The kind of node to plan for, when a person named one.
        dry_run: Whether only the script is wanted.

    Returns:
        The executor, what the site says when it is Slurm, and notes.

    Raises:
        EnvironmentProblemError: Slurm is needed, or configured here, and does not answer.
        UserInputError: No such executor.
    """
    if asked not in {"auto", "slurm", "local"}:
        raise UserInputError(f"unknown executor {asked!r}", hint="use --executor auto, slurm or local")
    if asked == "local":
        return "local", None, []
    if machine is not None and dry_run:
        return "slurm", None, ["the site was not asked: the script is for nodes of the machine named"]
    try:
        return "slurm", read_site(), []
    except NoSlurmError as error:
        if asked == "slurm":
            raise
        if machine is not None:
            raise EnvironmentProblemError(
                f"--machine {machine} describes nodes of a cluster, but {error.message}",
                hint="add --dry-run to see the script, or leave out --machine to run on this machine",
            ) from None
        return "local", None, [f"{error.message}: running on this machine with the local executor"]


def job_spec(
    run: RunDir,
    recipe: Recipe,
    topology: Topology,
    plan: Plan,
    *,
    executor: ExecutorName,
    options: tuple[str, ...] = (),
) -> JobSpec:
    """Return what the job script says for a plan."""
    return JobSpec(
        job_name=run.name,
        run_dir=str(run.path),
        python=sys.executable,
        nodes=plan.num_nodes,
        ranks_per_node=plan.gpus_per_node,
        gpus_per_node=0 if executor == "local" else _gpus_to_ask(topology, plan.gpus_per_node),
        segment=wanted_segment(plan, topology, options) if executor == "slurm" and topology.source == "slurm" else None,
        cpus_per_rank=recipe.job.cpus_per_rank or _share_of_cpus(topology, plan.gpus_per_node),
        time_limit_s=recipe.job.time_limit,
        partition=recipe.job.partition,
        account=recipe.job.account,
        qos=recipe.job.qos,
        signal_lead_s=signal_lead_s(plan.time.step_s, expected_save_s(plan)),
        setup=recipe.job.setup,
        env=recipe.job.env,
        extra_options=options,
    )


def settle(
    spec: JobSpec,
    recipe: Recipe,
    plan: Plan,
    site: Site | None,
    *,
    step_s: float | None = None,
    save_s: float | None = None,
) -> tuple[JobSpec, Recipe, list[str]]:
    """Check a job against the site and decide how it goes on when its nodes are taken.

    Args:
        spec: The job.
        recipe: What it trains.
        plan: Its plan.
        site: What the site says; None = only the time limit is checked.
        step_s: Seconds of a step if they were measured, else the plan's.
        save_s: Seconds of a save if they were measured, else a cautious guess.

    Returns:
        The job with its kind of continuation, the recipe with what the site's time to save asks for, and warnings.

    Raises:
        UserInputError: The job could not run.
    """
    step_s, save_s = step_s or plan.time.step_s, save_s or expected_save_s(plan)
    if site is None:
        check_save_window(spec, save_s=save_s)
        return spec, recipe, []
    notes = check_against_site(spec, site, save_s=save_s)
    found = preemption(spec, site, find_partition(spec.partition, site))
    chain, more = decide_chain(spec, site, found)
    notes += more
    if note := window_note(found, step_s=step_s, save_s=save_s):
        recipe, consequence = bound_loss(recipe, step_s=step_s, save_s=save_s)
        notes.append(f"{note}: {consequence}")
    if note := shared_folder_note(spec):
        notes.append(note)
    return spec.model_copy(update={"chain": chain}), recipe, notes


def _recipe(request: Request) -> Recipe:
    recipe = load_recipe(request.recipe, request.overrides)
    job = {name: value for name in ("partition", "account", "qos") if (value := getattr(request, name)) is not None}
    if request.time is not None:
        try:
            job["time_limit"] = parse_duration_s(request.time)
        except ValueError as error:
            what = str(error).partition(":")[0]
            raise UserInputError(
                f"--time {request.time!r} {what}", hint="write --time 90m, 12h, 12:00:00 or 1-12:00:00"
            ) from None
    for name in ("partition", "account", "qos"):
        check_name(name, job.get(name, getattr(recipe.job, name)))
    data = {"path": os.path.abspath(recipe.data.path)} if recipe.data.path else {}  # noqa: PTH100 (keeps links)
    start = recipe.training.initial_weights
    training = {"initial_weights": os.path.abspath(start)} if start else {}  # noqa: PTH100
    return recipe.model_copy(
        update={
            "job": recipe.job.model_copy(update=job),
            "data": recipe.data.model_copy(update=data),
            "training": recipe.training.model_copy(update=training),
        }
    )


def _topology(request: Request, recipe: Recipe, executor: ExecutorName) -> Topology:
    if request.machine is not None:
        return machine_topology(load_machine(request.machine), request.nodes)
    if executor == "slurm":
        return cluster_topology(recipe.job.partition, request.nodes)
    ranks = recipe.job.gpus_per_node
    return local_topology(request.nodes, ranks if isinstance(ranks, int) else None)


def _check_runnable(request: Request, recipe: Recipe, plan: Plan) -> list[str]:
    problems = unsupported_by_runtime(plan)
    if problems and not request.dry_run:
        raise UserInputError(
            "\n".join(f"the runtime cannot run this plan: {problem}" for problem in problems),
            hint="change the values named with --set; `hpjob plan` shows other layouts",
        )
    notes = [f"the runtime cannot run this plan yet: {problem}" for problem in problems]
    if recipe.training.initial_weights:
        check_weight_files(recipe.training.initial_weights, recipe.model)
    try:
        check_token_files(
            recipe.data.path, recipe.model.vocab_size, recipe.data.seq_length, recipe.training.global_batch_size
        )
    except UserInputError as error:
        if not (request.dry_run and request.machine):
            raise
        notes.append(f"{error.message}: the job could not start so")
    return notes


def _run_path(request: Request, recipe: Recipe) -> Path:
    runs = Path(os.path.abspath(request.runs))  # noqa: PTH100 (a link stays: nodes may mount its target elsewhere)
    if request.name is None:
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", recipe.name).strip("-._") or "run"
        number = 1
        while (runs / f"{stem}-{number:03d}").exists():
            number += 1
        return runs / f"{stem}-{number:03d}"
    if not _RUN_NAME.fullmatch(request.name):
        raise UserInputError(
            f"run name {request.name!r} is not usable",
            hint="use at most 200 letters, digits, `.`, `_` and `-`, beginning with a letter or digit",
        )
    path = runs / request.name
    if path.exists():
        raise UserInputError(
            f"run {request.name} exists already in {runs}",
            hint="choose another --name, or go on with "
            f"`hpjob resume {request.name if request.runs == Path('runs') else path}`",
        )
    return path


def _gpus_to_ask(topology: Topology, ranks_per_node: int) -> int:
    real = all(sum(gpu.model != "cpu" for gpu in node.gpus) >= ranks_per_node for node in topology.nodes)
    return ranks_per_node if real else 0


def _share_of_cpus(topology: Topology, ranks_per_node: int) -> int | None:
    """Return the CPUs that go with one GPU; sites give one CPU a task by default, which starves data loading."""
    if topology.source != "slurm" or not all(node.cpus and node.gpus for node in topology.nodes):
        return None
    return min((node.cpus or 0) // max(len(node.gpus), ranks_per_node) for node in topology.nodes) or None
