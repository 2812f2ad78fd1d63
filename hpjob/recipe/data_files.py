"""Token files on disk: what ``meta.json`` says, and the check before a job waits in the queue.

Needs neither numpy nor torch, so that submission can use it on a login node.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from hpjob.core.errors import UserInputError
from hpjob.core.schema import Persisted, parse

TOKENS_NAME = "tokens.bin"
META_NAME = "meta.json"
TOKENIZER_NAME = "tokenizer.json"
ITEM_SIZE = {"uint16": 2, "uint32": 4}
_PREPARE = "make token files with `hpjob data prepare SOURCE… --out DIR` and set data.path to that folder"


class TokenFilesMeta(Persisted):
    """What ``tokens.bin`` holds and where it came from."""

    version: Literal[1] = 1
    dtype: Literal["uint16", "uint32"]
    """Little-endian items of ``tokens.bin``."""
    num_tokens: Annotated[int, Field(ge=0)]
    num_documents: Annotated[int, Field(ge=0)]
    vocab_size: Annotated[int, Field(gt=0)]
    """Every token is below this number."""
    eos_token: str
    eos_token_id: Annotated[int, Field(ge=0)]
    """Ends every document."""
    sources: tuple[str, ...]
    """Paths as they were given."""
    source_bytes: Annotated[int, Field(ge=0)]
    source_sha256: str
    """Over names and contents of all files that were read."""
    settings: dict[str, str | int | None]
    """Options that decide the result; equal settings and sources give equal bytes."""
    tokens_sha256: str
    tokenizer_sha256: str


def read_meta(folder: Path) -> TokenFilesMeta:
    """Read ``meta.json`` of a folder of token files.

    Raises:
        UserInputError: The folder or the file is missing or damaged.
    """
    if not folder.exists():
        raise UserInputError(f"data path {folder} does not exist", hint=_PREPARE)
    path = folder / META_NAME
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UserInputError(f"data path {folder} has no {META_NAME}", hint=_PREPARE) from None
    except (OSError, ValueError) as error:
        raise UserInputError(f"{path} cannot be read: {error}", hint=_PREPARE) from None
    return parse(TokenFilesMeta, document, source=str(path))


def check_token_files(
    path: str | Path | None, vocab_size: int, seq_length: int, global_batch_size: int = 1
) -> TokenFilesMeta:
    """Check that a recipe can train on a folder of token files; reads no token.

    Args:
        path: Folder made by ``hpjob data prepare``.
        vocab_size: Vocabulary of the model.
        seq_length: Tokens a sample.
        global_batch_size: Samples a step.

    Raises:
        UserInputError: Missing, damaged, too short, or made for a larger vocabulary.
    """
    if path is None:
        raise UserInputError("the recipe has no data.path", hint=_PREPARE)
    folder = Path(path)
    meta = read_meta(folder)
    tokens = folder / TOKENS_NAME
    expected = meta.num_tokens * ITEM_SIZE[meta.dtype]
    try:
        size = tokens.stat().st_size
    except OSError as error:
        raise UserInputError(f"{tokens} cannot be read: {error.strerror}", hint=_PREPARE) from None
    if size != expected:
        raise UserInputError(
            f"{tokens} has {size} bytes, but {META_NAME} says {meta.num_tokens} tokens of {meta.dtype} = {expected}",
            hint="the file was cut or changed; prepare it again with `hpjob data prepare … --force`",
        )
    if meta.vocab_size > vocab_size:
        raise UserInputError(
            f"the tokens in {folder} go up to a vocabulary of {meta.vocab_size}, the model has {vocab_size}",
            hint=f"set model.vocab_size to at least {meta.vocab_size}, or prepare with --vocab-size {vocab_size}",
        )
    num_samples = count_samples(meta.num_tokens, seq_length)
    if num_samples < global_batch_size:
        raise UserInputError(
            f"{folder} holds {meta.num_tokens} tokens = {num_samples} samples of {seq_length}, "
            f"fewer than one global batch of {global_batch_size}",
            hint="prepare more text, or lower data.seq_length or training.global_batch_size",
        )
    return meta


def count_samples(num_tokens: int, seq_length: int) -> int:
    """Return how many samples fit: each needs ``seq_length`` inputs and one more token as the last label."""
    return max(0, (num_tokens - 1) // seq_length)
