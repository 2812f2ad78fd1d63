"""Writes a run folder that explains itself, and submits its job script."""

from __future__ import annotations

import shlex
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import psutil

import hpjob
from hpjob.core.errors import EnvironmentProblemError, SlurmRefusedError, UserInputError
from hpjob.core.run_dir import RunDir
from hpjob.core.run_records import write_json, write_text_atomically
from hpjob.recipe.load import dump_recipe
from hpjob.slurm.cancel import end_local
from hpjob.slurm.chain import note_or_cancel, queue_successor
from hpjob.slurm.controller_view import ask_controller
from hpjob.slurm.live import ExecutorName, Submission, record_submission
from hpjob.slurm.model import JobSpec
from hpjob.slurm.prepare import Prepared
from hpjob.slurm.render import render_script
from hpjob.topology.load import dump_topology

_PACKAGES = ("torch", "transformers", "submitit", "numpy", "pydantic")


def write_and_submit(prepared: Prepared, command: Sequence[str]) -> str:
    """Make the run folder and submit; a refused job leaves no folder behind.

    Args:
        prepared: The job.
        command: What the person typed, kept in ``command.txt``.

    Returns:
        The job id.

    Raises:
        EnvironmentProblemError: The folder cannot be written.
        SlurmRefusedError: Slurm said no.
    """
    run = prepared.run
    _make_folder(run)
    try:
        write_inputs(prepared, command)
        return submit(run, prepared.executor, prepared.spec, prepared.script)
    except OSError as error:
        shutil.rmtree(run.path, ignore_errors=True)
        raise _unwritable(run.path, error) from None
    except BaseException:
        shutil.rmtree(run.path, ignore_errors=True)
        raise


def submit_again(prepared: Prepared, command: Sequence[str]) -> str:
    """Submit a run whose folder exists already; return the job id.

    Raises:
        EnvironmentProblemError: The folder cannot be written.
        SlurmRefusedError: Slurm said no.
    """
    try:
        write_inputs(prepared, command)
        prepared.run.cancelled.unlink(missing_ok=True)
        return submit(prepared.run, prepared.executor, prepared.spec, prepared.script)
    except OSError as error:
        raise _unwritable(prepared.run.path, error) from None


def write_inputs(prepared: Prepared, command: Sequence[str]) -> None:
    """Write recipe, topology, plan, specification, script, command and versions.

    Raises:
        OSError: No space or no permission.
    """
    run = prepared.run
    write_text_atomically(run.recipe, dump_recipe(prepared.recipe))
    write_text_atomically(run.topology, dump_topology(prepared.topology))
    write_text_atomically(run.plan, prepared.plan.model_dump_json(indent=2) + "\n")
    write_text_atomically(run.spec, prepared.spec.model_dump_json(indent=2) + "\n")
    write_text_atomically(run.script, prepared.script)
    with run.command.open("a", encoding="utf-8") as stream:
        stream.write(f"cd {shlex.quote(str(Path.cwd()))}\n{shlex.join(command)}\n")
    write_json(run.versions, _versions())


def submit(run: RunDir, executor: ExecutorName, spec: JobSpec, script: str) -> str:
    """Hand a script to Slurm, or start it on this machine; note it in ``jobs.jsonl`` and return the job id.

    Raises:
        SlurmRefusedError: Slurm said no.
        OSError: The folder cannot be written.
    """
    if executor == "slurm":
        from hpjob.slurm.executor import ScriptExecutor  # noqa: PLC0415

        job_id = ScriptExecutor(run.submitit, script).submit_script()
        note_or_cancel(run, Submission(job_id=job_id, executor="slurm", submitted_at=time.time()))
        return job_id
    from hpjob.slurm.local_executor import DetachedLocalExecutor  # noqa: PLC0415

    local = DetachedLocalExecutor(
        run.submitit, time_limit_s=spec.time_limit_s, signal_lead_s=spec.signal_lead_s, setup=spec.setup
    )
    job_id = local.submit_run(run.path)
    submission = Submission(
        job_id=job_id,
        executor="local",
        submitted_at=time.time(),
        host=socket.gethostname(),
        process_created_at=psutil.Process(int(job_id)).create_time(),
    )
    try:
        record_submission(run, submission)
    except OSError:
        end_local(run, submission)
        raise
    return job_id


def confirm_continuation(prepared: Prepared, job_id: str) -> list[str]:
    """Queue the first successor of a chained run, or say when Slurm has taken away the right to be queued again.

    Returns:
        What a person has to know; one sentence each.
    """
    run, spec = prepared.run, prepared.spec
    if prepared.executor != "slurm":
        return []
    view = ask_controller(job_id, patience_s=0.0)
    if view is not None and spec.requeue and not view.may_be_requeued and not spec.chain:
        spec = spec.model_copy(update={"chain": True})
        write_text_atomically(run.spec, spec.model_dump_json(indent=2) + "\n")
        write_text_atomically(run.script, render_script(spec))
    if not spec.chain:
        return []
    try:
        successor = queue_successor(run, job_id)
    except (SlurmRefusedError, OSError) as error:
        return [
            f"no successor can wait in the queue: {error}; after a preemption or a time limit go on with "
            f"`hpjob resume {run.path}`"
        ]
    return [f"job {successor} waits to go on when job {job_id} ends; it ends at once when the run is finished"]


def _make_folder(run: RunDir) -> None:
    try:
        run.path.parent.mkdir(parents=True, exist_ok=True)
        run.path.mkdir()
    except FileExistsError as error:
        if run.path.is_dir():
            raise UserInputError(f"run {run.name} exists already", hint="choose another --name") from None
        raise _unwritable(run.path, error) from None
    except OSError as error:
        raise _unwritable(run.path, error) from None


def _unwritable(path: Path, error: OSError) -> EnvironmentProblemError:
    return EnvironmentProblemError(
        f"run folder {path} cannot be written: {error.strerror or error}",
        hint="choose a folder that you may write, on storage that all nodes share, with --run-dir",
    )


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"hpjob": hpjob.__version__, "python": sys.version.split()[0]}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found
