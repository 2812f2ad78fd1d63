"""InfiniBand fabrics and the NICs of a node."""

from __future__ import annotations

from hpjob.topology.read.recognise import read_text
from tests.topology import fixtures


def test_rail_optimised_fabric() -> None:
    reading = read_text(fixtures.ib_fabric())
    assert reading.kind == "ibnetdiscover"
    found = reading.facts
    assert (found["switches"], found["leaves"], found["spines"], found["tiers"]) == (10, 8, 2, [8, 2])
    assert found["cables"] == 2 * 3 * 4 + 8 + 8 * 2
    assert found["switch_to_switch"] == 16
    assert found["aggregation_nodes"] == 8
    assert found["compute_hosts_per_unit"] == {"su01": 3, "su02": 3}
    assert found["rail_of_device"] == {f"mlx5_{k}": k + 1 for k in range(4)}
    assert found["swapped_cables"] == {}
    assert len(found["leaf_groups"]) == 1
    assert reading.topology is not None
    nic = (reading.topology.nodes[0].nics or ())[2]
    assert (nic.name, nic.leaf, nic.rail, nic.rail_from) == ("mlx5_2", "leaf-r03-su01", 3, "switch port")


def test_swapped_cables_and_a_missing_leaf() -> None:
    swapped = read_text(fixtures.ib_fabric(swap=True)).facts
    assert swapped["swapped_cables"] == {"node000": ["mlx5_0", "mlx5_1"]}
    text = fixtures.ib_fabric()
    assert read_text(text.replace("leaf-r02-su02", "other")).facts["leaves_missing"] == ["leaf-r02-su02"]


def test_a_cable_counts_once_from_one_end_too() -> None:
    text = fixtures.ib_fabric(units=1, rails=1, hosts=2, spines=0)
    whole = read_text(text).facts
    assert whole["cables"] == 3
    assert read_text(text.split("Ca\t1", 1)[0]).facts["cables"] == 3


def test_lines_in_the_wrong_record_are_left_out() -> None:
    lines = fixtures.ib_fabric(units=1, rails=1, hosts=3, spines=0).split("\n")
    first, second = [n for n, line in enumerate(lines) if line.startswith("[1](")][:2]
    lines[first], lines[second] = lines[second], lines[first]
    reading = read_text("\n".join(lines))
    assert reading.facts["cables"] == 2
    assert reading.facts["multi_port_hcas"] == {}
    assert any("contradict" in note for note in reading.notes)


def test_port_list_with_padded_and_bare_names() -> None:
    text = (
        "CA    78  1 0x00ab000000000001 4x HDR - SW    51 81 0x00ab000000000002 ( 'host1 mlx5_0' - 'leaf 1 ' )\n"
        "SW    24 1 0x00ab000000000003 4x SDR                                    'leaf 2'\n"
        "SW    25 2 0x00ab000000000004 4x ???                                    bare name\n"
        "SW    51 80 0x00ab000000000002 4x HDR - SW    60  3 0x00ab000000000005 ( 'leaf 1 ' - 'spine' )\n"
    )
    reading = read_text(text)
    assert reading.kind == "ibnetdiscover_p"
    assert reading.facts["hosts"] == {"host1": {"mlx5_0": "leaf 1"}}
    assert reading.facts["switch_links"] == [["leaf 1", "spine"]]
    assert reading.facts["unconnected"] == [["leaf 2", 1], ["bare name", 2]]
    assert reading.facts["names_need_strip"] is True


def test_simulator_input_is_told_from_a_listing() -> None:
    text = 'Switch\t4 "A"\n[1]\t"h1"[1]\n[2]\t"B"[2]\n\nSwitch 4 "B"\n[2]\t"A"[2]\n\nHca 2 "h1"\n[1]\t"A"[1]\n'
    reading = read_text(text)
    assert reading.kind == "ibsim_net"
    assert (reading.facts["cables"], reading.facts["switch_to_switch"]) == (2, 1)
    assert reading.facts["hcas_by_switch"] == {"A": ["h1"], "B": []}


