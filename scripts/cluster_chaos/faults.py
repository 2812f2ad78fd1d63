"""The faults: what a shared cluster does to a job, and what its owner, neighbours and administrators do."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from cluster_chaos.victim import Victim

AWAY_S = 6.0
"""How long a killed daemon stays away."""
NOTICED_S = 180.0


@dataclass(frozen=True)
class Fault:
    """One kind of fault.

    Attributes:
        name: In reports.
        happen: What is done to a run that is just training or being set up.
        partition: Where the run has to be.
        needs_ranks: Whether the ranks have to be up when it happens.
        alone: Whether it strikes all jobs of the cluster, so that no other run may be just hit by something else.
    """

    name: str
    happen: Callable[[Victim, random.Random], None]
    partition: str = "batch"
    needs_ranks: bool = True
    alone: bool = False


def preempt(victim: Victim, chance: random.Random) -> None:
    """A job of higher priority takes the run's nodes for a moment."""
    nodes = victim.nodes
    victim.site.run(
        *("sbatch", "--partition=urgent", f"--nodes={len(nodes)}", f"--nodelist={','.join(nodes)}", "--exclusive"),
        *("--output=/dev/null", "--job-name=urgent", "--wrap=sleep 1"),
    )


def limit_announced(victim: Victim, chance: random.Random) -> None:
    """The time limit comes near: Slurm sends its warning. The ranks rest until then, so that they do not finish."""
    _rest(victim)
    job_id = victim.job_id
    victim.site.run("scontrol", "update", f"JobId={job_id}", "TimeLimit=3")
    _restore_limit(victim, job_id)


def limit_reached(victim: Victim, chance: random.Random) -> None:
    """The time limit is over at once."""
    _rest(victim)
    job_id = victim.job_id
    victim.site.run("scontrol", "update", f"JobId={job_id}", "EndTime=now", check=False)
    _restore_limit(victim, job_id)


def _rest(victim: Victim) -> None:
    victim.signal(victim.ranks(), signal.SIGSTOP)


def _restore_limit(victim: Victim, job_id: str) -> None:
    """Give the job its time back once it is queued again."""
    attempt = victim.attempt
    assert attempt is not None
    if not victim.wait(attempt.outcome.exists, 90):
        victim.notes.append("no outcome within 90 s of the limit")
    victim.signal(victim.ranks(), signal.SIGCONT)
    # Before that, while its processes end, Slurm refuses.
    victim.wait(lambda: _waiting(victim, job_id), NOTICED_S)
    victim.site.run("scontrol", "update", f"JobId={job_id}", "TimeLimit=120", check=False)


def _waiting(victim: Victim, job_id: str) -> bool:
    return victim.site.run("squeue", "-h", "-j", job_id, "-o", "%T", check=False).strip() == "PENDING"


def requeue(victim: Victim, chance: random.Random) -> None:
    """An administrator queues the job again."""
    victim.site.run("scontrol", "requeue", victim.job_id, check=False)


def requeue_twice(victim: Victim, chance: random.Random) -> None:
    """… and once more, while the job is being queued again."""
    job_id = victim.job_id
    victim.site.run("scontrol", "requeue", job_id, check=False)
    time.sleep(chance.uniform(0.0, 2.0))
    victim.site.run("scontrol", "requeue", job_id, check=False)


def _one_of(processes: list[psutil.Process], chance: random.Random) -> list[psutil.Process]:
    return [chance.choice(processes)] if processes else []


def kill_rank(victim: Victim, chance: random.Random) -> None:
    victim.signal(_one_of(victim.ranks(), chance), signal.SIGKILL)


def kill_all_ranks(victim: Victim, chance: random.Random) -> None:
    victim.signal(victim.ranks(), signal.SIGKILL)


def terminate_rank(victim: Victim, chance: random.Random) -> None:
    victim.signal(_one_of(victim.ranks(), chance), signal.SIGTERM)


def kill_srun(victim: Victim, chance: random.Random) -> None:
    victim.signal(victim.srun(), signal.SIGKILL)


def terminate_srun(victim: Victim, chance: random.Random) -> None:
    victim.signal(victim.srun(), signal.SIGTERM)


def kill_shell(victim: Victim, chance: random.Random) -> None:
    victim.signal(victim.shell(), signal.SIGKILL)


def kill_step_daemon(victim: Victim, chance: random.Random) -> None:
    victim.signal(_one_of(victim.step_daemons(), chance), signal.SIGKILL)


def lose_first_node(victim: Victim, chance: random.Random) -> None:
    """The node of rank 0 loses power, and comes back later."""
    _lose(victim, victim.nodes[0])


def lose_last_node(victim: Victim, chance: random.Random) -> None:
    _lose(victim, victim.nodes[-1])


