"""The wheel, installed outside the checkout and without torch, plans and renders job scripts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
DATA_KINDS = ("templates", "topology", "recipes")

# One installation serves all tests of this file; building it takes most of the time.
pytestmark = [pytest.mark.xdist_group("wheel"), pytest.mark.timeout(1200)]


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command that must not see the checkout; returns its standard output."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=1100, check=False
    )
    assert done.returncode == 0, f"{command} exited {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel built from the source distribution, as an index would get it."""
    dist = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", dist, CHECKOUT, cwd=dist)
    assert len(list(dist.glob("*.tar.gz"))) == 1
    return next(dist.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the programs of a fresh environment that holds the wheel and its base dependencies."""
    home = tmp_path_factory.mktemp("outside")
    run(sys.executable, "-m", "venv", home / "venv", cwd=home)
    programs = home / "venv" / "bin"
    run(programs / "python", "-m", "pip", "install", "--quiet", "--no-input", wheel, cwd=home)
    return programs


def test_wheel_holds_every_data_file_and_no_stray_package(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for kind in DATA_KINDS:
        expected = {p.relative_to(CHECKOUT / kind) for p in (CHECKOUT / kind).rglob("*") if p.is_file()}
        prefix = f"hpjob/_data/{kind}/"
        assert expected
        assert {Path(name[len(prefix) :]) for name in names if name.startswith(prefix)} == expected
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == {"hpjob"}


def test_it_runs_outside_the_checkout_without_torch(installed: Path, tmp_path: Path) -> None:
    where = "import hpjob, importlib.util as u; print(hpjob.__file__, u.find_spec('torch'), u.find_spec('templates'))"
    path, torch, templates = run(installed / "python", "-c", where, cwd=tmp_path).split()
    assert Path(path).is_relative_to(installed.parent)
    assert (torch, templates) == ("None", "None")
    assert run(installed / "hpjob", "--version", cwd=tmp_path).startswith("hpjob ")


def test_dry_run_of_a_published_layout(installed: Path, tmp_path: Path) -> None:
    script = run(
        *(installed / "hpjob", "submit", "--nodes", "4", "--recipe", "70b", "--machine", "dgx-a100-80g", "--dry-run"),
        cwd=tmp_path,
    )
    lines = script.splitlines()
    assert lines[0] == "#!/bin/bash"
    for expected in ("--nodes=4", "--ntasks-per-node=8", "--gpus-per-node=8", "--requeue", "--open-mode=append"):
        assert f"#SBATCH {expected}" in lines
    assert f"python={installed / 'python'}" in lines
    assert '  "$python" -m hpjob.runtime --run-dir "$run_dir" --attempt-dir "$attempt_dir" \\' in lines
    subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=30)
    assert list(tmp_path.iterdir()) == []


def test_plan_finds_recipes_and_machines(installed: Path, tmp_path: Path) -> None:
    out = run(
        *(installed / "hpjob", "plan", "--recipe", "70b-a100-published", "--nodes", "4"),
        *("--machine", "dgx-a100-80g", "--json"),
        cwd=tmp_path,
    )
    plan = json.loads(out)
    assert plan["degrees"] == {"pp": 4, "dp": 2, "sp": 1, "tp": 4, "ep": 1}
    assert len(plan["placement"]) == 32
