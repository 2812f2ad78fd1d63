"""A new job for a run that stopped: same folder, newest checkpoint, on request another number of nodes."""

from __future__ import annotations

import os
from dataclasses import dataclass

from hpjob.core.errors import UserInputError
from hpjob.core.run_dir import RunDir
from hpjob.core.run_records import read_json
from hpjob.core.schema import parse
from hpjob.plan.legality import unsupported_by_runtime
from hpjob.plan.model import Plan
from hpjob.plan.replan import replan
from hpjob.recipe.data_files import check_token_files
from hpjob.recipe.load import load_recipe
from hpjob.recipe.model import Recipe
from hpjob.slurm.attempt_begin import read_plan
from hpjob.slurm.lead import expected_save_s, measured_save_s, measured_step_s, signal_lead_s
from hpjob.slurm.leave_out import leave_out_bad_nodes
from hpjob.slurm.live import ExecutorName, live_submissions, read_submissions
from hpjob.slurm.model import JobSpec
from hpjob.slurm.options import sbatch_takes
from hpjob.slurm.prepare import Prepared, choose_executor, job_spec, settle
from hpjob.slurm.render import render_script
from hpjob.slurm.submit_environment import override_warnings
from hpjob.topology.load import load_topology, local_topology
from hpjob.topology.model import Topology
from hpjob.topology.slurm import cluster_topology


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumption:
    """What `hpjob resume` is about to do."""

    prepared: Prepared
    changes: tuple[str, ...]
    """What differs from the last start; one sentence each."""


def prepare_resume(run: RunDir, *, nodes: int | None, executor: str) -> Resumption:
    """Check that a run can go on, and plan anew when the number of nodes changes.

    Raises:
        HpjobError: It runs already, its folder is incomplete, or nothing fits.
    """
    _refuse_live(run)
    recipe = load_recipe(str(run.recipe), [])
    check_token_files(
        recipe.data.path, recipe.model.vocab_size, recipe.data.seq_length, recipe.training.global_batch_size
    )
    plan, topology = read_plan(run.plan), load_topology(str(run.topology))
    spec = parse(JobSpec, read_json(run.spec) or {}, source=str(run.spec))
    # A folder that was copied or renamed is a run of its own; the old path may hold another.
    spec = spec.model_copy(update={"job_name": run.name, "run_dir": str(run.path)})
    previous = read_submissions(run)
    chosen, site, notes = choose_executor(previous[-1].executor if executor == "auto" and previous else executor)
    changes: list[str] = []
    wanted = nodes or plan.num_nodes
    if wanted != plan.num_nodes or (chosen == "local") != (topology.source == "local"):
        topology = _topology(wanted, recipe, plan, chosen)
        old, (plan, released) = plan, _new_plan(recipe, topology, plan)
        changes = [*_differences(old, plan), *released]
        spec = job_spec(run, recipe, topology, plan, executor=chosen, options=spec.extra_options)
    spec = _with_measured_lead(run, spec, plan)
    if spec.segment and not sbatch_takes(f"--segment={spec.segment}"):
        spec = spec.model_copy(update={"segment": None})  # the run moved to a cluster with an older Slurm
    spec, left_out = leave_out_bad_nodes(spec, site)
    notes += left_out
    spec, recipe, more = settle(spec, recipe, plan, site, step_s=measured_step_s(run), save_s=measured_save_s(run))
    notes += more
    notes += override_warnings(os.environ) if chosen == "slurm" else []
    prepared = Prepared(
        run=run,
        executor=chosen,
        recipe=recipe,
        topology=topology,
        plan=plan,
        spec=spec,
        script=render_script(spec),
        notes=tuple(notes),
    )
    return Resumption(prepared=prepared, changes=tuple(changes))


def _refuse_live(run: RunDir) -> None:
    alive = live_submissions(run)
    if alive:
        submission, state = alive[-1]
        raise UserInputError(
            f"{run.name} needs no resume, it has job {submission.job_id}: {state.words}",
            hint=f"end it first with `hpjob cancel {run.path}`",
        )


def _topology(nodes: int, recipe: Recipe, plan: Plan, executor: ExecutorName) -> Topology:
    if executor == "slurm":
        return cluster_topology(recipe.job.partition, nodes)
    return local_topology(nodes, plan.gpus_per_node)


def _new_plan(recipe: Recipe, topology: Topology, old: Plan) -> tuple[Plan, tuple[str, ...]]:
    """Plan for other nodes; return one sentence for each value of the recipe that had to be given up, too."""
    found = replan(recipe, topology, previous=old, gpus_per_node=old.gpus_per_node)
    if problems := unsupported_by_runtime(found.plan):
        raise UserInputError(
            "\n".join(f"the runtime cannot run the new plan: {problem}" for problem in problems),
            hint=f"resume on {old.num_nodes} nodes, as before",
        )
    return found.plan, found.notes


def _differences(old: Plan, new: Plan) -> list[str]:
    found = [f"{old.num_nodes} nodes before, {new.num_nodes} now"] if old.num_nodes != new.num_nodes else []
    if old.summary != new.summary:
        found += [f"plan before: {old.summary}", f"plan now:    {new.summary}"]
    return found


def _with_measured_lead(run: RunDir, spec: JobSpec, plan: Plan) -> JobSpec:
    step_s, save_s = measured_step_s(run), measured_save_s(run)
    if step_s is None and save_s is None:
        return spec
    lead_s = signal_lead_s(step_s or plan.time.step_s, save_s or expected_save_s(plan))
    return spec.model_copy(update={"signal_lead_s": lead_s})