def _lose(victim: Victim, node: str) -> None:
    """Take a node away until Slurm has noticed; a shorter absence could leave Slurm believing in a dead young job.

    That holds for the job of a run that has just finished too, so this does not end with the run.
    """
    victim.site.control("stop-node", node, "--with-jobs")
    victim.site.until(lambda: _is_down(victim, node), NOTICED_S)
    victim.site.control("start-node", node)


def _is_down(victim: Victim, node: str) -> bool:
    return "down" in victim.site.run("sinfo", "-h", "-n", node, "-o", "%T", check=False).lower()


def restart_slurmd(victim: Victim, chance: random.Random) -> None:
    """A node's slurmd is killed and started again; its jobs live on."""
    node = chance.choice(victim.nodes)
    victim.site.control("stop-node", node)
    time.sleep(1)
    victim.site.control("start-node", node)


def set_node_down(victim: Victim, chance: random.Random) -> None:
    node = chance.choice(victim.nodes)
    victim.site.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=chaos")
    time.sleep(2)
    # It may have come back by itself.
    victim.site.run("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)


def restart_controller(victim: Victim, chance: random.Random) -> None:
    victim.site.control("restart-controller")


def preempt_without_controller(victim: Victim, chance: random.Random) -> None:
    """The ranks are told to save, and when the job wants to queue itself again the controller is dead.

    The ranks rest until it has written down that the job runs. One that dies before, within seconds of the start, comes
    back without the job and has its processes killed: nobody is left who could go on by himself.
    """
    _rest(victim)
    victim.site.until(lambda: victim.site.written_down() > float(victim.begun()["started_at"]), NOTICED_S)
    victim.site.kill_controller()
    victim.signal(victim.ranks(), signal.SIGUSR2)
    victim.signal(victim.ranks(), signal.SIGCONT)
    time.sleep(AWAY_S)
    victim.site.up()


def scancel(victim: Victim, chance: random.Random) -> None:
    """Its owner cancels it: it stays stopped, until it is resumed."""
    job_id = victim.job_id
    victim.site.run("scancel", job_id)
    _expect_stopped(victim, job_id)


def hpjob_cancel(victim: Victim, chance: random.Random) -> None:
    job_id = victim.job_id
    victim.hpjob("cancel", victim.name, "--yes")
    _expect_stopped(victim, job_id)


def _expect_stopped(victim: Victim, job_id: str) -> None:
    states = ("squeue", "-h", "-n", victim.name, "-o", "%i")
    if not victim.wait(lambda: not victim.site.run(*states, check=False).strip(), 60):
        raise RuntimeError(f"job {job_id} was cancelled and is still in the queue")
    time.sleep(2)
    if victim.site.run(*states, check=False).strip():
        raise RuntimeError(f"job {job_id} was cancelled and came back")
    if not victim.over():
        victim.resume()


def second_job(victim: Victim, chance: random.Random) -> None:
    """Its owner submits the same script by hand while it runs: one of the two must refuse."""
    victim.site.run("sbatch", f"--job-name={victim.name}", "--nodes=2", victim.run.script)


def suspend(victim: Victim, chance: random.Random) -> None:
    victim.site.run("scontrol", "suspend", victim.job_id, check=False)
    time.sleep(3)
    victim.site.run("scontrol", "resume", victim.job_id, check=False)


FAULTS = (
    Fault("preempted, grace time 60 s", preempt, "long", needs_ranks=False),
    Fault("preempted, grace time 4 s", preempt, "short", needs_ranks=False),
    Fault("preempted, no grace time", preempt, "zero", needs_ranks=False),
    Fault("preempted by CANCEL, grace time 30 s", preempt, "cancel", needs_ranks=False),
    Fault("preempted by CANCEL, no grace time", preempt, "cancelzero", needs_ranks=False),
    Fault("time limit announced", limit_announced),
    Fault("time limit reached at once", limit_reached),
    Fault("queued again by an administrator", requeue, needs_ranks=False),
    Fault("queued again twice", requeue_twice, needs_ranks=False),
    Fault("one rank killed", kill_rank),
    Fault("all ranks killed", kill_all_ranks),
    Fault("one rank terminated", terminate_rank),
    Fault("srun killed", kill_srun),
    Fault("srun terminated", terminate_srun),
    Fault("job script's shell killed", kill_shell),
    Fault("slurmstepd of a rank killed", kill_step_daemon),
    Fault("node of rank 0 lost", lose_first_node),
    Fault("another node lost", lose_last_node),
    Fault("slurmd killed and started again", restart_slurmd, needs_ranks=False),
    Fault("node set down", set_node_down, needs_ranks=False),
    Fault("controller restarted", restart_controller, needs_ranks=False, alone=True),
    Fault("controller dead when the ranks have saved", preempt_without_controller, alone=True),
    Fault("cancelled with scancel, then resumed", scancel, needs_ranks=False),
    Fault("cancelled with hpjob, then resumed", hpjob_cancel, needs_ranks=False),
    Fault("submitted twice", second_job, needs_ranks=False),
    Fault("suspended for a while", suspend),
)
