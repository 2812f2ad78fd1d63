"""Starts the ranks of a run on this machine: our stand-in for srun where there is no Slurm.

It starts all ranks as child processes, passes requests to save on to them, and ends all when one fails.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping
from types import FrameType

import psutil

from hpjob.core.run_dir import AttemptDir, RunDir
from hpjob.core.run_records import write_json
from hpjob.slurm.srun_log import TaskEnd

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)

# How long the other ranks may take to write their own failure records once one has failed.
FAILURE_GRACE_S = 5.0
# How long the others may take once one has left with code 0, as `srun --wait`.
FINISH_GRACE_S = 60.0
_POLL_S = 0.1
_PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


class LocalLauncher:
    """The ranks of one attempt.

    Args:
        run: The run.
        python: Interpreter of the ranks.
        environment: Variables of the ranks, without those that number them.
    """

    def __init__(self, run: RunDir, python: str, environment: Mapping[str, str]) -> None:
        self._run = run
        self._python = python
        self._environment = dict(environment)
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._ended: dict[int, int] = {}
        self._stop_requested = False
        self._stop_sent: set[int] = set()

    def install_signal_handlers(self) -> None:
        """Take every signal that asks to save, also while no rank runs yet."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)

    def run(self, attempt: AttemptDir) -> tuple[int, list[TaskEnd]]:
        """Start all ranks and wait for them.

        Returns:
            The first exit code that is not 0 (128 + n for signal n), and the ranks that ended badly before
            this launcher ended the rest, in the order seen.
        """
        write_json(attempt.launcher, {"version": 1, "pid": os.getpid()})
        hosts = attempt.hosts.read_text(encoding="utf-8").split()
        try:
            self._start(attempt, hosts)
            self._wait()
        finally:
            self._kill_all()
        exits = [
            _exit(rank, host, process) for rank, (host, process) in enumerate(zip(hosts, self._ranks, strict=True))
        ]
        write_json(attempt.exits, {"version": 1, "ranks": exits})
        ends = [_task_end(rank, hosts[rank], code) for rank, code in self._ended.items() if code]
        codes = [code if code >= 0 else 128 - code for code in (process.returncode for process in self._ranks)]
        first = [code if code >= 0 else 128 - code for code in self._ended.values() if code]
        return next(iter(first), max(codes, default=0)), ends

    def _start(self, attempt: AttemptDir, hosts: list[str]) -> None:
        seen: Counter[str] = Counter()
        command = [self._python, "-m", "hpjob.runtime"]
        command += ["--run-dir", str(self._run.path), "--attempt-dir", str(attempt.path)]
        for rank, host in enumerate(hosts):
            own = {"HPJOB_RANK": str(rank), "HPJOB_LOCAL_RANK": str(seen[host]), "HPJOB_NODE_NAME": host}
            seen[host] += 1
            with attempt.rank_log(rank).open("ab") as log:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self._environment | own,
                    # Safe: this process has one thread.
                    preexec_fn=die_with(os.getpid()),  # noqa: PLW1509
                )
            self._ranks.append(process)

    def _wait(self) -> None:
        deadline: float | None = None
        while len(self._ended) < len(self._ranks):
            if self._stop_requested:
                self._pass_on_stop()
            for rank, process in enumerate(self._ranks):
                if rank not in self._ended and process.poll() is not None:
                    self._ended[rank] = process.returncode
                    grace_s = FAILURE_GRACE_S if process.returncode else FINISH_GRACE_S
                    limit = time.monotonic() + grace_s
                    deadline = limit if deadline is None else min(deadline, limit)
            if deadline is not None and time.monotonic() > deadline:
                return
            time.sleep(_POLL_S)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop_requested = True

    def _pass_on_stop(self) -> None:
        for process in self._ranks:
            if process.pid not in self._stop_sent and process.poll() is None:
                self._stop_sent.add(process.pid)
                process.send_signal(signal.SIGUSR2)

    def _kill_all(self) -> None:
        # KILL, because the ranks take TERM as a request to save. Their own children would outlive them.
        for process in self._ranks:
            if process.poll() is None:
                for child in _descendants(process.pid):
                    child.kill()
                process.kill()
        for process in self._ranks:
            process.wait()


def die_with(parent: int, number: int = signal.SIGKILL) -> Callable[[], None]:
    """Return a function for a new child: the kernel sends it ``number`` when ``parent`` ends, however that ends."""

    def prepare() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, int(number))
        if os.getppid() != parent:
            os.kill(os.getpid(), number)

    return prepare


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def _exit(rank: int, host: str, process: subprocess.Popen[bytes]) -> dict[str, object]:
    code = process.returncode
    return {"rank": rank, "node": host, "exit_code": max(code, 0), "signal": -code if code < 0 else None}


def _task_end(rank: int, host: str, code: int) -> TaskEnd:
    """Describe an end in srun's words."""
    what = f"Exited with exit code {code}" if code > 0 else (signal.strsignal(-code) or f"signal {-code}")
    return TaskEnd(node=host, ranks=(rank,), what=what, after_abort=False)
