"""The Slurm sandbox that faults happen on: partitions for every kind of preemption, nodes that come and go."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent.parent
SANDBOX = ROOT / "scripts" / "slurm-sandbox"
QUICK = Path(__file__).resolve().parent / "quick"
COMMAND_TIMEOUT_S = 400.0
REQUEUE_DELAY_S = 15
"""More than KillWait and the three seconds for which a step looks for an srun that is gone, as on any real cluster
(121 s, 30 s): a node set down that was never away would else get a job back whose processes are still ending there, and
Slurm holds the job then."""

# Partition -> what happens to its jobs when one of partition urgent wants their nodes.
PARTITIONS = {
    "long": "PreemptMode=REQUEUE GraceTime=60",
    "short": "PreemptMode=REQUEUE GraceTime=4",
    "zero": "PreemptMode=REQUEUE GraceTime=0",
    "cancel": "PreemptMode=CANCEL GraceTime=30",
    "cancelzero": "PreemptMode=CANCEL GraceTime=0",
}


@dataclass
class Site:
    """One sandbox.

    Attributes:
        state: Its state folder.
        nodes: Number of nodes.
        release: Of Slurm; None = the sandbox's default.
        quick: Whether ranks run the quick runtime.
    """

    state: Path
    nodes: int
    release: str | None = None
    quick: bool = False
    _control: AbstractContextManager[object] = field(default_factory=threading.RLock)

    @property
    def environment(self) -> dict[str, str]:
        """Variables of commands that use this sandbox."""
        cleaned = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH_"))}
        return cleaned | {
            "SLURM_CONF": str(self.state / "slurm.conf"),
            "PYTHONPATH": f"{QUICK}:{ROOT}" if self.quick else str(ROOT),
            "OMP_NUM_THREADS": "1",
            "HPJOB_DETECT_TIMEOUT_S": "0",
        }

    def up(self) -> None:
        """Start it, or start again what of it was killed."""
        arguments = ["--nodes", str(self.nodes), "--leafs", "1", "--requeue-delay", str(REQUEUE_DELAY_S)]
        arguments += ["--conf", "SlurmdTimeout=20"]
        for name, settings in PARTITIONS.items():
            line = f"PartitionName={name} Nodes=ALL PriorityTier=1 {settings} DefaultTime=01:00:00 MaxTime=1-0"
            arguments += ["--conf", line]
        if self.release is not None:
            arguments += ["--release", self.release]
        self.control("up", *arguments)
        programs = json.loads((self.state / "sandbox.json").read_text(encoding="utf-8"))["programs"]
        if programs and not os.environ["PATH"].startswith(programs):
            os.environ["PATH"] = f"{programs}{os.pathsep}{os.environ['PATH']}"

    def down(self) -> None:
        self.control("down")

    def control(self, command: str, *arguments: str) -> None:
        """Run ``slurm-sandbox COMMAND``; one at a time, since several lanes may want one."""
        with self._control:
            self.run(sys.executable, SANDBOX, command, "--state-dir", self.state, *arguments)

    def run(self, *command: str | Path, check: bool = True, cwd: Path | None = None, **variables: str) -> str:
        """Run a command on this sandbox, with further variables, and return what it prints."""
        done = subprocess.run(
            [str(part) for part in command],
            env=self.environment | variables,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
        if check and done.returncode != 0:
            raise RuntimeError(f"{' '.join(map(str, command))} exited {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout

    def written_down(self) -> float:
        """Return when slurmctld last wrote its jobs to disk, in seconds since 1970."""
        try:
            return (self.state / "state" / "job_state").stat().st_mtime
        except FileNotFoundError:  # just being replaced
            return 0.0

    def kill_controller(self) -> None:
        """End slurmctld without a chance to say goodbye; :meth:`up` starts it again."""
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if words and Path(words[0]).name == "slurmctld" and str(self.state / "slurm.conf") in words:
                process.send_signal(signal.SIGKILL)

    def until(self, done: object, seconds: float) -> bool:
        """Poll a condition; return whether it came true in time."""
        end = time.monotonic() + seconds
        assert callable(done)
        while not done():
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
        return True
