"""The folder of a new attempt: which nodes, which rank where, and what was known at the start."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpjob.core.errors import EnvironmentProblemError, HpjobError, NothingFitsError, UserInputError
from hpjob.core.run_dir import AttemptDir, RunDir
from hpjob.core.run_records import newest_checkpoint_step, read_json, write_json, write_text_atomically
from hpjob.core.schema import parse
from hpjob.plan.model import Plan
from hpjob.slurm.chain import ensure_successor, is_chained, why_not_to_go_on
from hpjob.slurm.controller_view import ask_controller
from hpjob.slurm.job_environment import current_job, node_addresses
from hpjob.slurm.live import refuse_second_job
from hpjob.slurm.master_address import master_address
from hpjob.slurm.measured_lead import refresh_script
from hpjob.slurm.node_faults import remember_lost_nodes
from hpjob.slurm.seen_from_inside import seen_from_inside
from hpjob.slurm.site import read_site
from hpjob.slurm.submit_environment import override_warnings
from hpjob.topology.model import Topology

logger = logging.getLogger("hpjob")


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Who starts an attempt, and on which nodes."""

    job_id: str
    executor: str
    restart_count: int
    topology: Topology
    addresses: Mapping[str, str]
    """Node name -> address."""
    own_node: str | None
    site: Mapping[str, object]


def begin_on_slurm(run: RunDir) -> AttemptDir | None:
    """Begin an attempt inside a Slurm job; None when it, or the job that it succeeds, was stopped for good.

    Raises:
        HpjobError: The nodes cannot carry a plan, their addresses are unusable, the run runs elsewhere, or the run
            folder is incomplete.
    """
    from hpjob.topology.slurm import cluster_topology  # noqa: PLC0415

    job = current_job()
    # A controller that has just been restarted may need a moment.
    ask_controller(job.job_id)
    nothing_to_do = why_not_to_go_on(run, job.job_id)
    if nothing_to_do is not None:
        logger.info("%s, so this job has nothing to do; `hpjob resume` goes on", nothing_to_do)
        return None
    if lost := remember_lost_nodes(run):
        logger.warning("the last attempt was lost with %s", ", ".join(lost))
    for warning in override_warnings(os.environ):
        logger.warning("%s", warning)
    known = cluster_topology(job.partition, len(job.nodes), job.nodes)
    topology = seen_from_inside(known, read_plan(run.plan).gpus_per_node)
    attempt = begin(
        run,
        Start(
            job_id=job.job_id,
            executor="slurm",
            restart_count=job.restart_count,
            topology=topology,
            addresses=node_addresses(job.nodes),
            own_node=os.environ.get("SLURMD_NODENAME"),
            site=_site_facts(),
        ),
    )
    view = ask_controller(job.job_id)
    if view is not None and view.preempted:
        # Slurm signals only the steps that are there when the grace time begins; this one comes too late for it.
        logger.warning("the job is being preempted already: the ranks are told to leave as soon as they can")
        run.stop.touch()
    if is_chained(run):
        refresh_script(run)
        ensure_successor(run, job.job_id)
    return attempt


def begin(run: RunDir, start: Start) -> AttemptDir:
    """Write ``hosts``, ``plan.json``, ``topology.yaml`` and ``attempt.json`` of a new attempt.

    Raises:
        HpjobError: No plan fits the nodes, or the run runs elsewhere.
    """
    from hpjob.topology.load import dump_topology  # noqa: PLC0415

    refuse_second_job(run, job_id=start.job_id)
    _forget_old_requests(run, start.job_id)
    plan, topology = _plan_on(run, start.topology)
    _log_remarks(start.topology, topology)
    hosts = [topology.nodes[place.node].name for place in sorted(plan.placement, key=lambda place: place.rank)]
    unique_hosts = list(dict.fromkeys(hosts))
    address = master_address(hosts[0], {name: start.addresses.get(name, name) for name in unique_hosts}, start.own_node)
    document: dict[str, object] = {
        "version": 1,
        "job_id": start.job_id,
        "restart_count": start.restart_count,
        "executor": start.executor,
        "started_at": time.time(),
        "hostnames": unique_hosts,
        "batch_host": socket.gethostname(),
        "world_size": len(hosts),
        "master_addr": address,
        "checkpoint_step": newest_checkpoint_step(run),
        "site": dict(start.site),
    }
    texts = {
        "hosts": "".join(f"{host}\n" for host in hosts),
        "plan.json": plan.model_dump_json(indent=2) + "\n",
        "topology.yaml": dump_topology(topology),
    }
    attempt, document = _enter(run, start, document, texts)
    _log_start(document, plan)
    return attempt


