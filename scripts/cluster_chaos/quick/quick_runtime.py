"""Stands in for ``python -m hpjob.runtime`` where hundreds of starts are wanted: a rank is there in a blink.

Its "weights" are a chain of hashes, so a step that is lost, doubled or resumed from elsewhere changes all that follow.
It keeps the runtime's contract: signals only set a flag, ranks agree at a step boundary, a checkpoint is complete or
absent, a lost peer is reported as that.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

STEP_S = 0.04
SAVE_S = 0.3
SETUP_S = 300.0
STEPS, SAVE_EVERY, KEEP = 120, 25, 2
STOP_FILE_CODE = 255
STOP_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)


class Rank:
    """One process: its files, its connection to rank 0 (on rank 0: to all others), its stop flag."""

    def __init__(self, run: Path, attempt: Path) -> None:
        self.run, self.attempt = run, attempt
        self.rank = int(os.environ["SLURM_PROCID"])
        self.node = os.environ["SLURMD_NODENAME"]
        self.world = len((attempt / "hosts").read_text().split())
        self.peers: list[socket.socket] = []
        self.stopped = 0

    def note_signal(self, number: int, frame: object) -> None:
        self.stopped = self.stopped or number

    def join(self) -> None:
        address = self.attempt / "rendezvous.json"
        if self.rank == 0:
            with socket.create_server(("127.0.0.1", 0)) as server:
                server.settimeout(SETUP_S)
                write(address, {"port": server.getsockname()[1]})
                self.peers = [server.accept()[0] for _ in range(self.world - 1)]
            return
        end = time.monotonic() + SETUP_S
        while not address.exists():
            if time.monotonic() > end:
                raise OSError("rank 0 did not come")
            time.sleep(0.02)
        self.peers = [socket.create_connection(("127.0.0.1", json.loads(address.read_text())["port"]), SETUP_S)]

    def agree(self) -> int:
        """Return the largest stop signal of all ranks."""
        if self.rank:
            self.peers[0].sendall(bytes([self.stopped]))
            return receive(self.peers[0])
        if (self.run / "STOP").exists() and not self.stopped:
            self.stopped = STOP_FILE_CODE
        code = max([self.stopped, *(receive(peer) for peer in self.peers)])
        for peer in self.peers:
            peer.sendall(bytes([code]))
        return code

    def train(self) -> None:
        step, state = self.load()
        saved, first = step, step + 1
        while True:
            code, done = self.agree(), step >= STEPS
            if self.rank == 0 and step > saved and (done or code or step % SAVE_EVERY == 0):
                self.save(step, state)
                saved = step
            if done or code:
                self.leave(step, code)
                return
            step += 1
            time.sleep(STEP_S)
            state = hashlib.sha256(f"{state}{step}".encode()).hexdigest()
            if self.rank == 0:
                self.record(step, state, first)

    def load(self) -> tuple[int, str]:
        folder = self.run / "checkpoints"
        steps = sorted(path.parent for path in folder.glob("step-*/manifest.json") if path.parent.suffix == "")
        newest = steps[-1] if steps else None
        step = int(newest.name.removeprefix("step-")) if newest else 0
        if self.rank == 0:
            for leftover in (*folder.glob("*.partial"), *folder.glob("*.trash")):
                shutil.rmtree(leftover)
            metrics = self.run / "metrics.jsonl"
            lines = metrics.read_text().splitlines(keepends=True)[:step] if metrics.exists() else []
            partial = metrics.with_name(".metrics.tmp")
            partial.write_text("".join(lines))
            partial.rename(metrics)
        return step, (newest / "state").read_text() if newest else "start"

    def save(self, step: int, state: str) -> None:
        final = self.run / "checkpoints" / f"step-{step:08d}"
        partial = final.with_suffix(".partial")
        partial.mkdir(parents=True)
        (partial / "state").write_text(state)
        time.sleep(SAVE_S)
        write(partial / "manifest.json", {"step": step})
        partial.rename(final)
        complete = sorted(path for path in final.parent.glob("step-*") if path.suffix == "")
        for old in complete[:-KEEP]:
            trash = old.with_suffix(".trash")
            old.rename(trash)
            shutil.rmtree(trash)

    def record(self, step: int, state: str, first: int) -> None:
        line = {"step": step, "loss": int(state[:8], 16) / 2**32, "grad_norm": 1.0, "lr": 0.1, "tokens": 8}
        line |= {"tokens_per_s": 8 / STEP_S, "step_time_s": STEP_S, "attempt": int(self.attempt.name)}
        append(self.run / "metrics.jsonl", line | {"time": time.time()})
        if step == first:
            append(self.attempt / "events.jsonl", {"time": time.time(), "event": "first-step", "step": step})

    def leave(self, step: int, code: int) -> None:
        if self.rank:
            return
        kind, reason = (
            ("preempted", f"signal {signal.Signals(code).name}") if step < STEPS else ("finished", "all done")
        )
        if kind == "finished":
            write(self.run / "FINISHED", {"step": step})
        write(self.attempt / "outcome.json", {"kind": kind, "step": step, "reason": reason, "time": time.time()})

    def report_lost_peer(self, error: OSError) -> None:
        record = {"rank": self.rank, "node": self.node, "time": time.time(), "kind": "peer-lost", "message": str(error)}
        write(self.attempt / "failures" / f"rank-{self.rank:05d}.json", record)


def receive(peer: socket.socket) -> int:
    data = peer.recv(1)
    if not data:
        raise ConnectionResetError("connection closed by peer")
    return data[0]


def append(path: Path, document: dict[str, Any]) -> None:
    with path.open("a") as stream:
        stream.write(json.dumps(document) + "\n")


def write(path: Path, document: dict[str, Any]) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    partial.write_text(json.dumps(document))
    partial.rename(path)


def main(arguments: list[str]) -> NoReturn:
    """Run one rank; never returns."""
    run, attempt = (Path(arguments[arguments.index(name) + 1]) for name in ("--run-dir", "--attempt-dir"))
    code = 0
    if not (run / "FINISHED").exists():
        rank = Rank(run, attempt)
        for number in STOP_SIGNALS:
            signal.signal(number, rank.note_signal)
        try:
            rank.join()
            rank.train()
        except OSError as error:
            rank.report_lost_peer(error)
            code = 1
    sys.stderr.flush()
    os._exit(code)
