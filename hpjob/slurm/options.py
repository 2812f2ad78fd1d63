"""sbatch options that a person passes through after ``--``.

Options that decide where logs go, which signals come, how ranks are counted or whether a job is queued again are
hpjob's own: changing them behind its back breaks the run, so they are refused with the right way to say it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from hpjob.core.errors import UserInputError
from hpjob.core.schema import nearest
from hpjob.slurm.commands import run_command

_SET = "say it with `--set job.{0}=…`"
_OWN = "say it with `{0}` before the `--`"
_COUNTED = "hpjob counts ranks from the plan; use --nodes and `--set job.gpus_per_node=…`"
_LOGS = "hpjob finds logs by their names in the run folder"
_RESTART = "hpjob needs it to save and to queue the job again"
_ONE_JOB = "one run is one job on one cluster"

PROTECTED: dict[str, str] = {
    "job-name": _OWN.format("--name"),
    "partition": _OWN.format("--partition"),
    "account": _OWN.format("--account"),
    "qos": _OWN.format("--qos"),
    "time": _OWN.format("--time"),
    "nodes": _OWN.format("--nodes"),
    "cpus-per-task": _SET.format("cpus_per_rank"),
    "gpus-per-node": _SET.format("gpus_per_node"),
    **dict.fromkeys(("output", "error", "input", "open-mode"), _LOGS),
    **dict.fromkeys(("signal", "requeue", "no-requeue", "no-kill", "kill-on-invalid-dep"), _RESTART),
    **dict.fromkeys(
        ("ntasks", "ntasks-per-node", "tasks-per-node", "ntasks-per-core", "ntasks-per-socket", "ntasks-per-gpu"),
        _COUNTED,
    ),
    **dict.fromkeys(("gpus", "gpus-per-task", "gpus-per-socket", "gpu-bind", "cpus-per-gpu"), _COUNTED),
    "distribution": "ranks are ordered by hpjob's own host file",
    **dict.fromkeys(("array", "wrap", "clusters", "cluster-constraint"), _ONE_JOB),
    **dict.fromkeys(("export", "export-file"), "say variables with `--set job.env.NAME=value`"),
    **dict.fromkeys(("parsable", "quiet", "verbose", "wait", "test-only", "help", "usage", "version"), _ONE_JOB),
}

_SHORT = {
    "A": "account", "a": "array", "b": "begin", "C": "constraint", "c": "cpus-per-task", "D": "chdir",
    "d": "dependency", "e": "error", "F": "nodefile", "G": "gpus", "H": "hold", "i": "input", "J": "job-name",
    "k": "no-kill", "L": "licenses", "M": "clusters", "m": "distribution", "N": "nodes", "n": "ntasks",
    "O": "overcommit", "o": "output", "p": "partition", "q": "qos", "s": "oversubscribe", "t": "time", "W": "wait",
    "w": "nodelist", "x": "exclude",
}  # fmt: skip
_SHORT_FLAGS = frozenset("HkOsW")
_LONG_NAME = re.compile(r"--([a-z][a-z0-9-]*)")


def pass_through(arguments: Sequence[str]) -> tuple[str, ...]:
    """Turn what stands after ``--`` into ``--long=value`` or ``--flag``, checked.

    Raises:
        UserInputError: An option is hpjob's own, unknown to the installed sbatch, or no option at all.
    """
    options = _long_form(arguments)
    known = _known_options()
    for option in options:
        _check(option, known)
    return tuple(options)


def sbatch_takes(option: str) -> bool:
    """Whether the installed sbatch takes an option, such as ``--segment=2``; nothing is submitted.

    Its help does not list all: Slurm 24.11 knows ``--segment`` and is silent about it.
    """
    result = run_command(["sbatch", option, "--version"])
    return result.ok and result.stdout.startswith("slurm")


def _long_form(arguments: Sequence[str]) -> list[str]:
    options: list[str] = []
    takes_value = False
    for argument in arguments:
        if argument.startswith("--") and len(argument) > 2:
            options.append(argument)
            takes_value = "=" not in argument
        elif re.fullmatch(r"-[A-Za-z].*", argument, re.DOTALL):
            letter, value = argument[1], argument[2:].removeprefix("=")
            if letter not in _SHORT:
                raise UserInputError(f"unknown sbatch option {argument!r}", hint="write it as --long=value")
            options.append(f"--{_SHORT[letter]}" + (f"={value}" if value else ""))
            takes_value = not value and letter not in _SHORT_FLAGS
        elif takes_value:
            options[-1] += f"={argument}"
            takes_value = False
        else:
            raise UserInputError(
                f"{argument!r} after `--` is no sbatch option", hint="write sbatch options as --long=value"
            )
    return options


def _check(option: str, known: frozenset[str]) -> None:
    name, _, value = option.removeprefix("--").partition("=")
    if name in PROTECTED:
        raise UserInputError(f"sbatch option --{name} cannot be passed through", hint=PROTECTED[name])
    if name in {"gres", "tres-per-task"} and "gpu" in value:
        raise UserInputError(f"sbatch option --{name} cannot ask for GPUs", hint=PROTECTED["gpus-per-node"])
    is_cut = any(other.startswith(name) for other in (*known, *PROTECTED))
    if known and name not in known and (is_cut or not sbatch_takes(option)):
        guess = nearest(name, known - set(PROTECTED))
        raise UserInputError(
            f"this sbatch knows no option --{name}",
            hint=f"did you mean `--{guess}`?" if guess else "`sbatch --help` lists its options",
        )
    # sbatch accepts any unambiguous beginning of a name, so `--outp` would be `--output`.
    meant = [protected for protected in PROTECTED if protected.startswith(name)]
    if not known and meant:
        raise UserInputError(
            f"sbatch option --{name} could mean --{meant[0]}, which cannot be passed through",
            hint="write the option's full name",
        )


def _known_options() -> frozenset[str]:
    result = run_command(["sbatch", "--help"])
    return frozenset(_LONG_NAME.findall(result.stdout)) if result.ok else frozenset()
