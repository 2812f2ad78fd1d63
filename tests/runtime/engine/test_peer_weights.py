"""ZeRO 1 through memory that ranks read directly: the numbers of collectives."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch

from hpjob.runtime.model import weight_memory
from hpjob.runtime.parallel.peer_arena import PeerArena
from hpjob.runtime.parity.case import parse_case
from hpjob.runtime.parity.worker import RankRecord, train_case
from hpjob.runtime.process_pool import ProcessPool
from tests.runtime.file_memory import file_allocator

STEPS = 3


def trained(text: str, world: int, folder: str | None) -> tuple[RankRecord, int]:
    """A trajectory, and how many arenas there were; with a folder ranks share memory in files there."""
    case = parse_case(text, world=world, steps=STEPS)
    if folder is None:
        return train_case(case, STEPS, None), 0

    with (
        mock.patch.object(weight_memory, "reaches_peers", return_value=True),
        mock.patch.object(weight_memory, "allocator", file_allocator(folder)),
        mock.patch.object(weight_memory, "PeerArena", wraps=PeerArena) as arenas,
    ):
        return train_case(case, STEPS, None), arenas.call_count


@pytest.mark.parametrize(
    ("text", "world", "expected"),
    [
        ("dp_size=2 zero_stage=1 num_microbatches=2 precision=bf16", 2, 1),
        ("dp_size=3 zero_stage=1 num_microbatches=1 precision=fp32", 3, 1),
        ("dp_size=2 pp_size=2 pp_style=zbv num_model_chunks=2 num_hidden_layers=4 zero_stage=1 precision=bf16", 4, 2),
        ("dp_size=4 zero_shard_size=2 zero_stage=1 tie_word_embeddings=true precision=fp16", 4, 1),
        ("dp_size=2 tp_size=2 zero_stage=1 precision=fp32", 4, 1),
        ("dp_size=2 zero_stage=2 num_microbatches=3 num_hidden_layers=5 precision=bf16", 2, 1),
        ("dp_size=2 zero_stage=3 num_microbatches=3 num_hidden_layers=5 precision=bf16", 2, 1),
        ("dp_size=4 zero_shard_size=2 zero_stage=3 recompute=full precision=fp32", 4, 1),
        ("model_type=mixtral num_experts=4 num_experts_per_tok=2 dp_size=4 ep_size=2 zero_stage=1", 4, 2),
    ],
)
def test_copies_give_the_numbers_of_collectives(
    pool: ProcessPool, tmp_path: Path, text: str, world: int, expected: int
) -> None:
    by_collectives = pool.run(trained, text, world, None, world=world)
    by_copies = pool.run(trained, text, world, str(tmp_path), world=world)
    for (plain, _), (copied, arenas) in zip(by_collectives, by_copies, strict=True):
        assert arenas == expected
        # Two summands come to the same bits in any order, more do not.
        assert copied.losses == pytest.approx(plain.losses, rel=0 if world == 2 else 1e-5)
        for (name, _, ours), (_, _, theirs) in zip(copied.weights, plain.weights, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, msg=name)
