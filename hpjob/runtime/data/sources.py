"""Finds text files and reads them as a stream of documents in a fixed order."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpjob.core.errors import UserInputError

_SNIFF_BYTES = 8192
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class TextFile:
    """One document: a file, or its beginning where the limit cuts it."""

    path: Path
    name: str
    """Path below the source it was found in, with slashes; part of the digest."""
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TextFiles:
    """All documents of a corpus, in order."""

    files: tuple[TextFile, ...]
    num_skipped: int
    """Files that are no UTF-8 text or empty."""
    sha256: str
    """Over names and contents."""

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


def find_text(sources: list[Path], suffixes: tuple[str, ...], limit_bytes: int | None) -> TextFiles:
    """Collect UTF-8 files: each source that is a file, and every file below each folder, by name.

    Args:
        sources: Files and folders.
        suffixes: Only files in folders whose name ends in one of these; empty = any text file.
        limit_bytes: Stop after so many bytes of text; the last file is cut at a line.

    Raises:
        UserInputError: A source is missing or unreadable, or no text is found.
    """
    digest = hashlib.sha256()
    found: list[TextFile] = []
    skipped = 0
    left = limit_bytes
    for path, name in _candidates(sources, suffixes):
        if left is not None and left <= 0:
            break
        file = _take(path, name, left, digest)
        if file is None:
            skipped += 1
            continue
        found.append(file)
        left = None if left is None else left - path.stat().st_size
    if not found:
        where = ", ".join(str(source) for source in sources)
        kind = f" that ends in {' or '.join(suffixes)}" if suffixes else ""
        raise UserInputError(
            f"no text file{kind} found in {where}",
            hint="name files of UTF-8 text or folders that hold some; --suffix .py picks by name",
        )
    return TextFiles(files=tuple(found), num_skipped=skipped, sha256=digest.hexdigest())


def read_pieces(file: TextFile) -> Iterator[str]:
    """Yield the text of a document in pieces of about a mebibyte that end at a line where possible."""
    with file.path.open("rb") as stream:
        left = file.size_bytes
        rest = b""
        while left > 0:
            block = stream.read(min(_PIECE_BYTES, left))
            if not block:
                break
            left -= len(block)
            block = rest + block
            cut = len(block) if left <= 0 else block.rfind(b"\n") + 1
            if cut:
                yield block[:cut].decode("utf-8")
            rest = block[cut:]
        if rest:
            yield rest.decode("utf-8")


def _candidates(sources: list[Path], suffixes: tuple[str, ...]) -> Iterator[tuple[Path, str]]:
    missing = [str(source) for source in sources if not source.exists()]
    if missing:
        raise UserInputError(
            "\n".join(f"source {name} does not exist" for name in missing), hint="check the path; it may be relative"
        )
    for source in sources:
        if source.is_file():
            yield source, source.name
            continue
        for folder, subfolders, names in os.walk(source, onerror=_refuse):
            subfolders.sort()
            for name in sorted(names):
                path = Path(folder, name)
                if path.is_file() and (not suffixes or name.endswith(suffixes)):
                    yield path, path.relative_to(source).as_posix()


def _refuse(error: OSError) -> None:
    raise UserInputError(
        f"cannot read folder {error.filename}: {error.strerror}", hint="leave it out or make it readable"
    )


def _take(path: Path, name: str, limit: int | None, digest: hashlib._Hash) -> TextFile | None:
    """Check that a file is text, add it to the digest, and cut it at the limit."""
    try:
        size = _text_size(path, limit)
        if size == 0:
            return None
        digest.update(f"{name}\0{size}\0".encode())
        with path.open("rb") as stream:
            left = size
            while left > 0 and (block := stream.read(min(_PIECE_BYTES, left))):
                digest.update(block)
                left -= len(block)
    except OSError as error:
        raise UserInputError(f"cannot read {path}: {error.strerror}", hint="leave it out or make it readable") from None
    return TextFile(path=path, name=name, size_bytes=size)


def _text_size(path: Path, limit: int | None) -> int:
    """Return the bytes of a file to use; 0 when it is empty or no UTF-8 text."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        if b"\0" in stream.read(_SNIFF_BYTES):
            return 0
    if limit is not None and size > limit:
        with path.open("rb") as stream:
            head = stream.read(limit)
        size = head.rfind(b"\n") + 1
    try:
        for _ in read_pieces(TextFile(path=path, name="", size_bytes=size)):
            pass
    except UnicodeDecodeError:
        return 0
    return size
