"""Buffers of messages: handed out to one user at a time, and again when they were given back."""

from __future__ import annotations

import pytest
import torch

from hpjob.runtime.sequence.message_buffers import MessageBuffers, unrecorded

CPU = torch.device("cpu")


def test_a_buffer_is_never_handed_out_twice_while_in_use() -> None:
    buffers = MessageBuffers()
    first, second = (buffers.take((2, 3), torch.float32, CPU) for _ in range(2))
    assert first.data_ptr() != second.data_ptr()
    buffers.give_back(first)
    assert buffers.take((2, 3), torch.float32, CPU) is first
    third = buffers.take((2, 3), torch.float32, CPU)
    assert len({tensor.data_ptr() for tensor in (first, second, third)}) == 3
    assert (buffers.num_made, buffers.num_in_use) == (3, 3)


def test_giving_back_twice_does_not_hand_out_twice() -> None:
    buffers = MessageBuffers()
    tensor = buffers.take((2,), torch.float32, CPU)
    buffers.give_back(tensor, tensor)
    buffers.give_back(tensor)
    assert buffers.take((2,), torch.float32, CPU) is tensor
    assert buffers.take((2,), torch.float32, CPU) is not tensor


@pytest.mark.parametrize(("shape", "dtype"), [((3, 2), torch.float32), ((2, 3), torch.bfloat16)])
def test_another_shape_or_dtype_is_another_buffer(shape: tuple[int, int], dtype: torch.dtype) -> None:
    buffers = MessageBuffers()
    buffers.give_back(buffers.take((2, 3), torch.float32, CPU))
    other = buffers.take(shape, dtype, CPU)
    assert (tuple(other.shape), other.dtype, buffers.num_made) == (shape, dtype, 2)


def test_tensors_of_others_are_left_alone() -> None:
    buffers = MessageBuffers()
    foreign, own = torch.zeros(4), buffers.take((4,), torch.float32, CPU)
    view = own.view(2, 2)
    buffers.give_back(foreign, view)
    assert buffers.owns(own)
    assert not buffers.owns(foreign) and not buffers.owns(view)
    assert buffers.take((4,), torch.float32, CPU) is not foreign
    assert buffers.take((2, 2), torch.float32, CPU).data_ptr() != own.data_ptr()


def test_sizes_that_are_no_longer_asked_for_fall_out() -> None:
    buffers = MessageBuffers()
    first = buffers.take((1,), torch.float32, CPU)
    buffers.give_back(first)
    for size in range(2, 40):
        buffers.give_back(buffers.take((size,), torch.float32, CPU))
    made = buffers.num_made
    buffers.take((39,), torch.float32, CPU)
    assert buffers.num_made == made
    assert buffers.take((1,), torch.float32, CPU) is not first


def test_what_is_lost_on_the_way_is_forgotten() -> None:
    buffers = MessageBuffers()
    buffers.take((2,), torch.float32, CPU)
    assert buffers.num_in_use == 0


def test_a_buffer_made_in_inference_mode_is_of_use_outside() -> None:
    buffers = MessageBuffers()
    with torch.inference_mode():
        buffers.give_back(buffers.take((2,), torch.float32, CPU))
    buffers.take((2,), torch.float32, CPU).fill_(1.0)
    assert buffers.num_made == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_another_stream_has_buffers_of_its_own() -> None:
    buffers, device = MessageBuffers(), torch.device("cuda", 0)
    first = buffers.take((2,), torch.float32, device)
    buffers.give_back(first)
    with torch.cuda.stream(torch.cuda.Stream()):
        assert buffers.take((2,), torch.float32, device) is not first
    assert buffers.take((2,), torch.float32, device) is first


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_recording_a_stream_does_not_hold_back_memory_of_a_message() -> None:
    """The same size is given out again at once, although the other stream is still busy."""

    def is_given_again(*, is_recorded: bool) -> bool:
        other = torch.cuda.Stream()
        tensor = torch.empty(1 << 22, device="cuda")
        place = tensor.data_ptr()
        with torch.cuda.stream(other):
            torch.cuda._sleep(200_000_000)
        (tensor if is_recorded else unrecorded(tensor)).record_stream(other)
        del tensor
        again = torch.empty(1 << 22, device="cuda").data_ptr()
        torch.cuda.synchronize()
        return again == place

    assert is_given_again(is_recorded=False)
    assert not is_given_again(is_recorded=True)
