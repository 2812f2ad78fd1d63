"""Site files: measured constants replace packaged ones, and the plan says so."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from hpjob.cli.app import app
from hpjob.core.errors import UserInputError
from hpjob.plan.hardware import hardware_of
from hpjob.plan.model import Plan
from hpjob.plan.planner import make_plan
from hpjob.plan.site import default_site, load_site, with_site
from hpjob.recipe.load import load_recipe
from hpjob.topology.load import load_machine, machine_topology

_TEXT = """
version: 1
basis: measured
note: microbenchmarks
gpus:
  H100: {gemm: 0.35, memory: 0.9, attention: [0.5, 0.4]}
links: {island_gb_s: 340, network_gb_s: 330}
"""


def _file(folder: Path, text: str = _TEXT) -> str:
    path = folder / "site.yaml"
    path.write_text(text)
    return str(path)


def _plan(site: str | None = None, machine: str = "hgx-h100") -> Plan:
    fixed = [f"parallel.{name}=1" for name in ("tp_size", "pp_size", "sp_size", "microbatch_size", "zero_stage")]
    return make_plan(load_recipe("7b", fixed), machine_topology(load_machine(machine), 1), site=site)


def test_measured_constants_are_taken_as_they_are(tmp_path: Path) -> None:
    packaged = hardware_of(load_machine("hgx-h100"))
    found, words = with_site(packaged, load_site(_file(tmp_path)), "H100-SXM5-80GB")
    assert found.gemm_efficiency == 0.35
    assert found.link(8, 1).bandwidth == 340e9
    assert found.link(16, 1).bandwidth == pytest.approx(330e9)
    assert found.gpu.num_sms == packaged.gpu.num_sms
    assert words[0] == "gemm 0.35"
    assert packaged.gemm_efficiency > 0.6, "the packaged constants stay"


def test_plan_says_where_its_constants_come_from_and_is_slower_with_slower_products(tmp_path: Path) -> None:
    plain, measured = _plan(), _plan(_file(tmp_path))
    assert (plain.basis, measured.basis) == ("estimated", "measured")
    assert "gemm 0.35" in measured.basis_note
    assert "(microbenchmarks)" in measured.basis_note
    assert measured.time.step_s > 1.4 * plain.time.step_s
    only_links = "gpus: {H100: {gemm: 0.35}}\n"
    other = _plan(_file(tmp_path, only_links), machine="dgx-a100-80g")
    assert other.basis == "estimated"
    assert any("says nothing of" in warning for warning in other.warnings)


def test_a_measured_layer_replaces_the_model_of_that_layer(tmp_path: Path) -> None:
    plain = _plan()
    tokens = plain.seq_length
    layer = f"{{hidden: 4096, ffn: 11008, tokens: {tokens}, seq: {tokens}, forward_s: 0.05, backward_s: 0.1}}"
    measured = _plan(_file(tmp_path, f"basis: rehearsed\nlayers: [{layer}]\n"))
    assert measured.basis == "rehearsed"
    layers = 32 * 0.15 * measured.pipeline.num_microbatches
    assert measured.time.compute_s == pytest.approx(layers, rel=0.1)


def test_files_that_are_wrong_name_every_problem(tmp_path: Path) -> None:
    with pytest.raises(UserInputError) as caught:
        load_site(_file(tmp_path, "gpus: {H100: {gem: 0.5}}\nlinks: {island_gb_s: -1}\n"))
    assert "gem" in caught.value.message
    assert "island_gb_s" in caught.value.message
    assert "did you mean `gemm`?" in caught.value.hint
    with pytest.raises(UserInputError, match="cannot be read"):
        load_site(tmp_path / "none.yaml")


def test_the_environment_names_the_default_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = default_site({"HPJOB_SITE": _file(tmp_path)})
    assert found is not None
    assert found[0].links.network_gb_s == 330
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
    assert default_site({}) is None


def test_command_takes_the_file(tmp_path: Path) -> None:
    arguments = ["plan", "--recipe", "7b", "--nodes", "1", "--machine", "hgx-h100", "--site", _file(tmp_path)]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    assert "measured        gemm 0.35" in shown.stdout
