"""``manifest.json``: what a checkpoint holds, with a checksum of every file."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from hpjob.core.schema import Persisted
from hpjob.plan.model import ParallelDegrees
from hpjob.recipe.model import Recipe

MANIFEST_NAME = "manifest.json"
DATA_NAME = "data"
Scalar = str | int | float | bool | None


class CheckpointFile(Persisted):
    """One file below ``data/``."""

    name: str
    size_bytes: Annotated[int, Field(ge=0)]
    sha256: str


class Manifest(Persisted):
    """The checkpoint in words; a folder without one is no checkpoint."""

    version: Literal[1] = 1
    step: Annotated[int, Field(gt=0)]
    time: float = Field(default_factory=time.time)
    """Unix seconds."""
    attempt: int
    plan: str
    """Layout that wrote it, in one line; any layout can load it."""
    degrees: ParallelDegrees
    world_size: Annotated[int, Field(gt=0)]
    num_samples: Annotated[int, Field(ge=0)]
    """Data position: samples trained on so far, over all ranks."""
    lr: float
    """Learning rate of the last step; the next one follows from the step."""
    fingerprint: dict[str, Scalar]
    """Values of the recipe that have to be the same to go on from here."""
    files: tuple[CheckpointFile, ...]
    hpjob_version: str
    torch_version: str

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


def fingerprint(recipe: Recipe, tokens_sha256: str) -> dict[str, Scalar]:
    """Return what defines the training beside its length and layout, by dotted name."""
    sections = {
        "model": recipe.model.model_dump(mode="json"),
        "optimizer": recipe.optimizer.model_dump(mode="json"),
        "training": recipe.training.model_dump(mode="json", include={"global_batch_size", "seed"}),
        "data": recipe.data.model_dump(mode="json", include={"seq_length", "seed"}),
    }
    flat: dict[str, Scalar] = {"data.tokens_sha256": tokens_sha256}
    # None where it is off, as in checkpoints that do not have this value.
    flat["data.pack_documents"] = recipe.data.pack_documents or None
    for section, values in sections.items():
        for name, value in values.items():
            flat[f"{section}.{name}"] = value if isinstance(value, str | int | float | None) else repr(value)
    return dict(sorted(flat.items()))


def differences(saved: dict[str, Scalar], wanted: dict[str, Scalar]) -> list[str]:
    """Return one line for each value that differs between two fingerprints."""
    return [
        f"{name} is {wanted.get(name)}, the checkpoint has {saved.get(name)}"
        for name in sorted(saved.keys() | wanted.keys())
        if saved.get(name) != wanted.get(name)
    ]


def describe_file(path: Path) -> CheckpointFile:
    """Read a file back and return its size and checksum."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        size = stream.tell()
    return CheckpointFile(name=path.name, size_bytes=size, sha256=digest)


def check_file(folder: Path, file: CheckpointFile) -> str | None:
    """Return what is wrong with a file of a checkpoint, or None."""
    path = folder / file.name
    try:
        size = path.stat().st_size
        if size != file.size_bytes:
            return f"{file.name} has {size} bytes instead of {file.size_bytes}"
        return None if describe_file(path) == file else f"{file.name} has another checksum than the manifest"
    except OSError as error:
        return f"{file.name}: {error.strerror}"