def _plan_on(run: RunDir, topology: Topology) -> tuple[Plan, Topology]:
    """Place the run's plan on the nodes given; make a new plan when their number is another."""
    from hpjob.plan.placement import place  # noqa: PLC0415

    plan = read_plan(run.plan)
    if len(topology.nodes) != plan.num_nodes:
        plan = _new_plan(run, plan, topology)
    ordered, places = place(plan.degrees, topology, plan.gpus_per_node)
    return plan.model_copy(update={"placement": tuple(places)}), ordered


def _new_plan(run: RunDir, old: Plan, topology: Topology) -> Plan:
    """Plan for another number of nodes at the same global batch and data order; what that costs is in its warnings."""
    from hpjob.plan.legality import unsupported_by_runtime  # noqa: PLC0415
    from hpjob.plan.replan import replan  # noqa: PLC0415
    from hpjob.recipe.load import load_recipe  # noqa: PLC0415

    count = len(topology.nodes)
    try:
        found = replan(load_recipe(str(run.recipe), []), topology, previous=old, gpus_per_node=old.gpus_per_node)
    except HpjobError as error:
        raise NothingFitsError(
            f"the plan is for {_nodes(old.num_nodes)}, Slurm gave {count}, and no plan fits these: {error.message}",
            hint=f"start it on {_nodes(old.num_nodes)}, or `hpjob resume {run.path} --nodes N`",
        ) from None
    if problems := unsupported_by_runtime(found.plan):
        raise NothingFitsError(
            f"no plan for {_nodes(count)} can be run: {'; '.join(problems)}",
            hint=f"start it on {_nodes(old.num_nodes)}",
        )
    logger.info("Slurm gave %d nodes, the plan was for %d: now %s", count, old.num_nodes, found.plan.summary)
    for note in found.notes:
        logger.warning("%s", note)
    return found.plan.model_copy(update={"warnings": (*found.plan.warnings, *found.notes)})


def read_plan(path: Path) -> Plan:
    """Read a ``plan.json``.

    Raises:
        UserInputError: It is missing or damaged.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserInputError(
            f"{path} cannot be read: {error}", hint="the run folder is incomplete; submit the run anew"
        ) from None
    return parse(Plan, document, source=str(path))


def _enter(
    run: RunDir, start: Start, document: dict[str, object], texts: Mapping[str, str]
) -> tuple[AttemptDir, dict[str, object]]:
    """Make the attempt's folder in one step, complete; of two jobs that try at once, one is refused.

    Raises:
        UserInputError: Another job was faster.
    """
    run.attempts.mkdir(exist_ok=True)
    draft = AttemptDir(run.attempts / f".draft-{start.job_id}-{os.getpid()}")
    shutil.rmtree(draft.path, ignore_errors=True)
    draft.path.mkdir()
    try:
        draft.failures.mkdir()
        for name, text in texts.items():
            write_text_atomically(draft.path / name, text)
        while True:
            index = max((attempt.index for attempt in run.attempt_list()), default=-1) + 1
            document = {"version": 1, "index": index} | document | {"index": index}
            write_json(draft.attempt_json, document)
            attempt = run.attempt(index)
            try:
                # Fails when the name is taken: the folder is not empty.
                draft.path.rename(attempt.path)
            except OSError as error:
                if error.errno not in {errno.EEXIST, errno.ENOTEMPTY}:
                    raise
                refuse_second_job(run, job_id=start.job_id)
                continue
            return attempt, document
    finally:
        shutil.rmtree(draft.path, ignore_errors=True)


def _forget_old_requests(run: RunDir, job_id: str) -> None:
    """Remove a stop file that was obeyed, and the mark of a cancelled job once a new job starts."""
    run.stop.unlink(missing_ok=True)
    cancelled = read_json(run.cancelled)
    if cancelled is not None and job_id not in cancelled.get("job_ids", []):
        run.cancelled.unlink(missing_ok=True)


def _site_facts() -> dict[str, object]:
    try:
        return read_site().facts()
    except EnvironmentProblemError as error:
        logger.warning("settings of the site are not known: %s", error.message)
        return {}


def _log_remarks(given: Topology, placed: Topology) -> None:
    for note in placed.notes:
        if note not in given.notes:
            logger.warning("placement: %s", note)


def _log_start(document: Mapping[str, object], plan: Plan) -> None:
    hosts = document["hostnames"]
    names: Sequence[str] = hosts if isinstance(hosts, list) else []
    site = document["site"]
    logger.info(
        "attempt %s: job %s, restart %s, %s ranks on %s, rank 0 at %s, from checkpoint step %s",
        *(document[name] for name in ("index", "job_id", "restart_count", "world_size")),
        ",".join(names),
        document["master_addr"],
        document["checkpoint_step"],
    )
    logger.info("plan: %s", plan.summary)
    if site:
        logger.info("site: %s", site)


def _nodes(count: int) -> str:
    return f"{count} node{'s' if count != 1 else ''}"
