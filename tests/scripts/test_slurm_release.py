"""Slurm of another Debian release: fetched once, run beside this machine's own, with blocks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.slurm_sandbox import SCRIPT, SlurmSandbox, wait_for, wait_until_nothing_runs


def fake_apt(folder: Path, body: str) -> dict[str, str]:
    """An environment whose apt-get is this script."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    (programs / "apt-get").write_text(f"#!/bin/bash\n{body}\n")
    (programs / "apt-get").chmod(0o755)
    return {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}


def install(cache: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT, "install", "--release", "sid", "--root-cache", cache]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)


def test_without_network_it_says_so_and_leaves_nothing_half_made(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    done = install(cache, fake_apt(tmp_path, "echo 'E: Could not resolve deb.debian.org'; exit 100"))
    assert done.returncode == 3
    assert "Slurm of Debian sid is not installed and cannot be fetched" in done.stderr
    assert "Could not resolve" in done.stderr and "hint: is the network there" in done.stderr
    assert [path.name for path in cache.iterdir()] == ["lock"]


def test_a_fetch_that_was_killed_is_not_taken_for_whole(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    begun = tmp_path / "begun"
    environment = fake_apt(tmp_path, f'[[ "$*" == *update* ]] && touch {begun} && exec sleep 600; exit 0')
    command = [sys.executable, SCRIPT, "install", "--release", "sid", "--root-cache", cache]
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, start_new_session=True) as fetching:
        wait_for(begun.exists, "apt-get runs")
        os.killpg(fetching.pid, 9)
    assert (cache / "slurm-sid.new").is_dir()
    done = install(cache, fake_apt(tmp_path, "exit 100"))
    assert done.returncode == 3 and "cannot be fetched" in done.stderr
    assert [path.name for path in cache.iterdir()] == ["lock"]


def test_a_system_without_apt_is_told_what_is_needed(tmp_path: Path) -> None:
    done = install(tmp_path / "cache", {**os.environ, "PATH": str(tmp_path)})
    assert done.returncode == 3
    assert "unpacking it needs apt-get, dpkg-deb, tar" in done.stderr
    assert "hint: install apt dpkg tar" in done.stderr


def test_a_name_that_is_no_release_is_refused() -> None:
    command = [sys.executable, SCRIPT, "down", "--release", "../etc"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 2
    assert "'../etc' is no code name of a Debian" in done.stderr


@pytest.mark.slurm
def test_two_releases_run_side_by_side(slurm_sandbox: SlurmSandbox, tmp_path: Path) -> None:
    """Each has its own version, programs and topology; jobs of both run this machine's Python."""
    newer = SlurmSandbox(slurm_sandbox.path.parent / "newer", "trixie")
    try:
        newer.start("--nodes", "6", "--leafs", "3", "--topology", "block")
        status = newer.status()
        assert status["state"] == "running"
        assert status["slurm_version"].startswith("24.11")
        assert [node["switch"] for node in status["nodes"]] == [f"block{i}" for i in (1, 1, 2, 2, 3, 3)]
        shell = newer.run(
            "bash",
            "-ec",
            newer.control("env").stdout + "sinfo --version; command -v sbatch",
            env={"PATH": os.environ["PATH"]},
        )
        assert shell.stdout.split()[:2] == ["slurm-wlm", status["slurm_version"]]
        assert shell.stdout.split()[2] == f"{status['programs']}/sbatch"
        for sandbox in (slurm_sandbox, newer):
            out = sandbox.run("srun", "--nodes=2", sys.executable, "-c", "import sys; print(sys.executable)").stdout
            assert out.split() == [sys.executable] * 2
        sizes = newer.run("scontrol", "show", "topology").stdout
        assert "BlockName=block3 BlockIndex=2 Nodes=n[5-6] BlockSize=2" in sizes
        assert "Nodes=n[1-4] BlockSize=4" in sizes and "Nodes=n[1-6] BlockSize=8" in sizes
        # All six nodes in segments of two: each pair comes from one block.
        ask = 'echo "$SLURM_PROCID $SLURM_TOPOLOGY_ADDR"'
        places = sorted(newer.run("srun", "--nodes=6", "--segment=2", "bash", "-c", ask).stdout.splitlines())
        assert [line.split()[1].split(".")[0] for line in places] == [f"block{i}" for i in (1, 1, 2, 2, 3, 3)]
    finally:
        newer.control("down")
    assert not newer.path.exists()
    wait_until_nothing_runs(newer.path)
    assert slurm_sandbox.status()["state"] == "running"


@pytest.mark.slurm
def test_blocks_need_a_slurm_that_has_them(new_sandbox: SlurmSandbox) -> None:
    done = new_sandbox.control("up", "--topology", "block", check=False)
    if done.returncode == 0:
        assert json.loads(new_sandbox.control("status", "--json").stdout)["options"]["topology"] == "block"
    else:
        assert done.returncode == 2
        assert "has no block topology" in done.stderr and "hint: add --release" in done.stderr
