"""Counting what tensors hold."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the runtime's tests need the [train] extra")

import torch

from hpjob.runtime.rehearsal.memory import held_bytes, watched_peak

CPU = torch.device("cpu")
MIB = 1 << 20


def megabytes(count: int) -> torch.Tensor:
    return torch.ones(count * MIB // 4)


def test_the_peak_is_the_most_at_once_and_not_the_sum() -> None:
    with watched_peak(CPU, 0) as peak:
        kept = megabytes(1)
        for _ in range(3):
            large = megabytes(4)
            del large
        kept = kept * 2
    assert peak.bytes == 5 * MIB


def test_what_was_there_before_counts() -> None:
    with watched_peak(CPU, 7 * MIB) as peak:
        megabytes(2)
    assert peak.bytes == 9 * MIB


def test_views_and_changes_in_place_hold_nothing_more() -> None:
    with watched_peak(CPU, 0) as peak:
        tensor = megabytes(2)
        tensor.view(2, -1)[0].add_(1)
    assert peak.bytes == 2 * MIB


def test_what_autograd_saves_is_held_until_the_backward_pass() -> None:
    weight = torch.ones(MIB // 4, requires_grad=True)
    with watched_peak(CPU, 0) as peak:
        value = weight
        for _ in range(3):
            value = value.exp()  # its result is kept for the gradient
    assert peak.bytes == 3 * MIB
    with watched_peak(CPU, 0) as unsaved, torch.no_grad():
        value = weight
        for _ in range(3):
            value = value.exp()
    assert unsaved.bytes == 2 * MIB


def test_a_storage_that_shrinks_is_freed() -> None:
    with watched_peak(CPU, 0) as peak:
        tensor = megabytes(4)
        tensor.untyped_storage().resize_(0)
        megabytes(3)
    assert peak.bytes == 4 * MIB


def test_shared_memory_is_held_once() -> None:
    tensor = megabytes(1)
    assert held_bytes([tensor, tensor.view(2, -1), None]) == MIB
