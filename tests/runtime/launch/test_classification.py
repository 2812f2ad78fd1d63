"""Errors that only say that a peer went away are told from a rank's own."""

from __future__ import annotations

import pytest

from hpjob.runtime.failures import PeerLostError, classify

PEER_LOST = [
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:31337",
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Read error [10.0.0.2]:4: Connection reset by peer",
    "[../gloo/transport/tcp/buffer.cc:72] Timed out waiting 600000ms for send operation to complete",
    "Application timeout caused pair closure",
    "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?",
    "The client socket has timed out after 2000ms while trying to connect to (127.0.0.1, 1).",
    "NCCL communicator was aborted on rank 1.",
    "NCCL error in: …, remote process exited or there was a network error, NCCL version 2.28.9 ncclRemoteError",
]


@pytest.mark.parametrize("text", PEER_LOST)
def test_texts_of_the_transports(text: str) -> None:
    assert classify(RuntimeError(text)) == "peer-lost"


def test_error_that_a_lost_peer_caused() -> None:
    error = ValueError("stage 1 could not receive")
    error.__cause__ = RuntimeError(PEER_LOST[0])
    assert classify(error) == "peer-lost"
    assert classify(PeerLostError("rank 0 did not come", hint="look")) == "peer-lost"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA out of memory"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        ConnectionResetError("Connection reset by peer"),
        KeyError("Connection closed by peer"),
    ],
)
def test_errors_of_the_rank_itself(error: BaseException) -> None:
    assert classify(error) == "exception"