def test_ibstat_ports_cut_values_and_panic() -> None:
    text = (
        "CA 'mlx5_0'\n\tSystem image GUID: 0x1\n\tPort 1:\n\t\tState: Active\n"
        "\t\tPhysical state: LinkUp\n\t\tRate: 400\n"
        "\t\tLink layer: InfiniBand\nCA 'mlx5_1'\n\tSystem image GUID: 0x1\n\tPort 1:\n\t\tState: Do"
    )
    found = read_text(text).facts
    assert found["cas"]["mlx5_1"]["state"] is None
    assert found["active"] == ["mlx5_0"]
    assert found["same_card"] == [["mlx5_0", "mlx5_1"]]
    dead = read_text(text + "wn\nibpanic: [1] main: stat of IB device 'mlx5_2' failed: No such file\n").facts
    assert dead["failed_device"] == "mlx5_2"
    assert dead["cas"]["mlx5_1"]["state"] == "Down"


def test_interfaces_are_sorted_by_number_and_bonds_apart() -> None:
    text = (
        "mlx5_10 port 1 ==> ib10 (Up)\n0000:1a:00.0 mlx5_2 (MT4129) fw 28 port 1 (ACTIVE) ==> ib2 (Down)\n"
        "mlx5_3 port 1 ==> eth3 (Up)\nmlx5_bond_0 port 1 ==> bond0 (Up)\n"
    )
    found = read_text(text).facts
    assert found["infiniband"] == ["mlx5_2", "mlx5_10"]
    assert found["ethernet"] == ["mlx5_3"]
    assert found["bonds"] == {"bond0": ["mlx5_bond_0"]}
    assert found["rail_order"] is None


def test_sysfs_and_vendor_table() -> None:
    sysfs = read_text(
        "/sys/class/infiniband/mlx5_0/ports/1/rate:400 Gb/sec (4X NDR)\nmlx5_0/ports/1/state: 4: ACTIVE\n"
    )
    assert sysfs.facts["rate_gbit"] == {"mlx5_0": 400}
    assert sysfs.facts["all_active"] is True
    table = read_text(
        "pfs:\n- rdmaDevice: mlx5_1\n  pciAddress: 0000:1a:00.0\n  rail: 1\n  connectedGPU: GPU1\n"
        "- rdmaDevice: mlx5_0\n  pciAddress: 0000:0a:00.0\n  rail: 0\n  connectedGPU: GPU0\n"
        "- pciAddress: 0000:0b:00.0\n  traffic: north-south\n  connectedGPU: GPU0\n"
    )
    assert table.facts["rail_nic_of_gpu"] == ["mlx5_0", "mlx5_1"]
    assert table.facts["not_rail"] == ["0000:0b:00.0"]


def test_moved_lines_of_switches_show_no_cable_that_one_end_alone_shows() -> None:
    """A port line of a switch does not say whose it is; attributes at wrong places tell that lines were moved."""
    whole = fixtures.ib_fabric(units=1, rails=2, hosts=2, spines=1).split("vendid=0x2c9\nCa", 1)[0]
    lines = whole.split("\n")
    switches = [at for at, line in enumerate(lines) if line.startswith("Switch")]
    lines[switches[0]], lines[switches[1]] = lines[switches[1]], lines[switches[0]]
    assert read_text("\n".join(lines)).facts["hcas_of_switch"] == {}
    assert len(read_text(whole).facts["hcas_of_switch"]) == 2


def test_one_lost_record_line_leaves_the_others() -> None:
    lines = fixtures.ib_fabric(units=1, rails=2, hosts=2, spines=1).split("\n")
    lost = next(at for at, line in enumerate(lines) if line.startswith("Switch"))
    facts = read_text("\n".join(lines[:lost] + lines[lost + 1 :])).facts
    assert facts["switches"] == 2
    assert sum(facts["hcas_of_switch"].values()) == 4


def test_ports_behind_a_record_line_that_another_was_glued_to_are_nobodys() -> None:
    lines = fixtures.ib_fabric(units=1, rails=2, hosts=2, spines=1).split("vendid=0x2c9\nCa", 1)[0].split("\n")
    first = next(at for at, line in enumerate(lines) if line.startswith("Switch"))
    lines[first] += '"[1]\t\t# "spine-01" lid 9 4xNDR'
    assert read_text("\n".join(lines)).facts["hcas_of_switch"].keys() == {"S-0000ab0000000001"}
