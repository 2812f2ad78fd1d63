"""Damaged texts end in a result or a clear error, and never show a link that the whole text does not."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpjob.core.errors import UserInputError
from hpjob.topology.read.recognise import read_bytes, read_text
from tests.topology import fixtures

TEXTS = {
    "board": fixtures.hgx(),
    "mesh": fixtures.cube_mesh(),
    "pairs": fixtures.matrix(4, {(0, 2): "NV4", (1, 3): "NV4"}, default="PHB"),
    "fabric": fixtures.ib_fabric(units=1, hosts=2),
    "nccl switch": fixtures.nccl_xml(),
    "nccl direct": fixtures.nccl_xml(switch=False),
    "slurm": fixtures.slurm_tree(),
}


@pytest.fixture(scope="module")
def mutate() -> Iterator[ModuleType]:
    """The script that mutates samples."""
    path = Path(__file__).resolve().parents[2] / "scripts" / "mutate_topology.py"
    spec = importlib.util.spec_from_file_location("mutate_topology", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = before


@pytest.mark.parametrize("name", TEXTS)
def test_mutants(mutate: ModuleType, name: str) -> None:
    rng = random.Random(name)
    whole = TEXTS[name].encode()
    before = read_bytes(whole)
    for _ in range(120):
        mutant = whole
        for _ in range(rng.choice((1, 2))):
            mutation = rng.choice([m for m in mutate.MUTATIONS if name != "fabric" or m is not mutate.reorder_lines])
            mutant = mutation(mutant, rng)
        wrong = mutate.check(whole, mutant, before)
        assert wrong is None or wrong.startswith("took"), (mutation.__name__, wrong)


def test_the_check_finds_an_invented_link(mutate: ModuleType) -> None:
    whole = fixtures.matrix(4, {(0, 1): "NV4"})
    mutant = fixtures.matrix(4, {(0, 1): "NV4", (2, 3): "NV4"})
    assert "invented" in str(mutate.check(whole.encode(), mutant.encode(), read_text(whole)))


links = st.dictionaries(
    st.tuples(st.integers(0, 5), st.integers(0, 5)).filter(lambda pair: pair[0] < pair[1]),
    st.sampled_from(["NV1", "NV2", "NV4", "NV12", "NV18"]),
    max_size=15,
)


@given(links, st.sampled_from(["PIX", "PHB", "NODE", "SYS"]), st.booleans())
@settings(max_examples=60, deadline=None)
def test_any_matrix_reads_back(cells: dict[tuple[int, int], str], default: str, expand: bool) -> None:
    text = fixtures.matrix(6, cells, default=default)
    reading = read_text(text.expandtabs(8) if expand else text)
    assert reading.topology is not None
    found = {(link.a, link.b): link.count for link in reading.topology.nodes[0].links or () if link.linked}
    assert found == {pair: int(word[2:]) for pair, word in cells.items()}


@given(links, st.integers(0, 400))
@settings(max_examples=60, deadline=None)
def test_a_cut_matrix_shows_no_more_links(cells: dict[tuple[int, int], str], keep: int) -> None:
    text = fixtures.matrix(6, cells)
    try:
        reading = read_text(text[:keep])
    except UserInputError:
        return
    nodes = reading.topology.nodes if reading.topology else ()
    found = {(link.a, link.b) for node in nodes for link in node.links or () if link.linked}
    assert found <= set(cells)


@given(st.binary(max_size=2000))
@settings(max_examples=100, deadline=None)
def test_any_bytes_end_in_a_reading_or_a_clear_error(data: bytes) -> None:
    try:
        read_bytes(data)
    except UserInputError as error:
        assert error.message
        assert error.hint


@pytest.mark.parametrize(
    "kind", ["nvsmi_topo", "nccl_xml", "slurm", "ibnetdiscover", "cloud", "rocm", "fabric", "nic_preset"]
)
@pytest.mark.parametrize("text", ["", "\n", "GPU0", "<pci", "SwitchName=", '{"a": [', "\ufffd" * 50])
def test_a_named_kind_reads_anything(kind: str, text: str) -> None:
    assert read_text(text, kind=kind).kind == kind


def test_binary_noise_around_a_listing_is_passed_over() -> None:
    noise = random.Random(1).randbytes(1_200_000)
    reading = read_bytes(noise + b"\n" + fixtures.hgx().encode() + b"\n" + noise)
    assert (reading.kind, reading.facts["gpus"], reading.facts["all_to_all"]) == ("nvsmi_topo", 8, True)
