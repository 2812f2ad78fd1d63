"""Command line: runs in lanes, a line for each, a report."""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path

from cluster_chaos.corpus import write_corpus
from cluster_chaos.faults import FAULTS, Fault
from cluster_chaos.site import Site
from cluster_chaos.verdict import problems_of
from cluster_chaos.victim import STEPS, Victim, write_recipe
from hpjob.core.run_dir import RunDir
from hpjob.core.run_records import read_json, read_json_lines, read_outcome

START_S = 600.0
FINISH_S = 1200.0
LANES = 3


@dataclass
class Result:
    """One run, as in the report."""

    run: str
    fault: str
    moment: str
    step: int = 0
    """Newest step when the fault came."""
    attempts: int = 0
    decisions: list[str | None] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    signal_to_exit_s: float | None = None
    """From the fault to the outcome of the ranks."""
    requeue_to_first_step_s: float | None = None
    """From the begin of the next attempt to its first step."""
    seconds: float = 0.0

    @property
    def survived(self) -> bool:
        return not self.problems


def main() -> int:
    """Run the chaos; return the exit code."""
    options = _parser().parse_args()
    base = Path(tempfile.mkdtemp(prefix="hpjob-chaos-"))
    site = Site(base / "s", nodes=2 * options.lanes + 2, release=options.release, quick=options.quick)
    os.environ["SLURM_CONF"] = site.environment["SLURM_CONF"]

    def clean_up() -> None:
        site.down()
        if options.keep is not None and (base / "runs").exists():
            shutil.copytree(base / "runs", options.keep, dirs_exist_ok=True)
        shutil.rmtree(base, ignore_errors=True)

    def give_up(*_: object) -> None:
        clean_up()
        os._exit(130)  # the lanes wait for jobs that no longer exist

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, give_up)
    try:
        site.up()
        results = _all_runs(options, site, base)
    finally:
        clean_up()
    survived = sum(result.survived for result in results)
    runtime = "quick runtime" if options.quick else "real runtime"
    print(f"{len({result.fault for result in results})} kinds of fault, seed {options.seed}, {runtime}")
    print(f"{survived} of {len(results)} survived")
    return 0 if survived == len(results) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--release", help="of Slurm, for slurm-sandbox up")
    parser.add_argument("--lanes", type=int, default=LANES, help="runs at once (default: %(default)s)")
    parser.add_argument(
        "--only", action="append", default=[], metavar="WORDS", help="faults whose name has these words"
    )
    parser.add_argument("--quick", action="store_true", help="a runtime without torch, to do many runs")
    parser.add_argument("--minutes", type=float, help="begin no further run after this time")
    parser.add_argument("--report", type=Path, metavar="FILE", help="JSON report")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="copy the run folders there")
    return parser


