"""A fake Slurm: small executables on PATH that note how they were called and print what a test prepared."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

_PROGRAM = r"""#!/bin/bash
name=${0##*/}
printf '%s\n' "$*" >>"$FAKE_SLURM/$name.calls"
env >"$FAKE_SLURM/$name.env"
[[ $name == sbatch && -f ${!#} ]] && cp "${!#}" "$FAKE_SLURM/submitted.sbatch"
words="$name $*"
best=
for answer in "$FAKE_SLURM"/answers/*/; do
  key=$(<"$answer/words")
  [[ $words == "$key"* && ${#key} -ge ${#best} ]] && best=$key found=$answer
done
[[ -n $best ]] || { echo "$name: error: nothing prepared for: $words" >&2; exit 1; }
[[ -e $found/hang ]] && exec sleep 600
cat "$found/stdout"
cat "$found/stderr" >&2
exit "$(<"$found/code")"
"""
_COMMANDS = ("sbatch", "srun", "squeue", "scontrol", "scancel", "sinfo", "sacct", "sacctmgr")

CONFIG = """Configuration data as of 2026-03-01T10:00:00
AccountingStorageType   = {accounting}
AuthInfo                = (null)
ClusterName             = fake
JobRequeue              = 1
KillWait                = 30 sec
PreemptMode             = REQUEUE
PreemptType             = preempt/partition_prio
ProctrackType           = proctrack/cgroup
SLURM_VERSION           = 22.05.8
SlurmctldParameters     = (null)

Slurmctld(primary) at head is UP
"""
PARTITIONS = (
    "PartitionName=batch AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL Default=YES QoS=N/A DefaultTime=NONE "
    "GraceTime=60 MaxNodes=UNLIMITED MaxTime=1-00:00:00 Nodes=n[1-4] PreemptMode=REQUEUE State=UP TotalNodes=4\n"
    "PartitionName=spot AllowGroups=ALL AllowAccounts=lab,physics AllowQos=ALL Default=NO QoS=N/A DefaultTime=00:02:00 "
    "GraceTime=0 MaxNodes=2 MaxTime=UNLIMITED Nodes=n[1-4] PreemptMode=CANCEL State=UP TotalNodes=4\n"
)


@dataclass(frozen=True)
class FakeSlurm:
    """The prepared answers and noted calls of one test."""

    path: Path

    def answer(self, words: str, stdout: str = "", *, stderr: str = "", code: int = 0, hang: bool = False) -> None:
        """Prepare what a command prints; of several that match a call, the longest ``words`` count."""
        folder = self.path / "answers" / words.replace("/", "_").replace(" ", "_")
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in (("words", words), ("stdout", stdout), ("stderr", stderr), ("code", str(code))):
            (folder / name).write_text(text, encoding="utf-8")
        if hang:
            (folder / "hang").touch()

    def calls(self, command: str) -> list[str]:
        """Arguments of every call of a command."""
        path = self.path / f"{command}.calls"
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else []

    def environment(self, command: str) -> dict[str, str]:
        """Environment that a command last saw."""
        lines = (self.path / f"{command}.env").read_text(encoding="utf-8").splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    @property
    def submitted(self) -> str:
        """The script that sbatch was given last."""
        return (self.path / "submitted.sbatch").read_text(encoding="utf-8")


def install(path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Put the fake commands first on PATH, with a site of two partitions over four nodes of eight GPUs."""
    programs = path / "bin"
    programs.mkdir(parents=True)
    (path / "answers").mkdir()
    program = programs / "slurm-command"
    program.write_text(_PROGRAM, encoding="utf-8")
    program.chmod(0o755)
    for command in _COMMANDS:
        (programs / command).symlink_to(program)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SLURM", str(path))
    fake = FakeSlurm(path)
    fake.answer("scontrol show config", CONFIG.format(accounting="accounting_storage/none"))
    fake.answer("scontrol show partition", PARTITIONS)
    fake.answer("scontrol show topology", "SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=n[1-4]\n")
    fake.answer("scontrol show hostnames", "n1\nn2\n")
    fake.answer(
        "scontrol show node", "NodeName=n1 Arch=x86_64 NodeAddr=10.0.0.1\nNodeName=n2 Arch=x86_64 NodeAddr=10.0.0.2\n"
    )
    fake.answer("sinfo", "".join(f"n{i}|batch*|idle|64|1000000|gpu:h100:8\n" for i in range(1, 5)))
    fake.answer("sinfo -h -o", "batch|gpu:h100:8\nspot|gpu:h100:8\n")
    fake.answer("sbatch", "Submitted batch job 4711\n")
    fake.answer("sbatch --help", "  --constraint=list\n  --reservation=name\n  --exclusive[=user]\n  --output=out\n")
    fake.answer("scancel", "")
    fake.answer("squeue", "PENDING|Resources||2026-03-01T12:00:00|1:00:00\n")
    return fake


def without_slurm(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave only a folder of links to the few programs that are no part of Slurm on PATH."""
    path.mkdir()
    for name in ("bash", "env", "sleep"):
        (path / name).symlink_to(f"/usr/bin/{name}")
    monkeypatch.setenv("PATH", str(path))
