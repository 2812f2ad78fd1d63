"""What the site says, and checks against it."""

from __future__ import annotations

import time

import pytest

from hpjob.core.errors import EnvironmentProblemError, UserInputError
from hpjob.slurm import site as site_module
from hpjob.slurm.checks import check_against_site
from hpjob.slurm.commands import CommandResult, run_command
from hpjob.slurm.model import JobSpec
from hpjob.slurm.site import NoSlurmError, read_site, slurm_time_s
from tests.support.fake_slurm import CONFIG, FakeSlurm

SPEC = JobSpec(
    job_name="r", run_dir="/r", python="/p", nodes=2, ranks_per_node=8, gpus_per_node=8, time_limit_s=3600,
    signal_lead_s=120,
)  # fmt: skip


def check(save_s: float = 1.0, **changes: object) -> list[str]:
    return check_against_site(SPEC.model_copy(update=changes), read_site(), save_s=save_s)


def test_settings_are_read(fake_slurm: FakeSlurm) -> None:
    site = read_site()
    assert (site.version, site.cluster, site.kill_wait_s, site.job_requeue) == ("22.05.8", "fake", 30, True)
    assert site.requeue_delay_s == 121
    assert not site.accounting and not site.sends_user_signal
    batch, spot = site.partitions
    assert (batch.name, batch.is_default, batch.max_time_s, batch.grace_time_s) == ("batch", True, 86400, 60)
    assert (spot.max_nodes, spot.default_time_s, spot.max_time_s) == (2, 120, None)
    assert (batch.gpus_per_node, spot.allowed_accounts) == (8, ("lab", "physics"))


def test_requeue_delay_and_user_signal_of_a_tuned_site(fake_slurm: FakeSlurm) -> None:
    text = CONFIG.replace("AuthInfo                = (null)", "AuthInfo = socket=/x,cred_expire=5")
    text = text.replace("SlurmctldParameters     = (null)", "SlurmctldParameters = preempt_send_user_signal")
    fake_slurm.answer("scontrol show config", text)
    site = read_site()
    assert (site.requeue_delay_s, site.sends_user_signal) == (6, True)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("UNLIMITED", None), ("30", 1800), ("10:30", 630), ("01:00:00", 3600), ("2-00:00:00", 172800),
        ("1-12", 129600), ("NONE", None),
    ],
)  # fmt: skip
def test_time_limits_as_slurm_prints_them(text: str, seconds: int | None) -> None:
    assert slurm_time_s(text) == seconds


def test_a_fitting_job_passes_without_a_word(fake_slurm: FakeSlurm) -> None:
    assert check() == []


def test_no_slurm_is_an_environment_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(EnvironmentProblemError, match="not on PATH"):
        read_site()


def test_a_silent_controller_is_an_environment_problem(fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("scontrol show config", stderr="Unable to contact slurm controller (connect failure)", code=1)
    with pytest.raises(EnvironmentProblemError, match="Unable to contact slurm controller"):
        read_site()


def test_a_machine_without_a_configured_cluster_has_no_slurm(
    fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "scontrol: fatal: Could not establish a configuration source"
    fake_slurm.answer("scontrol show config", stderr=words, code=1)
    with pytest.raises(NoSlurmError, match="no cluster is configured"):
        read_site()
    monkeypatch.setenv("SLURM_CONF", "/nonexistent/slurm.conf")
    with pytest.raises(EnvironmentProblemError) as caught:
        read_site()
    assert not isinstance(caught.value, NoSlurmError)


def test_a_command_that_hangs_is_ended(fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("scontrol show config", hang=True)
    begun = time.monotonic()
    result = run_command(["scontrol", "show", "config"], timeout_s=0.5)
    assert (result.returncode, result.complaint) == (124, "scontrol gave no answer within 0.5 s")
    assert time.monotonic() - begun < 400  # of the 600 s that it would take


def test_display_settings_of_a_person_do_not_reach_slurm(
    fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SQUEUE_FORMAT", "%i")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    run_command(["squeue"])
    seen = fake_slurm.environment("squeue")
    assert "SQUEUE_FORMAT" not in seen and "SLURM_TIME_FORMAT" not in seen and seen["LC_ALL"] == "C"


def test_unknown_partition_gets_the_nearest_name(fake_slurm: FakeSlurm) -> None:
    with pytest.raises(UserInputError, match="unknown partition 'bacth'") as caught:
        check(partition="bacth")
    assert "`batch`" in caught.value.hint


def test_more_nodes_than_the_partition_has(fake_slurm: FakeSlurm) -> None:
    with pytest.raises(UserInputError, match="5 nodes asked, partition batch gives at most 4"):
        check(nodes=5)
    with pytest.raises(UserInputError, match="3 nodes asked, partition spot gives at most 2"):
        check(nodes=3, partition="spot")


def test_more_gpus_than_the_nodes_have(fake_slurm: FakeSlurm) -> None:
    with pytest.raises(UserInputError, match="16 GPUs a node asked, the nodes of partition batch have 8"):
        check(gpus_per_node=16)


def test_time_limit_above_the_partition(fake_slurm: FakeSlurm) -> None:
    with pytest.raises(UserInputError, match="time limit 2-00:00:00 is above the 1-00:00:00 of partition batch"):
        check(time_limit_s=2 * 86400)


def test_time_limit_shorter_than_the_save_window(fake_slurm: FakeSlurm) -> None:
    with pytest.raises(UserInputError, match="not longer than the save window of 240 s"):
        check(time_limit_s=240, save_s=60)
    assert check(time_limit_s=300, save_s=60) == []


def test_default_limit_of_the_partition_counts_too(fake_slurm: FakeSlurm) -> None:
    with pytest.raises(UserInputError, match="the partition's default time limit of 120 s"):
        check(partition="spot", time_limit_s=None)


def test_account_that_the_partition_does_not_take(fake_slurm: FakeSlurm) -> None:
    with pytest.raises(UserInputError, match="not open to partition spot") as caught:
        check(partition="spot", account="physic")
    assert "`physics`" in caught.value.hint


def test_accounts_without_accounting_cannot_be_checked(fake_slurm: FakeSlurm) -> None:
    (warning,) = check(account="anything")
    assert "keeps no accounts" in warning


def test_unknown_account_where_there_is_accounting(fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("scontrol show config", CONFIG.format(accounting="accounting_storage/slurmdbd"))
    fake_slurm.answer("sacctmgr", "lab\nchem\nlab\n")
    with pytest.raises(UserInputError, match="account 'chm' is not open to your user") as caught:
        check(account="chm")
    assert "`chem`" in caught.value.hint
    assert check(account="chem") == []


def test_accounting_that_does_not_answer_is_a_warning(fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_slurm.answer("scontrol show config", CONFIG.format(accounting="accounting_storage/slurmdbd"))
    real = run_command
    monkeypatch.setattr(
        site_module, "run_command", lambda a, **k: CommandResult(124, "", "silent") if a[0] == "sacctmgr" else real(a)
    )
    (warning,) = check(account="chem")
    assert "does not say which accounts are yours" in warning
