"""Names of the files in a run folder, in one place.

``runs/<name>/`` explains itself and is all that a restart needs::

    recipe.yaml topology.yaml plan.json job.sbatch job.json command.txt versions.json
    attempts/0000/{attempt.json,hosts,plan.json,topology.yaml,rank-00000.log,events.jsonl,
                   failures/rank-00000.json,outcome.json}
    metrics.jsonl
    checkpoints/step-00000100/{data/,manifest.json}
    FINISHED CANCELLED STOP
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class AttemptDir:
    """Files of one start of a run (requeues included)."""

    path: Path

    @property
    def index(self) -> int:
        return int(self.path.name)

    @property
    def attempt_json(self) -> Path:
        return self.path / "attempt.json"

    @property
    def hosts(self) -> Path:
        """One host name a line; line r is the host of rank r."""
        return self.path / "hosts"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def topology(self) -> Path:
        return self.path / "topology.yaml"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def failures(self) -> Path:
        return self.path / "failures"

    @property
    def outcome(self) -> Path:
        """Written by rank 0 after the last save: why the ranks left and at which step."""
        return self.path / "outcome.json"

    @property
    def rendezvous(self) -> Path:
        """Written by rank 0: address and port of the store that all ranks join."""
        return self.path / "rendezvous.json"

    @property
    def end(self) -> Path:
        """Written after the ranks have ended: what the job does next, and why."""
        return self.path / "end.json"

    @property
    def exclude(self) -> Path:
        """Host list that the job must not get again; the job script hands it to Slurm when it queues the job again."""
        return self.path / "exclude"

    @property
    def srun_log(self) -> Path:
        """What srun itself wrote to stderr."""
        return self.path / "srun.log"

    @property
    def launcher(self) -> Path:
        """Local executor: process id of the launcher, so that it can be signalled."""
        return self.path / "launcher.json"

    @property
    def exits(self) -> Path:
        """Local executor: exit code or signal of each rank."""
        return self.path / "exits.json"

    def rank_log(self, rank: int) -> Path:
        return self.path / f"rank-{rank:05d}.log"

    def failure(self, rank: int) -> Path:
        return self.failures / f"rank-{rank:05d}.json"


@dataclass(frozen=True, slots=True)
class RunDir:
    """Files of one run."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.yaml"

    @property
    def topology(self) -> Path:
        return self.path / "topology.yaml"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def script(self) -> Path:
        return self.path / "job.sbatch"

    @property
    def spec(self) -> Path:
        """The job specification that the script was rendered from."""
        return self.path / "job.json"

    @property
    def jobs(self) -> Path:
        """One line a submission: job id, executor, time."""
        return self.path / "jobs.jsonl"

    @property
    def command(self) -> Path:
        return self.path / "command.txt"

    @property
    def versions(self) -> Path:
        return self.path / "versions.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def attempts(self) -> Path:
        return self.path / "attempts"

    @property
    def finished(self) -> Path:
        """Exists when the last step is done; a restarted attempt that sees it exits 0 at once."""
        return self.path / "FINISHED"

    @property
    def stop(self) -> Path:
        """A person or tool makes this file to have the ranks save and leave, as a signal would."""
        return self.path / "STOP"

    @property
    def cancelled(self) -> Path:
        """Exists after ``hpjob cancel``; an attempt that ends then is not requeued."""
        return self.path / "CANCELLED"

    @property
    def submitit(self) -> Path:
        """submitit's own files."""
        return self.path / "submitit"

    def slurm_log(self, job_id: str) -> Path:
        """Output of the job script, all starts of one job."""
        return self.path / f"slurm-{job_id}.log"

    def attempt(self, index: int) -> AttemptDir:
        return AttemptDir(self.attempts / f"{index:04d}")

    def attempt_list(self) -> list[AttemptDir]:
        """All attempts, oldest first."""
        if not self.attempts.is_dir():
            return []
        names = sorted(p.name for p in self.attempts.iterdir() if p.name.isdigit() and p.is_dir())
        return [AttemptDir(self.attempts / name) for name in names]

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}"