def _all_runs(options: argparse.Namespace, site: Site, base: Path) -> list[Result]:
    write_corpus(base / "corpus")
    write_recipe(base, base / "corpus")
    undisturbed = Victim(site, base, "undisturbed", "batch")
    undisturbed.submit()
    if not undisturbed.wait(undisturbed.over, START_S + FINISH_S):
        raise RuntimeError(f"the undisturbed run did not finish: {undisturbed.describe()}")
    chance = random.Random(options.seed)
    chosen = [fault for fault in FAULTS if not options.only or any(words in fault.name for words in options.only)]
    end = time.monotonic() + options.minutes * 60 if options.minutes else None

    def one(number: int, fault: Fault, seed: int) -> Result | None:
        if end is not None and time.monotonic() > end:
            return None
        return _one_run(site, base, undisturbed.run, f"run-{number:03d}", fault, random.Random(seed))

    order = [fault for _ in range(-(-options.runs // len(chosen))) for fault in chance.sample(chosen, len(chosen))]
    jobs = [(number, order[number], chance.getrandbits(32)) for number in range(options.runs)]
    results: list[Result] = []
    # A killed controller forgets what it was told a moment ago, for all jobs: those runs come last, one by one.
    for alone, width in ((False, options.lanes), (True, 1)):
        with ThreadPoolExecutor(width) as lanes:
            for future in as_completed([lanes.submit(one, *job) for job in jobs if job[1].alone is alone]):
                if (result := future.result()) is not None:
                    results.append(result)
                    _write_report(options, results)
    return results


def _one_run(site: Site, base: Path, undisturbed: RunDir, name: str, fault: Fault, chance: random.Random) -> Result:
    began = time.monotonic()
    victim = Victim(site, base, name, fault.partition)
    result = Result(run=name, fault=fault.name, moment="?")
    try:
        _hit(victim, fault, chance, result, undisturbed)
    except Exception as error:  # one lane's trouble must not end the others
        result.problems.append(f"{type(error).__name__}: {error}")
        traceback.print_exc(file=sys.stderr)
    result.notes = victim.notes
    result.attempts = len(victim.run.attempt_list())
    result.decisions = [(read_json(attempt.end) or {}).get("decision") for attempt in victim.run.attempt_list()]
    result.seconds = round(time.monotonic() - began, 1)
    word = "survived" if result.survived else f"LOST: {'; '.join(result.problems)}"
    print(
        f"{name}  {fault.name}, {result.moment}: {word} ({result.attempts} attempts {result.decisions}, "
        f"{result.seconds:.0f} s)",
        flush=True,
    )
    if not result.survived:
        victim.hpjob("cancel", name, "--yes")
    return result


def _hit(victim: Victim, fault: Fault, chance: random.Random, result: Result, undisturbed: RunDir) -> None:
    victim.submit()
    if not victim.wait(lambda: victim.attempt is not None, START_S):
        raise RuntimeError(f"did not start: {victim.describe()}")
    result.moment = _wait_for_moment(victim, fault, chance)
    result.step = victim.step()
    committed, attempts = victim.checkpoint_step(), len(victim.run.attempt_list())
    at = time.time()
    if victim.over():
        victim.notes.append("finished before the fault")
    else:
        fault.happen(victim, chance)
    victim.wait(victim.over, FINISH_S)
    result.problems += problems_of(victim, undisturbed, committed, attempts)
    _measure(victim, result, at, attempts)


def _wait_for_moment(victim: Victim, fault: Fault, chance: random.Random) -> str:
    """Wait for a random moment: during set-up, at a step, or while a checkpoint is written."""
    kind = chance.choices(("set-up", "step", "save"), weights=(2, 6, 2))[0]
    if kind == "set-up" and not fault.needs_ranks:
        delay = chance.uniform(0.0, 6.0)
        time.sleep(delay)
        return f"{delay:.1f} s after its begin"
    if kind == "set-up":
        victim.wait(lambda: len(victim.ranks()) == 2, START_S)
        delay = chance.uniform(0.0, 4.0)
        time.sleep(delay)
        return f"{delay:.1f} s after its ranks were there"
    step = chance.randrange(1, STEPS - 20)
    victim.wait(lambda: victim.step() >= step, START_S)
    if kind == "save":
        victim.wait(victim.saving, 30)
        return f"during a save after step {step}"
    return f"at step {step}"


def _measure(victim: Victim, result: Result, at: float, attempts_before: int) -> None:
    attempts = victim.run.attempt_list()
    outcome = read_outcome(attempts[attempts_before - 1]) if attempts_before else None
    if outcome is not None and outcome.kind == "preempted" and outcome.time is not None:
        result.signal_to_exit_s = round(outcome.time - at, 2)
    if len(attempts) > attempts_before:
        following = attempts[attempts_before]
        begun = (read_json(following.attempt_json) or {}).get("started_at")
        first = next((line for line in read_json_lines(following.events) if line.get("event") == "first-step"), None)
        if first is not None and begun is not None:
            result.requeue_to_first_step_s = round(float(first["time"]) - float(begun), 2)


def _write_report(options: argparse.Namespace, results: list[Result]) -> None:
    """Write what is known so far, so that an end by force leaves a report too."""
    if options.report is not None:
        options.report.write_text(json.dumps(_report(options, results), indent=2) + "\n", encoding="utf-8")


def _report(options: argparse.Namespace, results: list[Result]) -> dict[str, object]:
    exits = [result.signal_to_exit_s for result in results if result.signal_to_exit_s is not None]
    firsts = [result.requeue_to_first_step_s for result in results if result.requeue_to_first_step_s is not None]
    return {
        "version": 1,
        "seed": options.seed,
        "release": options.release,
        "quick": options.quick,
        "survived": sum(result.survived for result in results),
        "runs": len(results),
        "kinds": sorted({result.fault for result in results}),
        "median_signal_to_exit_s": statistics.median(exits) if exits else None,
        "median_requeue_to_first_step_s": statistics.median(firsts) if firsts else None,
        "results": [asdict(result) for result in results],
    }
