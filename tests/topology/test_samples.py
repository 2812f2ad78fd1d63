"""The score on recorded samples, where a folder of them is given."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "score_topology.py"


def score(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), *options], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("options", [(), ("--random-names",)])
def test_every_common_sample_is_right(test_data: Path, options: tuple[str, ...]) -> None:
    done = score(test_data / "topology_samples", *options)
    assert done.returncode == 0, done.stdout


def test_a_wrong_answer_is_named_and_fails(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("        GPU0    GPU1\nGPU0     X      NV4\nGPU1    NV4      X\n")
    answer = '{""gpus"": 3, ""all_to_all"": true}'
    (tmp_path / "samples.csv").write_text(f'file,kind,source,what_is_right\none,nvsmi_topo,here,"{answer}"\n')
    done = score(tmp_path)
    assert done.returncode == 1
    assert "one: gpus: found 2, expected 3" in done.stdout
    assert "0 of 1 samples right" in done.stdout
