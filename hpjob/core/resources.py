"""The only code that knows where packaged data lies.

In a wheel the data folders are at ``hpjob/_data/<kind>``; in a checkout (and an editable install)
they stand beside the package, because the build copies them only into wheels.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Literal

import hpjob

DataKind = Literal["templates", "topology", "recipes"]


def data_dir(kind: DataKind) -> Path:
    """Return the folder that holds packaged data of one kind.

    Raises:
        FileNotFoundError: The installation is incomplete.
    """
    installed = Path(str(files("hpjob"))) / "_data" / kind
    if installed.is_dir():
        return installed
    checkout = Path(hpjob.__file__).resolve().parent.parent / kind
    if checkout.is_dir():
        return checkout
    raise FileNotFoundError(f"packaged data folder {kind!r} is missing: looked at {installed} and {checkout}")


def data_file(kind: DataKind, name: str) -> Path:
    """Return the path of one packaged file, whether it exists or not."""
    return data_dir(kind) / name


def data_names(kind: DataKind, suffix: str) -> list[str]:
    """Return the sorted stems of all packaged files of a kind that end in ``suffix``."""
    return sorted(path.name.removesuffix(suffix) for path in data_dir(kind).glob(f"*{suffix}"))
