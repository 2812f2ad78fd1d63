"""Which reader a text is for, judged by its content alone."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from hpjob.core.errors import UserInputError
from hpjob.core.schema import nearest
from hpjob.topology.read import (
    cloud_aws,
    cloud_azure,
    cloud_gcp,
    cloud_oci,
    ibdev2netdev,
    ibnetdiscover,
    ibnetdiscover_ports,
    ibsim,
    ibstat,
    nccl_graph,
    nccl_xml,
    nic_table,
    nvidia_smi_fabric,
    nvidia_smi_list,
    nvidia_smi_nvlink,
    nvidia_smi_p2p,
    nvidia_smi_topo,
    other_vendor,
    rocm_smi,
    slurm_nodes,
    slurm_topology,
    sysfs_infiniband,
)
from hpjob.topology.read.reading import Reader, Reading
from hpjob.topology.read.text import Source, decode

READERS: tuple[Reader, ...] = tuple(
    module.READER
    for module in (
        nvidia_smi_topo,
        nvidia_smi_p2p,
        nvidia_smi_list,
        nvidia_smi_nvlink,
        nvidia_smi_fabric,
        rocm_smi,
        other_vendor,
        nccl_xml,
        nccl_graph,
        slurm_topology,
        slurm_nodes,
        ibnetdiscover,
        ibnetdiscover_ports,
        ibsim,
        ibstat,
        ibdev2netdev,
        sysfs_infiniband,
        nic_table,
        cloud_aws,
        cloud_gcp,
        cloud_oci,
        cloud_azure,
    )
)
KINDS: tuple[str, ...] = tuple(dict.fromkeys(reader.kind for reader in READERS))
SURE_ENOUGH = 0.3
MAX_BYTES = 64 * 1024 * 1024


def scores(source: Source, kind: str | None = None) -> list[tuple[float, Reader]]:
    """Confidence of every reader (of one kind), the surest first; equal ones in the order of :data:`READERS`."""
    found = [(reader.confidence(source), reader) for reader in READERS if kind in (None, reader.kind)]
    return sorted(found, key=lambda pair: -pair[0])


def read_text(text: str, *, kind: str | None = None, name: str = "text") -> Reading:
    """Read a text with the reader that its content asks for.

    Args:
        text: What a tool printed or a person pasted.
        kind: Skip the recognition and read the text as this kind.
        name: What messages call the text.

    Raises:
        UserInputError: No reader knows the text, or ``kind`` is unknown.
    """
    if kind is not None and kind not in KINDS:
        guess = nearest(kind, KINDS)
        hint = f"did you mean `{guess}`? " if guess else ""
        raise UserInputError(f"unknown kind {kind!r}", hint=f"{hint}known kinds are {', '.join(KINDS)}")
    with _collector_paused():
        source = Source(text)
        best, reader = scores(source, kind)[0]
        if kind is None and best < SURE_ENOUGH:
            raise UserInputError(
                f"{name}: no reader recognises this text",
                hint=f"name it with --kind; known kinds are {', '.join(KINDS)}",
            )
        return reader.read(source)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Hold the cyclic collector: over the small records of a large fabric it takes a third of the time for nothing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def read_bytes(data: bytes, *, kind: str | None = None, name: str = "file") -> Reading:
    """Read bytes of any encoding; see :func:`read_text`.

    Raises:
        UserInputError: The data is too large for any topology, or see :func:`read_text`.
    """
    if len(data) > MAX_BYTES:
        raise UserInputError(
            f"{name}: {len(data) >> 20} MiB is more than any topology has", hint="cut it to the listing"
        )
    return read_text(decode(data), kind=kind, name=name)
