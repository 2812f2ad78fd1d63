#!/usr/bin/env python3
"""Saves a known state under many meshes and loads each under the others, without starting them.

    scripts/reshard_matrix.py              all pairs
    scripts/reshard_matrix.py --covering   the pairs that every check of the project runs

The ranks of a mesh live one after the other, each in a fork of its own over torch's fake process group and with the
real engine. Weights and both moments of AdamW are filled from the unsharded state; a checkpoint is written as ranks
write it; under the other mesh each rank's part must equal that part of the unsharded state within 1e-6. One line a
pair; exit code 1 unless all are ok.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import pickle
import sys
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_loader import load
from torch.testing._internal.distributed.fake_pg import FakeStore

from hpjob.runtime.checkpoint.shards import plan_locally, plan_whole
from hpjob.runtime.checkpoint.write import write_metadata, write_shards
from hpjob.runtime.engine import Engine
from hpjob.runtime.mesh import build_mesh
from hpjob.runtime.parity.case import Case, parse_case

T = TypeVar("T")
Tensors = dict[MetadataIndex, torch.Tensor]
TOLERANCE = 1e-6
STEPS_DONE = 7
COMMON = "num_hidden_layers=4 hidden_size=32 intermediate_size=48 seq_length=16 num_microbatches=4"
MOMENTS = ("optimizer.exp_avg.", "optimizer.exp_avg_sq.")


@dataclass(frozen=True)
class Model:
    """A model and the meshes that its state goes between.

    Attributes:
        covering: The first so many meshes are part of the short form.
    """

    name: str
    model_type: str
    settings: str
    covering: int
    meshes: tuple[str, ...]


MODELS = (
    Model(
        "llama",
        "llama",
        "vocab_size=96",
        2,
        (
            "pp_size=2 pp_style=zbv num_model_chunks=2 precision=fp32",
            "sp_size=2 sequence_parallelism_mode=ring_attn zero_stage=1 precision=fp32",
            "dp_size=1 precision=fp32",
            "tp_size=2 precision=bf16",
            "tp_size=2 dp_size=2 zero_stage=2 precision=bf16",
            "pp_size=4 dp_size=2 zero_stage=1 precision=fp32",
            "tp_size=4 pp_size=2 sequence_parallelism_mode=split_gather precision=fp32",
        ),
    ),
    Model(
        "llama, tied embeddings, odd vocabulary",
        "llama",
        "vocab_size=97 tie_word_embeddings=true",
        3,
        (
            "dp_size=2 zero_stage=3 precision=fp32",
            "pp_size=2 pp_style=interleaved num_model_chunks=2 precision=fp32",
            "tp_size=2 dp_size=2 zero_stage=0 precision=fp32",
            "tp_size=2 pp_size=2 sp_size=2 sequence_parallelism_mode=all_to_all zero_stage=1 precision=fp32",
        ),
    ),
    Model(
        "mixtral, odd vocabulary",
        "mixtral",
        "vocab_size=97 num_experts=4 num_experts_per_tok=2",
        2,
        (
            "dp_size=4 ep_size=2 zero_stage=1 precision=fp32",
            "pp_size=2 precision=fp32",
            "dp_size=1 precision=fp32",
            "tp_size=2 dp_size=2 ep_size=2 zero_stage=0 precision=fp32",
            "sp_size=2 dp_size=4 ep_size=4 sequence_parallelism_mode=all_to_all zero_stage=3 precision=fp32",
        ),
    ),
)


class Unsharded:
    """The whole state: values that depend on the entry's name alone."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}

    def of(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return an entry."""
        if name not in self._tensors:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            self._tensors[name] = torch.randn(shape, generator=generator)
        return self._tensors[name]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local part of a possibly distributed tensor."""
    part: torch.Tensor = getattr(tensor, "to_local", lambda: tensor)()
    return part


def as_rank(case: Case, rank: int, work: Callable[[Engine], T]) -> T:
    """Run ``work`` with the engine of one rank of a mesh, in a fork: torch keeps what it learned of a mesh's rank."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def child() -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=case.world)
        result = work(Engine(case.plan, case.recipe, build_mesh(case.plan, "cpu"), torch.device("cpu")))
        theirs.send_bytes(pickle.dumps(result))

    process = context.Process(target=child)
    process.start()
    theirs.close()
    try:
        result: T = pickle.loads(ours.recv_bytes())
    except EOFError:
        raise RuntimeError(f"rank {rank} of {case.text} failed") from None
    process.join()
    return result


def parts(engine: Engine) -> Iterator[tuple[str, torch.Tensor, tuple[int, ...], tuple[slice, ...]]]:
    """Yield name, local part, whole shape and place of every tensor of a rank, as the engine itself knows them."""
    state = engine.state_dict()
    for item in engine.parameters:
        region = item.region
        yield item.name, item.local, region.shape, region.slices
        for prefix in MOMENTS:
            yield prefix + item.name, local(state[prefix + item.name]), region.shape, region.slices


def what_to_write(engine: Engine, truth: Unsharded) -> tuple[SavePlan, Tensors]:
    """Fill a rank with its part of the unsharded state; return what it could write, and the tensors of that."""
    with torch.no_grad():
        for name, part, shape, place in parts(engine):
            part.copy_(truth.of(name, shape)[place])
    engine.optimizer.steps = STEPS_DONE
    planner = DefaultSavePlanner()
    plan = plan_locally(planner, engine.state_dict(), dist.get_rank())
    return plan, {item.index: planner.lookup_object(item.index).detach().clone() for item in plan.items}


def save(case: Case, path: Path, truth: Unsharded, *, broken: bool) -> None:
    """Write a checkpoint as the ranks of a mesh do."""
    ranks = [as_rank(case, rank, lambda engine: what_to_write(engine, truth)) for rank in range(case.world)]
    if broken:
        for _, tensors in ranks:
            spoilt = next(tensor for index, tensor in tensors.items() if "q_proj" in index.fqn and tensor.numel())
            spoilt.view(-1)[0] += 1e-3
    plans, metadata = plan_whole(DefaultSavePlanner(), [plan for plan, _ in ranks])
    path.mkdir()
    results = [write_shards(path, plan, tensors).results for plan, (_, tensors) in zip(plans, ranks, strict=True)]
    write_metadata(path, metadata, results)


def load_and_compare(engine: Engine, path: Path, truth: Unsharded) -> float:
    """Load a checkpoint into a rank and return its largest difference from the unsharded state."""
    with torch.no_grad():
        for _, part, _, _ in parts(engine):
            part.fill_(float("nan"))
    engine.optimizer.steps = 0
    state = engine.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # each rank loads for itself
        load(state, storage_reader=FileSystemReader(path), no_dist=True)
    engine.load_state_dict(state)
    if engine.optimizer.steps != STEPS_DONE:
        return float("inf")
    differences = [
        (part - truth.of(name, shape)[place]).abs().max().item()
        for name, part, shape, place in parts(engine)
        if part.numel()
    ]
    return max(float("inf") if isnan(value) else value for value in differences)


def run_model(model: Model, meshes: tuple[str, ...], root: Path, *, broken: bool) -> Iterator[tuple[str, float]]:
    """Yield every ordered pair of meshes in words, and the largest difference over all its ranks."""
    truth = Unsharded()
    cases = [
        parse_case(f"{COMMON} {model.settings} {mesh}", world=None, steps=10, model_type=model.model_type)
        for mesh in meshes
    ]
    folder = root / model.name.replace(" ", "-")
    folder.mkdir()
    for number, case in enumerate(cases):
        save(case, folder / str(number), truth, broken=broken)
    for target, case in enumerate(cases):
        sources = [number for number in range(len(cases)) if number != target]
        paths = [folder / str(source) for source in sources]

        def compare_all(engine: Engine, paths: list[Path] = paths) -> list[float]:
            return [load_and_compare(engine, path, truth) for path in paths]

        by_rank = [as_rank(case, rank, compare_all) for rank in range(case.world)]
        for source, differences in zip(sources, zip(*by_rank, strict=True), strict=True):
            pair = f"{cases[source].plan.summary}  ->  {case.plan.summary}"
            yield f"{model.name}: world {cases[source].world} -> {case.world}: {pair}", max(differences)


def main() -> int:
    """Run and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--covering", action="store_true", help="only the first meshes of each model")
    parser.add_argument("--model", choices=[model.name for model in MODELS], help="only this one")
    parser.add_argument("--broken", action="store_true", help="spoil one element of each checkpoint, to see it found")
    options = parser.parse_args()
    torch.set_num_threads(1)
    good = total = 0
    with tempfile.TemporaryDirectory(prefix="reshard-") as root:
        for model in (model for model in MODELS if options.model in (None, model.name)):
            meshes = model.meshes[: model.covering] if options.covering else model.meshes
            for words, difference in run_model(model, meshes, Path(root), broken=options.broken):
                ok = difference <= TOLERANCE
                good, total = good + ok, total + 1
                print(f"{'ok  ' if ok else 'FAIL'} {difference:.1e}  {words}", flush=True)
    print(f"{good} of {total} pairs within {TOLERANCE:g} of the unsharded state")
    return 0 if good == total else 1


if __name__ == "__main__":
    sys.exit(main())
