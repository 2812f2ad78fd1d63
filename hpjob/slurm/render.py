"""Job specification -> text of the job script.

Every value is quoted for the shell; sbatch reads quotes in ``#SBATCH`` lines the same way.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from hpjob.core.errors import UserInputError
from hpjob.core.quantity import slurm_time
from hpjob.core.resources import data_dir
from hpjob.slurm.model import JobSpec

_TEMPLATE = "job.sbatch.j2"
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def render_script(spec: JobSpec) -> str:
    """Return the job script of ``spec``: what is submitted, kept and shown by a dry run.

    Raises:
        UserInputError: A value holds a line break or another control character, or a variable has
            no legal name.
    """
    _refuse_control_characters(spec)
    environment = Environment(
        loader=FileSystemLoader(data_dir("templates")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters.update(
        shquote=lambda value: shlex.quote(str(value)),
        slurm_time=slurm_time,
        slurm_literal=_slurm_literal,
        sbatch_option=_sbatch_option,
    )
    return environment.get_template(_TEMPLATE).render(spec=spec)


def _slurm_literal(path: str) -> str:
    """Write a path so that Slurm's file name patterns (``%j``, …) leave it alone."""
    return path.replace("%", "%%")


def _sbatch_option(option: str) -> str:
    name, equals, value = option.partition("=")
    return f"{name}={shlex.quote(value)}" if equals else name


def _named_values(spec: JobSpec) -> Iterator[tuple[str, str]]:
    for field in ("job_name", "run_dir", "python", "partition", "account", "qos", "signal"):
        value = getattr(spec, field)
        if value is not None:
            yield field, value
    yield from ((f"env.{name}", value) for name, value in spec.env.items())
    yield from ((f"sbatch option {option.split('=')[0]!r}", option) for option in spec.extra_options)


def _refuse_control_characters(spec: JobSpec) -> None:
    for name, value in _named_values(spec):
        if any(ord(char) < 32 or ord(char) == 127 for char in value):
            raise UserInputError(
                f"{name} holds a line break or a control character: {value!r}",
                hint="a job script has one value a line; write it without the line break",
            )
    if "\\" in spec.run_dir:
        raise UserInputError(
            f"run folder {spec.run_dir!r} holds a backslash, which switches off Slurm's file name patterns",
            hint="choose another folder with --run-dir",
        )
    for name in spec.env:
        if not _ENV_NAME.fullmatch(name):
            raise UserInputError(
                f"job.env: {name!r} is no name of an environment variable",
                hint="names have letters, digits and underscores and do not begin with a digit",
            )
