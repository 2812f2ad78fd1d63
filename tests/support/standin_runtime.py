"""Stands in for ``python -m hpjob.runtime`` where a test is about launching, not about training.

It follows the same contract: rank from the environment, one checkpoint manifest a save, outcome, FINISHED, failure
records. ``behaviour.json`` in the run folder says how many steps there are and which rank fails how; with ``held`` so
many attempts stand still after three steps until they are ended, so that none is over before its test has looked. With
``says_place`` the ranks print all of their place, which makes each load the plan's types first.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

HELD_STEPS = 3
STOP = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)


def main() -> None:
    run, attempt = (Path(sys.argv[sys.argv.index(name) + 1]) for name in ("--run-dir", "--attempt-dir"))
    rank = int(os.environ.get("HPJOB_RANK") or os.environ["SLURM_PROCID"])
    node = os.environ.get("HPJOB_NODE_NAME") or os.environ["SLURMD_NODENAME"]
    hosts = (attempt / "hosts").read_text().split()
    behaviour = json.loads((run / "behaviour.json").read_text())
    stopped: list[int] = []
    for number in STOP:
        signal.signal(number, lambda number, frame: stopped.append(number))
    place = f"rank {rank} of {len(hosts)} on {node}"
    sys.stdout.write((whole_place(attempt, rank, node) if behaviour.get("says_place") else place) + "\n")
    sys.stdout.flush()
    if hosts[rank] != node:
        sys.exit(f"rank {rank} is on {node}, planned on {hosts[rank]}")
    step = newest_step(run)
    last = step + HELD_STEPS if int(attempt.name) < behaviour.get("held", 0) else behaviour["steps"]
    while step < behaviour["steps"]:
        if stopped and not behaviour.get("deaf"):
            name = signal.Signals(stopped[0]).name
            if rank == 0:
                if not behaviour.get("saves_nothing"):
                    save(run, step)
                write(attempt / "outcome.json", {"kind": "preempted", "step": step, "reason": f"signal {name}"})
            sys.exit(0)
        if step == last:
            time.sleep(0.05)
            continue
        step += 1
        time.sleep(behaviour.get("step_s", 0.1))
        fail(attempt, rank, node, step, behaviour)
        if rank == 0:
            with (run / "metrics.jsonl").open("a") as stream:
                line = {"step": step, "loss": 1.0 / step, "tokens": 8, "tokens_per_s": 80.0, "step_time_s": 0.1}
                stream.write(json.dumps(line | {"attempt": int(attempt.name), "time": time.time()}) + "\n")
    if rank == 0:
        save(run, step)
        write(attempt / "outcome.json", {"kind": "finished", "step": step, "reason": "last step"})
        (run / "FINISHED").touch()


def whole_place(attempt: Path, rank: int, node: str) -> str:
    from hpjob.plan.model import Plan
    from hpjob.plan.placement_line import placement_line

    return placement_line(Plan.model_validate_json((attempt / "plan.json").read_text()), rank, node)


def fail(attempt: Path, rank: int, node: str, step: int, behaviour: dict[str, int]) -> None:
    if behaviour.get("only_attempt", int(attempt.name)) != int(attempt.name):
        return
    if behaviour.get("kill_rank") == rank and step == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour.get("exit_rank") == rank and step == 2:
        os._exit(7)
    if behaviour.get("hang_rank") == rank and step == 2 and attempt.name == "0000":
        record = {"rank": rank, "node": node, "time": time.time(), "kind": "hang", "step": step, "exception": "Hang"}
        write(attempt / "failures" / f"rank-{rank:05d}.json", record | {"message": f"rank {rank} on {node} hangs"})
        os._exit(3)
    if behaviour.get("raise_rank") == rank and step == 2:
        try:
            raise ValueError("the loss is not finite")
        except ValueError as error:
            text = traceback.format_exc()
            record = {"rank": rank, "node": node, "time": time.time(), "kind": "exception", "step": step}
            record |= {"exception": "ValueError", "message": str(error), "traceback": text}
            write(attempt / "failures" / f"rank-{rank:05d}.json", record)
            sys.stderr.write(text)
            os._exit(1)


def newest_step(run: Path) -> int:
    return max((int(p.parent.name.removeprefix("step-")) for p in run.glob("checkpoints/*/manifest.json")), default=0)


def save(run: Path, step: int) -> None:
    folder = run / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "manifest.json", {"step": step})


def write(path: Path, document: dict[str, object]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(document))
    partial.rename(path)


if __name__ == "__main__":
    main()
