#!/usr/bin/env python3
"""Damage topology samples at random and check what the readers make of them.

Each mutant has to end in a result or in a clear error, within the time limit, and may not show a link
between two GPUs, or a cable between two ports, that the whole text does not show.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hpjob.core.errors import HpjobError
from hpjob.topology.read.ibnetdiscover import parse_fabric
from hpjob.topology.read.reading import Reading
from hpjob.topology.read.recognise import read_bytes
from hpjob.topology.read.text import Source, decode

TIME_LIMIT_S = 2.0
NOISE_MAX = 10 * 1024 * 1024
Mutation = Callable[[bytes, random.Random], bytes]


def cut_end(data: bytes, rng: random.Random) -> bytes:
    """Keep the beginning."""
    return data[: rng.randrange(len(data) + 1)]


def cut_start(data: bytes, rng: random.Random) -> bytes:
    """Keep the end."""
    return data[rng.randrange(len(data) + 1) :]


def cut_middle(data: bytes, rng: random.Random) -> bytes:
    """Lose a stretch, often inside lines."""
    a, b = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    return data[:a] + data[b:]


def drop_lines(data: bytes, rng: random.Random) -> bytes:
    """Lose some whole lines."""
    return b"".join(line for line in data.splitlines(keepends=True) if rng.random() > 0.15)


def reorder_lines(data: bytes, rng: random.Random) -> bytes:
    """Shuffle all lines, or move one stretch."""
    lines = data.splitlines(keepends=True)
    if rng.random() < 0.5:
        rng.shuffle(lines)
        return b"".join(lines)
    a, b = sorted(rng.randrange(len(lines) + 1) for _ in range(2))
    rest = lines[:a] + lines[b:]
    at = rng.randrange(len(rest) + 1)
    return b"".join(rest[:at] + lines[a:b] + rest[at:])


def control_bytes(data: bytes, rng: random.Random) -> bytes:
    """Put control bytes and colour codes anywhere."""
    out = bytearray(data)
    for _ in range(rng.randrange(1, 40)):
        at = rng.randrange(len(out) + 1)
        out[at:at] = rng.choice(
            [bytes([rng.randrange(32)]), b"\x1b[4m", b"\x1b[0m", b"\x1b]0;title\x07", b"\x7f", b"\r"]
        )
    return bytes(out)


def mixed_encodings(data: bytes, rng: random.Random) -> bytes:
    """Another encoding, or pieces of one inside."""
    text = data.decode("utf-8", errors="replace")
    choice = rng.randrange(5)
    if choice == 0:
        return text.encode("utf-16", errors="replace")
    if choice == 1:
        return b"\xef\xbb\xbf" + data
    if choice == 2:
        return text.encode("utf-16-le", errors="replace")
    out = bytearray(data)
    for _ in range(rng.randrange(1, 20)):
        at = rng.randrange(len(out) + 1)
        out[at:at] = rng.choice(
            [b"\xff\xfe", b"\xe4", "→".encode(), "ü".encode("utf-16-le"), b"\xa0", "\u00a0".encode()]
        )
    return bytes(out)


def double_lines(data: bytes, rng: random.Random) -> bytes:
    """Print some lines twice, or the whole text."""
    if rng.random() < 0.2:
        return data + data
    return b"".join(line * (2 if rng.random() < 0.3 else 1) for line in data.splitlines(keepends=True))


def noise(data: bytes, rng: random.Random) -> bytes:
    """Put the text into a log, usually a small one, sometimes 10 MB."""
    size = NOISE_MAX if rng.random() < 0.004 else rng.randrange(20_000)
    kind = rng.randrange(4)
    if kind == 0:
        junk = rng.randbytes(size)
    elif kind == 1:
        junk = (b'GPU0 X NIC mlx5_0 Link 0: [1] "S-1" Nodes= <pci {[\n' * (size // 50 + 1))[:size]
    elif kind == 2:
        junk = bytes(rng.choice(b" \t\n") for _ in range(min(size, 4096))) * (size // 4096 + 1)
    else:
        junk = b"x" * size
    at = rng.randrange(len(junk) + 1)
    return junk[:at] + b"\n" + data + b"\n" + junk[at:]


MUTATIONS: tuple[Mutation, ...] = (
    cut_end,
    cut_start,
    cut_middle,
    drop_lines,
    reorder_lines,
    control_bytes,
    mixed_encodings,
    double_lines,
    noise,
)


def gpu_links(reading: Reading) -> set[tuple[int, int]]:
    """Pairs of GPUs that the reading calls linked."""
    found: set[tuple[int, int]] = set()
    for node in reading.topology.nodes if reading.topology else ():
        found |= {(link.a, link.b) for link in node.links or () if link.linked}
        for island in node.islands or ():
            if island.all_to_all:
                found |= set(combinations(sorted(island.gpus), 2))
    return found


def cables(data: bytes) -> set[frozenset[tuple[str, int]]]:
    """Cables of an ibnetdiscover listing by node ids and ports."""
    fabric = parse_fabric(Source(decode(data)))
    return {frozenset((key[0], port) for key, port in cable) for cable in fabric.cables}


def check(whole: bytes, mutant: bytes, before: Reading) -> str | None:
    """Return what is wrong about the reading of a mutant, or None."""
    started = time.process_time()
    try:
        reading = read_bytes(mutant)
    except HpjobError as error:
        reading = None
        if not error.message or not error.hint:
            return "an error without words"
    except Exception:
        return "traceback: " + traceback.format_exc().strip().splitlines()[-1]
    took = time.process_time() - started
    if took > TIME_LIMIT_S:
        return f"took {took:.1f} s for {len(mutant)} bytes"
    if reading is None:
        return None
    invented = gpu_links(reading) - gpu_links(before)
    if invented:
        return f"invented links {sorted(invented)[:4]} as {reading.kind}"
    if reading.kind == before.kind == "ibnetdiscover" and cables(mutant) - cables(whole):
        return f"invented {len(cables(mutant) - cables(whole))} cables"
    return None


def main() -> int:
    """Mutate the samples of a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of samples, searched for *.txt and *.xml")
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="make the mutants before this one without reading them")
    parser.add_argument("--seconds", type=float, help="stop after this time and name the mutant to start at next")
    parser.add_argument("--keep", type=Path, help="folder for the first mutants that fail")
    arguments = parser.parse_args()
    samples = [path.read_bytes() for path in sorted(arguments.folder.rglob("*")) if path.suffix in (".txt", ".xml")]
    readings = [read_bytes(data) for data in samples]
    rng = random.Random(arguments.seed)
    failures: Counter[str] = Counter()
    slowest = 0.0
    done = 0
    began = time.monotonic()
    for number in range(arguments.count):
        at = rng.randrange(len(samples))
        mutant = samples[at]
        names = []
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            mutation = rng.choice(MUTATIONS)
            names.append(mutation.__name__)
            mutant = mutation(mutant, rng)
        if number < arguments.start:
            continue
        if arguments.seconds is not None and time.monotonic() - began > arguments.seconds:
            print(f"out of time: go on with --start {number}")
            break
        done += 1
        started = time.process_time()
        wrong = check(samples[at], mutant, readings[at])
        slowest = max(slowest, time.process_time() - started)
        if wrong:
            failures[wrong.split(" ")[0]] += 1
            print(f"mutant {number} ({'+'.join(names)}, {readings[at].kind}): {wrong}")
            if arguments.keep and sum(failures.values()) <= 50:
                (arguments.keep / f"{number}.txt").write_bytes(mutant)
    print(f"{done} mutants, {sum(failures.values())} wrong {dict(failures)}, slowest {slowest:.2f} s")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
