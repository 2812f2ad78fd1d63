"""``hpjob topology`` and its pictures."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from hpjob.cli.app import app
from hpjob.core.errors import UserInputError
from hpjob.report.topology_svg import topology_svg
from hpjob.report.topology_text import topology_tree
from hpjob.topology.load import dump_topology, load_machine, load_topology, machine_topology
from hpjob.topology.read.recognise import read_text
from tests.topology import fixtures

runner = CliRunner()


def test_read_prints_one_document(tmp_path: Path) -> None:
    path = tmp_path / "unhelpful.name"
    path.write_text(fixtures.hgx())
    result = runner.invoke(app, ["topology", "read", str(path), "--json"])
    document = json.loads(result.stdout)
    assert (document["version"], document["kind"]) == (1, "nvsmi_topo")
    assert document["facts"]["gpus"] == 8
    assert document["topology"]["nodes"][0]["islands"][0]["all_to_all"] is True


def test_read_joins_several_files_and_says_what_disagrees(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(fixtures.matrix(2, {(0, 1): "NV4"}))
    (tmp_path / "b").write_text(fixtures.matrix(2, {}, default="PHB"))
    result = runner.invoke(app, ["topology", "read", str(tmp_path / "a"), str(tmp_path / "b")])
    assert result.exit_code == 0
    assert "islands [[0, 1]]" in result.output


def test_standard_input_and_unknown_text() -> None:
    assert (
        json.loads(runner.invoke(app, ["topology", "read", "-", "--json"], input=fixtures.slurm_tree()).stdout)["kind"]
        == "slurm"
    )
    result = runner.invoke(app, ["topology", "read", "-"], input="nothing of the kind\n")
    assert isinstance(result.exception, UserInputError)
    wrong = runner.invoke(app, ["topology", "read", "-", "--kind", "nvsmi_tpo"], input="x")
    assert isinstance(wrong.exception, UserInputError)
    assert "nvsmi_topo" in wrong.exception.hint


def test_list_and_show() -> None:
    listed = json.loads(runner.invoke(app, ["topology", "list", "--json"]).stdout)
    names = [machine["name"] for machine in listed["machines"]]
    assert "hgx-h100" in names
    assert "gpu_memory_gib" in runner.invoke(app, ["topology", "show", "hgx-h100"]).stdout


def test_yaml_round_trip_and_tree(tmp_path: Path) -> None:
    topology = read_text(fixtures.ib_fabric(units=1)).topology
    assert topology is not None
    path = tmp_path / "t.yaml"
    path.write_text(dump_topology(topology))
    assert load_topology(str(path)) == topology
    tree = topology_tree(topology)
    assert "leaf leaf-r01-su01" in tree
    assert "node[000-002] (3 nodes)" in tree
    assert "rail 1 (switch port)" in tree


@pytest.mark.parametrize("text", [fixtures.hgx(), fixtures.cube_mesh(), fixtures.slurm_tree(), fixtures.ib_fabric()])
def test_svg_is_well_formed_and_shows_every_gpu(text: str) -> None:
    topology = read_text(text).topology
    assert topology is not None
    root = ElementTree.fromstring(topology_svg(topology))
    labels = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    for node in topology.nodes:
        assert node.name in labels
        assert all(str(gpu.index) in labels for gpu in node.gpus)


def test_placement_is_coloured_by_group(tmp_path: Path) -> None:
    plan, topology, picture = tmp_path / "plan.json", tmp_path / "topology.yaml", tmp_path / "p.svg"
    machine = load_machine("hgx-h100")
    nodes = machine_topology(machine, 2)
    topology.write_text(dump_topology(nodes))
    command = ["plan", "--recipe", "7b", "--topology", str(topology), "--json"]
    fixed = ["--set", "parallel.pp_size=2", "--set", "parallel.tp_size=4"]
    plan.write_text(runner.invoke(app, [*command, *fixed]).stdout)
    colours = {}
    for axis in ("pp", "tp"):
        options = ["--svg", str(picture), "--plan", str(plan), "--color-by", axis]
        result = runner.invoke(app, ["topology", "show", str(topology), *options])
        assert result.exit_code == 0, result.output
        boxes = ElementTree.fromstring(picture.read_text()).iter("{http://www.w3.org/2000/svg}rect")
        colours[axis] = {box.get("fill") for box in boxes if "hsl" in str(box.get("fill"))}
    assert (len(colours["pp"]), len(colours["tp"])) == (2, 4)


def test_a_gpu_with_dead_links_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t"
    alive = {pair: word for pair, word in fixtures.all_linked(8, "NV18").items() if 3 not in pair}
    path.write_text(fixtures.matrix(8, alive, default="NODE"))
    output = runner.invoke(app, ["topology", "read", str(path)]).output
    assert "GPU 3 shows no NVLink, the others do" in output
    assert "GPU 3 has no link to the others" in output
    path.write_text("\n".join(path.read_text().split("\n")[:3]))  # the pairs of GPU 3 with 4 to 7 are cut away
    assert "GPU 3 has no link" not in runner.invoke(app, ["topology", "read", str(path)]).output


def test_a_picture_of_nothing_is_refused(tmp_path: Path) -> None:
    graph = '<graphs version="1"><graph id="0" pattern="4"><channel><gpu dev="0"/></channel></graph></graphs>'
    result = runner.invoke(app, ["topology", "read", "-", "--svg", str(tmp_path / "x.svg")], input=graph)
    assert isinstance(result.exception, UserInputError)
    assert not (tmp_path / "x.svg").exists()


def test_a_drained_node_stands_apart_in_the_tree() -> None:
    text = "NODELIST NODES PARTITION STATE\nn[1-3] 3 gpu idle\nn4 1 gpu drained*\n"
    topology = read_text(text).topology
    assert topology is not None
    assert topology_tree(topology).split("\n")[1:] == ["n[1-3] (3 nodes): idle", "n4: drained*"]
