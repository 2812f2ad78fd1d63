"""Options passed through to sbatch."""

from __future__ import annotations

import pytest

from hpjob.core.errors import UserInputError
from hpjob.slurm.options import PROTECTED, pass_through
from tests.support.fake_slurm import FakeSlurm


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["--constraint=a100&ib"], ("--constraint=a100&ib",)),
        (["--constraint", "a100"], ("--constraint=a100",)),
        (["-C", "a100", "--exclusive"], ("--constraint=a100", "--exclusive")),
        (["-Ca100"], ("--constraint=a100",)),
        (["--exclusive", "--reservation=r 1"], ("--exclusive", "--reservation=r 1")),
        ([], ()),
    ],
)
def test_options_get_their_long_form(fake_slurm: FakeSlurm, typed: list[str], meant: tuple[str, ...]) -> None:
    assert pass_through(typed) == meant


@pytest.mark.parametrize("name", sorted(PROTECTED))
def test_options_that_break_the_contract_are_refused(fake_slurm: FakeSlurm, name: str) -> None:
    with pytest.raises(UserInputError, match=f"--{name} cannot be passed through"):
        pass_through([f"--{name}=x"])


@pytest.mark.parametrize("short", ["-o", "-N", "-n", "-p", "-t", "-J", "-a"])
def test_short_forms_are_no_way_around(fake_slurm: FakeSlurm, short: str) -> None:
    with pytest.raises(UserInputError, match="cannot be passed through"):
        pass_through([f"{short}x"])


def test_an_unknown_option_gets_the_nearest_name(fake_slurm: FakeSlurm) -> None:
    with pytest.raises(UserInputError) as caught:
        pass_through(["--constrain=a100"])
    assert "`--constraint`" in caught.value.hint


def test_an_option_that_sbatch_takes_but_does_not_list(fake_slurm: FakeSlurm) -> None:
    """Slurm 24.11 is silent about --segment; a beginning of a listed or protected name is refused all the same."""
    fake_slurm.answer("sbatch --segment=2 --version", "slurm-wlm 24.11.5\n")
    assert pass_through(["--segment=2"]) == ("--segment=2",)
    for cut in ("--constr=a100", "--outp=x"):
        fake_slurm.answer(f"sbatch {cut} --version", "slurm-wlm 24.11.5\n")
        with pytest.raises(UserInputError, match="knows no option"):
            pass_through([cut])


def test_beginnings_of_names_are_refused_without_sbatch(fake_slurm: FakeSlurm) -> None:
    """sbatch would take `--outp` for `--output`."""
    fake_slurm.answer("sbatch --help", stderr="no configuration", code=1)
    with pytest.raises(UserInputError, match="could mean --output"):
        pass_through(["--outp=x"])
    assert pass_through(["--some-new-option=1"]) == ("--some-new-option=1",)


@pytest.mark.parametrize("option", ["--gres=gpu:4", "--gres=nvme:1,gpu:h100:2"])
def test_gpus_cannot_be_asked_beside_the_plan(fake_slurm: FakeSlurm, option: str) -> None:
    with pytest.raises(UserInputError, match="cannot ask for GPUs"):
        pass_through([option])


def test_a_word_that_is_no_option_is_refused(fake_slurm: FakeSlurm) -> None:
    with pytest.raises(UserInputError, match="no sbatch option"):
        pass_through(["--exclusive=user", "job.sh"])
