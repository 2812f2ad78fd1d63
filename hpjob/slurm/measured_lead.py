"""The signal lead by measured times: in the next script that is submitted, for a queued script cannot be changed."""

from __future__ import annotations

import logging

from hpjob.core.run_dir import RunDir
from hpjob.core.run_records import read_json, write_text_atomically
from hpjob.core.schema import parse
from hpjob.slurm.lead import measured_save_s, measured_step_s, signal_lead_s
from hpjob.slurm.model import JobSpec
from hpjob.slurm.render import render_script

logger = logging.getLogger("hpjob")


def measured_lead_s(run: RunDir) -> int | None:
    """Return the lead that the run's own steps and saves ask for; None before both were measured."""
    step_s, save_s = measured_step_s(run), measured_save_s(run)
    return None if step_s is None or save_s is None else signal_lead_s(step_s, save_s)


def refresh_script(run: RunDir) -> None:
    """Render the script for the next job of a chained run with the measured lead."""
    lead_s = measured_lead_s(run)
    if lead_s is None:
        return
    spec = parse(JobSpec, read_json(run.spec) or {}, source=str(run.spec))
    if spec.signal_lead_s == lead_s:
        return
    logger.info(
        "the next job is told to save %d s before its limit (measured), this one %d s", lead_s, spec.signal_lead_s
    )
    spec = spec.model_copy(update={"signal_lead_s": lead_s})
    write_text_atomically(run.spec, spec.model_dump_json(indent=2) + "\n")
    write_text_atomically(run.script, render_script(spec))


def lead_warning(run: RunDir) -> str | None:
    """Return a sentence when the script that Slurm keeps announces the time limit too late for a save."""
    lead_s = measured_lead_s(run)
    now_s = (read_json(run.spec) or {}).get("signal_lead_s")
    if lead_s is None or not isinstance(now_s, int) or lead_s <= now_s:
        return None
    return (
        f"the ranks need {lead_s} s before the time limit (measured), the queued script gives {now_s} s; Slurm keeps "
        "that script when it queues the job again, `hpjob cancel` and `hpjob resume` submit one with the measured time"
    )
