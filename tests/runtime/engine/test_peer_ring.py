"""Training with ring attention whose messages are copied into memory of the following rank: the bits of the group's."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch

from hpjob.runtime.parity.case import parse_case
from hpjob.runtime.parity.worker import RankRecord, train_case
from hpjob.runtime.process_pool import ProcessPool
from hpjob.runtime.sequence import peer_post
from hpjob.runtime.sequence.ring import Ring
from tests.runtime.file_memory import file_allocator

STEPS = 2
RING = "sequence_parallelism_mode=ring_attn num_hidden_layers=3"


def trained(text: str, world: int, folder: str | None) -> tuple[RankRecord, list[bool]]:
    """A trajectory, and for each ring whether it has posts; with a folder ranks share memory in files there."""
    case = parse_case(text, world=world, steps=STEPS)
    rings: list[bool] = []
    check = Ring.__post_init__

    def noting(ring: Ring) -> None:
        check(ring)
        rings.append(ring.visitor_post is not None and ring.sum_post is not None)

    with (
        mock.patch.object(peer_post, "reaches_peers", return_value=folder is not None),
        mock.patch.object(peer_post, "allocator", file_allocator(folder or "")),
        mock.patch.object(Ring, "__post_init__", noting),
    ):
        return train_case(case, STEPS, None), rings


@pytest.mark.parametrize(
    ("text", "world", "has_posts"),
    [
        (f"sp_size=2 {RING} num_microbatches=2 recompute=selective precision=bf16", 2, True),
        (f"pp_size=2 sp_size=2 {RING} num_microbatches=3 zero_stage=1 precision=fp32", 4, True),
        (f"sp_size=4 {RING} recompute=full precision=bf16", 4, True),
        (f"sp_size=4 {RING} gpus_per_node=2 precision=fp32", 4, False),
    ],
    ids=["two ranks", "pipeline", "four ranks", "ring of rings"],
)
def test_copies_give_the_bits_of_messages(
    pool: ProcessPool, tmp_path: Path, text: str, world: int, has_posts: bool
) -> None:
    by_messages = pool.run(trained, text, world, None, world=world)
    by_copies = pool.run(trained, text, world, str(tmp_path), world=world)
    for (plain, rings), (copied, rings_with_posts) in zip(by_messages, by_copies, strict=True):
        assert (rings, rings_with_posts) == ([False], [has_posts])
        assert copied.losses == plain.losses
        for (name, _, ours), (_, _, theirs) in zip(copied.weights, plain.weights, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, msg=name)
