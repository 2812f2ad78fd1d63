"""The command line of scripts/parity.py."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts/parity.py"
SMALL = "num_hidden_layers=1 hidden_size=32 intermediate_size=48 vocab_size=96 seq_length=16 precision=fp32"


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("parity_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.distributed
def test_prints_a_line_a_case_and_fails_unless_all_are_ok(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid = tmp_path / "grid.yaml"
    grid.write_text(f"- {SMALL} dp_size=1\n- {{tp_size: 3, precision: fp32}}\n")
    arguments = ["--steps", "2", "--world", "2", "--case", f"{SMALL} tp_size=2", "--grid", str(grid)]
    code = script().main(arguments)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert code == 1
    assert [line["ok"] for line in lines] == [True, True, False]
    assert [line["world"] for line in lines] == [2, 1, 2]
    figures = {"loss_rel", "tail_loss_rel", "grad_rel", "weight_rel"}
    assert set(lines[0]) == {"case", "world", "steps", "ok"} | figures
    assert "does not divide the world of 2" in lines[2]["reason"]


@pytest.mark.distributed
def test_exit_code_and_self_test(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--steps", "1", "--world", "2", "--case", f"{SMALL} tp_size=2"]
    assert script().main(arguments) == 0
    assert script().main([*arguments, "--break", "drop-tp-allreduce"]) == 1
    sound, broken = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert sound["ok"] is True
    assert broken["ok"] is False
    assert broken["grad_rel"] > 1e-2


def test_needs_a_case(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        script().main([])
    assert caught.value.code == 2
    assert "give --case or --grid" in capsys.readouterr().err
