"""The `hpjob` command itself: imports, usage errors, interruption."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpjob.cli import submit as submit_module
from tests.cli.conftest import Cli

REPOSITORY = Path(__file__).resolve().parents[2]
HEAVY = (
    "torch",
    "transformers",
    "matplotlib",
    "pydantic",
    "submitit",
    "numpy",
    "yaml",
    "jinja2",
    "psutil",
    "ClusterShell",
)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], []])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    """Importing torch alone costs seconds; help has to come at once."""
    code = (
        "import sys\nfrom hpjob.cli.app import main\nsys.argv = ['hpjob', *sys.argv[1:]]\n"
        f"try:\n    main()\nfinally:\n    print(sorted(set({HEAVY!r}) & set(sys.modules)), file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert done.returncode == (0 if arguments else 2)
    assert done.stderr.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("submit", "--nodes", "x", "--recipe", "tiny"), "--nodes"),
        (("submit", "--nodes", "2"), "--recipe"),
        (("sumbit",), "sumbit"),
        (("status", "a", "b"), "b"),
    ],
)
def test_usage_errors(cli: Cli, arguments: tuple[str, ...], words: str) -> None:
    result = cli(*arguments)
    assert result.code == 2
    assert result.err.startswith("error: ") and words in result.err and "\nhint: `" in result.err
    assert result.out == ""


@pytest.mark.parametrize("arguments", [(), ("recipes",)])
def test_no_arguments_show_the_help(cli: Cli, arguments: tuple[str, ...]) -> None:
    result = cli(*arguments)
    assert result.code == 2
    assert "Usage: " in result.err and "error:" not in result.err


def test_interruption_ends_quietly(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(submit_module, "_show_plan", interrupted)
    result = cli("submit", "--nodes", "2", "--recipe", "tiny", "--machine", "hgx-h100", "--dry-run")
    assert result.code == 130
    assert "Traceback" not in result.err


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    command = f"{sys.executable} -m hpjob recipes show 70b | head -1"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, cwd=REPOSITORY, check=False
    )
    assert "Traceback" not in done.stderr
    assert done.returncode in {0, 128 + signal.SIGPIPE}
