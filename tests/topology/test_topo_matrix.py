"""``nvidia-smi topo -m`` of every generation and with the damage that pastes have."""

from __future__ import annotations

import pytest

from hpjob.topology.read.reading import Facts
from hpjob.topology.read.recognise import read_text
from tests.topology import fixtures


def facts(text: str) -> Facts:
    reading = read_text(text)
    assert reading.kind == "nvsmi_topo"
    return reading.facts


def test_board_behind_nvswitch() -> None:
    found = facts(fixtures.hgx())
    assert found["nvlink_islands"] == [list(range(8))]
    assert found["all_to_all"] is True
    assert found["nvlinks_per_pair"] == [18]
    assert found["nic_names"] == [f"mlx5_{k + 2}" for k in range(8)]
    assert found["near_nics"]["5"] == {"level": "PIX", "nics": ["mlx5_7"]}
    assert found["numa_of_gpu"] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert found["cpus"] == {"0-31,64-95": [0, 1, 2, 3], "32-63,96-127": [4, 5, 6, 7]}
    assert "unknown_pairs" not in found


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text.expandtabs(8),
        lambda text: text.replace("\t", " "),
        lambda text: "\x1b[4m" + text.replace("\n", "\x1b[0m\n", 1),
        lambda text: "[4m" + text.replace("\n", "[0m\n", 1),
        lambda text: text.replace("\n", "\r\n"),
        lambda text: text.lstrip(),
        lambda text: "user@host:~$ nvidia-smi topo -m\n" + text + "\nulimit soft: 1024\n",
        lambda text: text.replace("NIC6\tNIC7", "NIC6NIC7"),
        lambda text: text.replace("NODE\tNODE", "NODENODE", 3),
        lambda text: text.replace("\nGPU3", "\nGPU2\tX\nGPU3"),
        lambda text: text + text.replace("NV18", "SYS"),
        lambda text: "".join(f"> {line}\n" for line in text.splitlines()),
    ],
)
def test_tolerated_damage_changes_no_link(damage: object) -> None:
    found = facts(damage(fixtures.hgx()))  # type: ignore[operator]
    whole = facts(fixtures.hgx())
    for name in ("gpus", "nvlink_islands", "all_to_all", "nics", "nic_names", "near_nics", "nvlinks_per_pair"):
        assert found[name] == whole[name], name


def test_cut_rows_are_unknown_and_not_unlinked() -> None:
    text = fixtures.matrix(4, fixtures.all_linked(4, "NV12"))
    found = facts(text[: text.index("GPU2\tNV12")])
    assert found["gpus"] == 4
    assert found["nvlink_islands"] == [[0, 1, 2, 3]]
    assert found["unknown_pairs"] == [[2, 3]]
    assert found["all_to_all"] is None


def test_gpu_without_links_is_named_and_unseen_ones_are_not() -> None:
    text = fixtures.matrix(4, {(0, 1): "NV4"})
    assert facts(text)["gpus_without_nvlink"] == [2, 3]
    cut = facts(text[: text.index("GPU2\tSYS")])
    assert cut["gpus_without_nvlink"] == []
    assert cut["nvlink_unknown_for"] == [2, 3]


def test_pcie_only_command_says_nothing_about_nvlink() -> None:
    text = "$ nvidia-smi topo -mp\n" + fixtures.matrix(2, {}, default="NODE")
    reading = read_text(text)
    assert reading.facts["nvlink_islands"] is None
    assert reading.facts["all_to_all"] is None
    assert reading.topology is not None
    assert reading.topology.nodes[0].islands is None
    assert facts(fixtures.matrix(2, {}, default="NODE"))["nvlink_islands"] == []


