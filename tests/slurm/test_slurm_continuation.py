"""Requeue or chain: what the site's settings decide at submission."""

from __future__ import annotations

import pytest

from hpjob.plan.planner import make_plan
from hpjob.recipe.load import load_recipe
from hpjob.slurm.checks import find_partition
from hpjob.slurm.continuation import decide_chain, preemption, shared_folder_note, window_note
from hpjob.slurm.model import JobSpec
from hpjob.slurm.prepare import settle
from hpjob.slurm.site import read_site
from hpjob.topology.load import local_topology
from tests.support.fake_slurm import CONFIG, FakeSlurm

SPEC = JobSpec(
    job_name="r", run_dir="/r", python="/p", nodes=2, ranks_per_node=4, gpus_per_node=4, time_limit_s=3600,
    signal_lead_s=120,
)  # fmt: skip


def decided(**changes: object) -> tuple[str, int, bool, str]:
    """Mode, window, chain, and what is said."""
    spec, site = SPEC.model_copy(update=changes), read_site()
    found = preemption(spec, site, find_partition(spec.partition, site))
    chain, notes = decide_chain(spec, site, found)
    return found.mode, found.window_s, chain, " ".join(notes)


def config(fake_slurm: FakeSlurm, *, accounting: str = "none", **settings: str) -> None:
    text = CONFIG.format(accounting=f"accounting_storage/{accounting}")
    lines = [line for line in text.splitlines() if line.split("=")[0].strip() not in settings]
    fake_slurm.answer("scontrol show config", "\n".join([*lines, *(f"{k} = {v}" for k, v in settings.items())]) + "\n")


def test_a_partition_that_requeues(fake_slurm: FakeSlurm) -> None:
    assert decided() == ("requeue", 60, False, "")


def test_a_partition_that_cancels_gets_a_successor(fake_slurm: FakeSlurm) -> None:
    mode, window_s, chain, words = decided(partition="spot")
    assert (mode, window_s, chain) == ("cancel", 30, True)
    assert "partition spot has PreemptMode=CANCEL" in words and "successor" in words


def test_a_person_with_one_job_cannot_have_a_successor(fake_slurm: FakeSlurm) -> None:
    config(fake_slurm, accounting="slurmdbd")
    fake_slurm.answer("sacctmgr", "1\n")
    mode, _, chain, words = decided(partition="spot")
    assert (mode, chain) == ("cancel", False)
    assert "MaxSubmitJobs" in words and "hpjob resume" in words


def test_no_preemption_needs_nothing(fake_slurm: FakeSlurm) -> None:
    config(fake_slurm, PreemptType="preempt/none")
    assert decided(partition="spot")[0::2] == ("never", False)


def test_requeue_switched_off_by_default_is_said(fake_slurm: FakeSlurm) -> None:
    config(fake_slurm, JobRequeue="0")
    mode, _, chain, words = decided()
    assert (mode, chain) == ("requeue", False) and "JobRequeue=0" in words


@pytest.mark.parametrize(
    ("qos", "expected"),
    [
        ("low|cancel|00:00:45|\n", ("cancel", 45, True)),
        ("low|requeue|00:02:00|\n", ("requeue", 120, False)),
        ("low|cluster|00:00:00|\n", ("requeue", 30, False)),
        ("", ("requeue", 30, False)),
    ],
)
def test_preemption_by_quality_of_service(fake_slurm: FakeSlurm, qos: str, expected: tuple[str, int, bool]) -> None:
    config(fake_slurm, accounting="slurmdbd", PreemptType="preempt/qos")
    fake_slurm.answer("sacctmgr", "")
    fake_slurm.answer("sacctmgr -n -P show qos", qos)
    assert decided(qos="low", partition="spot")[:3] == expected


@pytest.mark.parametrize(("account", "expected"), [(None, ("requeue", False)), ("chem", ("cancel", True))])
def test_the_default_quality_of_service_is_that_of_the_jobs_account(
    fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, account: str | None, expected: tuple[str, bool]
) -> None:
    monkeypatch.setenv("USER", "ann")
    config(fake_slurm, accounting="slurmdbd", PreemptType="preempt/qos")
    # As sacctmgr prints them: all accounts of a person, by name; the default one; one that is named.
    of_ann = "sacctmgr -n -P show assoc user=ann"
    fake_slurm.answer(of_ann, "cheap\nnormal\nspare\n")
    fake_slurm.answer(f"{of_ann} cluster=fake onlydefaults format=DefaultQOS", "normal\n")
    fake_slurm.answer(f"{of_ann} cluster=fake account=chem format=DefaultQOS", "cheap\n")
    fake_slurm.answer("sacctmgr -n -P show qos name=normal", "normal|requeue|00:00:20|\n")
    fake_slurm.answer("sacctmgr -n -P show qos name=cheap", "cheap|cancel|00:00:15|\n")
    assert decided(account=account)[0::2] == expected


def test_the_limit_of_another_account_does_not_count(fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "ann")
    config(fake_slurm, accounting="slurmdbd")
    of_ann = "sacctmgr -n -P show assoc user=ann"
    fake_slurm.answer("sacctmgr", "")
    fake_slurm.answer(of_ann, "1\n\n")
    fake_slurm.answer(f"{of_ann} cluster=fake account=chem format=MaxSubmitJobs", "\n")
    fake_slurm.answer(f"{of_ann} cluster=fake account=class format=MaxSubmitJobs", "1\n")
    assert decided(partition="spot", account="chem")[2] is True
    assert decided(partition="spot", account="class")[2] is False


def test_a_window_that_is_too_short_is_said_with_figures(fake_slurm: FakeSlurm) -> None:
    found = preemption(SPEC, read_site(), find_partition(None, read_site()))
    assert window_note(found, step_s=10, save_s=25) is None
    # A stop waits for the save that has just begun.
    note = window_note(found, step_s=10, save_s=30)
    assert note is not None and "60 s to save" in note and "may need 70 s" in note


def test_what_a_short_window_can_lose_is_bounded_by_ephemeral_checkpoints(fake_slurm: FakeSlurm) -> None:
    recipe = load_recipe("tiny", ["checkpoint.every_steps=1000"])
    plan = make_plan(recipe, local_topology(2, 4))
    spec, changed, notes = settle(SPEC, recipe, plan, read_site(), step_s=10.0, save_s=90.0)
    assert not spec.chain
    assert changed.checkpoint.ephemeral_every_steps == 27
    assert any("every 27 steps" in note and "at most the work of 27 steps (about 360 s)" in note for note in notes)
    _, unchanged, _ = settle(SPEC, recipe, plan, read_site(), step_s=1.0, save_s=9.0)
    assert unchanged == recipe


def test_a_run_folder_that_other_machines_cannot_see(monkeypatch: pytest.MonkeyPatch) -> None:
    class Disk:
        def __init__(self, mountpoint: str, fstype: str) -> None:
            self.mountpoint, self.fstype = mountpoint, fstype

    disks = [Disk("/", "ext4"), Disk("/shared", "lustre"), Disk("/shared/tmp", "tmpfs")]
    monkeypatch.setattr("psutil.disk_partitions", lambda all: disks)
    notes = {
        path: shared_folder_note(SPEC.model_copy(update={"run_dir": path}))
        for path in ("/r", "/shared/r", "/shared/tmp/r")
    }
    assert notes["/shared/r"] is None
    assert "ext4" in (notes["/r"] or "") and "tmpfs" in (notes["/shared/tmp/r"] or "")
    assert shared_folder_note(SPEC.model_copy(update={"nodes": 1})) is None
