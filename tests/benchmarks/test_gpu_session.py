"""A session on GPUs: steps that fail or hang stop no other, and what happened is written down."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_session import Step, all_gpus, fp8, one_gpu, run, two_gpus

ROOT = Path(__file__).resolve().parents[2]


def python(code: str) -> str:
    return f"python -c {shlex.quote(code)}"


def test_steps_that_fail_or_hang_stop_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [
        Step(name="fails", command=python("import sys; print('why'); sys.exit(3)"), limit_s=60),
        Step(name="hangs", command=python("import threading; threading.Event().wait()"), limit_s=1),
        Step(name="writes", command=python("print(open('{out}/left', 'w').write('{left}'))"), limit_s=60),
        Step(name="too long", command=python("raise SystemExit(1)"), limit_s=3000),
        Step(name="as long as there is time", command=python("print('{left}')"), limit_s=3000, least_s=1),
    ]
    assert run(steps, tmp_path, 1000.0) == 1
    fails, hangs, writes, too_long, last = json.loads((tmp_path / "session.json").read_text())
    assert (fails["exit_code"], fails["said"]) == (3, ["why"])
    assert hangs["exit_code"] == "ended after 1 s"
    assert writes["exit_code"] == 0 and float((tmp_path / "left").read_text()) == 40.0
    assert "left" in too_long["skipped"]
    assert last["exit_code"] == 0
    assert "===== fails" in (tmp_path / "session.log").read_text()
    assert len(capsys.readouterr().out.splitlines()) == 5


@pytest.mark.parametrize("steps", [one_gpu(), fp8(), two_gpus(), all_gpus(4, 0.125), all_gpus(8, 0.25)])
def test_commands_are_whole(steps: list[Step]) -> None:
    for step in steps:
        words = shlex.split(step.command)
        target = words[2] if words[1] == "-m" else words[1]
        assert words[0] == "python" and (target in {"hpjob", "pytest"} or (ROOT / target).is_file())
    assert len({name for step in steps for name in shlex.split(step.command) if name.endswith(".json")}) <= 6


def test_options_of_every_command_exist() -> None:
    """Every command that parses its options before it needs a GPU is parsed here."""
    code = (
        "import shlex\n"
        "from benchmarks import gpu_session as s, gpu_train, multi_gpu\n"
        "from scripts import parity\n"
        "parsers = {'benchmarks/multi_gpu.py': multi_gpu, 'benchmarks/gpu_train.py': gpu_train,"
        " 'scripts/parity.py': parity}\n"
        "for step in [*s.one_gpu(), *s.fp8(), *s.two_gpus(), *s.all_gpus(8, 0.5)]:\n"
        "    words = shlex.split(step.command.replace('{left}', '9'))\n"
        "    if words[1] in parsers:\n"
        "        parsers[words[1]]._options(words[2:])\n"
        "        print(words[1])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 10