def test_cube_mesh_is_connected_but_not_all_to_all() -> None:
    reading = read_text(fixtures.cube_mesh())
    assert reading.facts["all_to_all"] is False
    assert reading.facts["best_quads"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert reading.topology is not None
    island = (reading.topology.nodes[0].islands or ())[0]
    assert set(island.cliques) == {(0, 1, 2, 3), (4, 5, 6, 7)}


def test_bridged_pairs_need_not_be_neighbours() -> None:
    assert facts(fixtures.matrix(4, {(0, 3): "NV4", (1, 2): "NV4"}))["nvlink_islands"] == [[0, 3], [1, 2]]


def test_ends_that_disagree_are_not_called_linked() -> None:
    text = fixtures.matrix(2, {(0, 1): "NV4"}).replace("GPU1\tNV4", "GPU1\tSYS")
    reading = read_text(text)
    assert reading.facts["unknown_pairs"] == [[0, 1]]
    assert any("disagree" in note for note in reading.notes)


@pytest.mark.parametrize("expand", [False, True])
def test_empty_affinity_is_told_by_tabs(expand: bool) -> None:
    text = fixtures.matrix(2, {}, affinity=["\t0\t\tN/A", "1\t1\t\tN/A"], nics={"NIC0": ["PIX", "NODE"]})
    found = facts(text.expandtabs(8) if expand else text)
    assert found["cpus"] == {"1": [1]}
    assert found["numa_of_gpu"] == [0, 1]


def test_glued_cpu_list_is_split_where_one_split_fits() -> None:
    rows = ["0-31,64-950\t\tN/A", "32-63,96-127\t1\t\tN/A"]
    found = facts(fixtures.matrix(2, {}, affinity=rows))
    assert found["cpus"] == {"0-31,64-95": [0], "32-63,96-127": [1]}
    assert found["numa_of_gpu"] == [0, 1]


def test_numa_lists_and_memory_nodes() -> None:
    rows = ["0-71\t0,5-11\t\t4", "72-143\t1,13-19\t\t12"]
    found = facts(fixtures.matrix(2, {(0, 1): "NV6"}, affinity=rows))
    assert found["numa_of_gpu"] == ["0,5-11", "1,13-19"]
    assert found["gpu_numa_id"] == [4, 12]


def test_old_driver_words_and_device_columns() -> None:
    nics = {"mlx5_1": ["PHB", "SOC"], "mlx5_0": ["SOC", "SOC"]}
    found = facts(fixtures.matrix(2, {}, default="SOC", nics=nics, header="CPU Affinity", affinity=["0-7", "8-15"]))
    assert found["nic_names"] == ["mlx5_1", "mlx5_0"]
    assert found["near_nics"] == {"0": {"level": "PHB", "nics": ["mlx5_1"]}, "1": None}
    assert found["pcie_levels_seen"] == ["SOC"]
    assert found["numa_of_gpu"] is None


def test_missing_header_is_counted_by_position() -> None:
    text = fixtures.matrix(2, {(0, 1): "NV4"}, nics={"NIC0": ["PIX", "SYS"]})
    found = facts(text.split("\n", 1)[1])
    assert (found["gpus"], found["nics"]) == (2, 1)
    assert found["near_nics"] == {"0": {"level": "PIX", "nics": ["NIC0"]}, "1": None}


def test_shifted_row_is_not_believed() -> None:
    text = fixtures.matrix(4, {(0, 2): "NV4", (1, 3): "NV4"})
    shifted = text.replace("GPU0\t X \tSYS\tNV4\tSYS", "GPU0\tSYS\t X \tNV4\tSYS")
    reading = read_text(shifted)
    assert reading.facts["nvlink_islands"] == [[0, 2], [1, 3]]
    assert any("own column" in note for note in reading.notes)


def test_numa_off_is_suspected() -> None:
    reading = read_text(fixtures.matrix(4, fixtures.all_linked(4, "NV18"), affinity=["0-191\t0\t\tN/A"] * 4))
    assert any("numa=off" in note for note in reading.notes)


def test_rows_of_which_no_two_are_alike_tell_no_width() -> None:
    """Two rows that a paste ran together, and others cut short: NV cells far right are no further GPUs."""
    text = (
        "# nvidia-smi topo -m\n"
        "GPU0\t X\tNV18\tNV18\tNV18\tPXB\tPXB\tNODE\tNODE\tNV18\tNV18\n"
        "GPU3\tNV18\tNV18\tNV18\t X\tNODE\n"
        "GPU2\tNV18\n"
    )
    linked = _linked(text)
    assert (0, 1) in linked
    assert all(b <= 3 for _, b in linked)


def test_a_header_that_lost_a_gpu_places_nothing_behind_damage() -> None:
    text = "\tGPU0\tGPU1\tGPU\ufffd2\tGPU3\tGPU5\tCPU Affinity\nGPU0\t X\tNV1\tNV1\tNV\ufffd2\tNV2\n"
    assert (0, 5) not in _linked(text)


def _linked(text: str) -> set[tuple[int, int]]:
    topology = read_text(text, kind="nvsmi_topo").topology
    nodes = topology.nodes if topology else ()
    return {(link.a, link.b) for node in nodes for link in node.links or () if link.linked}


@pytest.mark.parametrize("width", [60, 77, 80, 100, 132])
def test_lines_that_a_terminal_broke_are_joined(width: int) -> None:
    whole = fixtures.hgx().expandtabs(8)
    pieces = [line[at : at + width] for line in whole.split("\n") for at in range(0, max(1, len(line)), width)]
    assert read_text("\n".join(pieces)).facts == read_text(whole).facts


def test_a_header_that_lost_a_gpu_in_between_places_nothing_behind_it() -> None:
    """A row that lost its last cell is then as wide as the header by chance, one column off."""
    lines = fixtures.matrix(5, {(0, 3): "NV4", (1, 4): "NV4"}, default="PHB").split("\n")
    lines[0] = lines[0].replace("\tGPU2", "")
    lines[1] = lines[1].rsplit("\t", 1)[0]
    topology = read_text("\n".join(lines)).topology
    assert topology is not None
    assert not any(link.linked for link in topology.nodes[0].links or () if (link.a, link.b) == (0, 4))
