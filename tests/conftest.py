"""What all tests share: a clean environment, the Slurm sandbox, recorded data."""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.slurm_sandbox import SlurmSandbox

SLURM_PREFIXES = ("SLURM", "SBATCH_", "SALLOC_", "SRUN_", "SQUEUE_", "SINFO_", "SCANCEL_")


NEW_RELEASE = "trixie"
"""Debian 13: Slurm 24.11."""

# A busy machine makes no property false.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slurm-release",
        metavar="NAME",
        help="run all tests on a real Slurm with that of this Debian, such as trixie, instead of this machine's own",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests on a real Slurm with the one asked for; those marked ``slurm_releases`` with an old and a new one."""
    if "slurm_release" not in metafunc.fixturenames:
        return
    asked = metafunc.config.getoption("--slurm-release")
    several = metafunc.definition.get_closest_marker("slurm_releases") is not None
    releases = [asked] if asked is not None else ["", NEW_RELEASE] if several else [""]
    metafunc.parametrize("slurm_release", releases, ids=[name or "own" for name in releases], scope="session")


def pytest_configure() -> None:
    """Tests see no Slurm but the one that they ask for, even inside a job."""
    for key in [key for key in os.environ if key.startswith(SLURM_PREFIXES)]:
        del os.environ[key]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Send all tests on the Slurm sandbox to one xdist worker, so that there is one sandbox."""
    for item in items:
        if item.get_closest_marker("slurm"):
            item.add_marker(pytest.mark.xdist_group("slurm"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse a pytest under which groups are not kept together: there would be two sandboxes, and every setup twice."""
    if hasattr(session.config, "workerinput") and session.config.getoption("loadgroup", False):
        grouped = [item for item in session.items if item.get_closest_marker("xdist_group")]
        if any("@" not in item.nodeid for item in grouped):
            raise pytest.UsageError("pytest-xdist does not group tests with this pytest; install 'hpjob[dev]'")


@pytest.fixture(autouse=True)
def no_memory_of_nodes(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a person's runs remember does not reach the tests, nor one test another."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.getbasetemp() / f"state-{uuid.uuid4().hex}"))


@pytest.fixture
def new_sandbox(slurm_release: str) -> Iterator[SlurmSandbox]:
    """A sandbox of one test that is not started yet; ended and deleted afterwards."""
    # Sockets lie below, whose paths may have 107 bytes, so pytest's own nested folders are too deep.
    path = Path(tempfile.mkdtemp(prefix="hpjob-"))
    sandbox = SlurmSandbox(path / "s", slurm_release)
    yield sandbox
    sandbox.control("down", check=False)
    shutil.rmtree(path)


@pytest.fixture(scope="session")
def slurm_sandbox(slurm_release: str) -> Iterator[SlurmSandbox]:
    """The sandbox that tests marked ``slurm`` share: 4 nodes of 8 GPUs under two leaf switches."""
    path = Path(tempfile.mkdtemp(prefix="hpjob-"))
    sandbox = SlurmSandbox(path / "s", slurm_release)
    try:
        # A busy machine's ranks get the time to save; those that leave at once cost none of it.
        sandbox.start("--grace", "120", "--kill-wait", "20")
        yield sandbox
        sandbox.control("down")
    finally:
        shutil.rmtree(path)


@pytest.fixture(scope="session")
def test_data() -> Path:
    """Folder of recorded cluster data that is not part of the repository."""
    value = os.environ.get("HPJOB_TEST_DATA", "")
    if not value:
        pytest.skip("HPJOB_TEST_DATA is not set: it names the folder of recorded cluster data")
    if not Path(value).is_dir():
        pytest.fail(f"HPJOB_TEST_DATA is {value}, which is no folder")
    return Path(value).resolve()
