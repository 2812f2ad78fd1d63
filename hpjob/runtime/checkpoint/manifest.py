"""``manifest.json``: what a checkpoint holds, with a checksum of every file.

Beside it stands ``SHA256SUMS`` with the same checksums and the manifest's own, so that a flipped byte in either
is seen, and ``sha256sum -c SHA256SUMS`` checks a checkpoint without this program.
"""

from __future__ import annotations

import hashlib
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from hpjob.core.schema import Persisted
from hpjob.plan.model import ParallelDegrees
from hpjob.recipe.model import Recipe

MANIFEST_NAME = "manifest.json"
SUMS_NAME = "SHA256SUMS"
DATA_NAME = "data"
Scalar = str | int | float | bool | None
Kind = Literal["permanent", "ephemeral"]
"""``ephemeral`` = kept until the next checkpoint is complete."""


class CheckpointFile(Persisted):
    """One file below ``data/``."""

    name: str
    size_bytes: Annotated[int, Field(ge=0)]
    sha256: str


class Manifest(Persisted):
    """The checkpoint in words; a folder without one is no checkpoint."""

    version: Literal[1, 2] = 2
    """Version 1 had no ``SHA256SUMS`` and no kind."""
    step: Annotated[int, Field(gt=0)]
    kind: Kind = "permanent"
    time: float = Field(default_factory=time.time)
    """Unix seconds."""
    saved_at: str = Field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    """The same for people."""
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


def manifest_text(manifest: Manifest) -> str:
    """Return the content of ``manifest.json``."""
    return manifest.model_dump_json(indent=2) + "\n"


def sums_text(manifest_content: bytes, manifest: Manifest) -> str:
    """Return the content of ``SHA256SUMS`` in the format of ``sha256sum``."""
    lines = [(hashlib.sha256(manifest_content).hexdigest(), MANIFEST_NAME)]
    lines += [(file.sha256, f"{DATA_NAME}/{file.name}") for file in manifest.files]
    return "".join(f"{digest}  {name}\n" for digest, name in lines)


def read_manifest(folder: Path, step: int) -> Manifest:
    """Read the manifest of a checkpoint and compare it with its checksum.

    Raises:
        OSError: A file cannot be read.
        ValueError: It holds something else than was written.
    """
    content = (folder / MANIFEST_NAME).read_bytes()
    manifest = Manifest.model_validate_json(content)
    if manifest.step != step:
        raise ValueError(f"the manifest says step {manifest.step}")
    sums = folder / SUMS_NAME
    # A damaged version number must not switch the comparison off.
    if manifest.version > 1 or sums.exists():
        _compare_sums(sums.read_bytes(), sums_text(content, manifest).encode())
    return manifest


def _compare_sums(found: bytes, expected: bytes) -> None:
    if found == expected:
        return
    first = expected.splitlines()[0]
    if found.splitlines()[:1] != [first] and found.splitlines()[1:] == expected.splitlines()[1:]:
        raise ValueError(f"its checksum is another than {SUMS_NAME} says")
    raise ValueError(f"{SUMS_NAME} says something else than the manifest")


def check_file(folder: Path, file: CheckpointFile, *, sizes_only: bool = False) -> str | None:
    """Return what is wrong with a file of a checkpoint, or None."""
    path = folder / file.name
    try:
        size = path.stat().st_size
        if size != file.size_bytes:
            return f"{file.name} has {size} bytes instead of {file.size_bytes}"
        good = sizes_only or describe_file(path) == file
        return None if good else f"{file.name} has another checksum than the manifest"
    except OSError as error:
        return f"{file.name}: {error.strerror}"
