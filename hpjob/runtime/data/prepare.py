"""Turns text into token files: ``tokens.bin``, ``meta.json``, ``tokenizer.json``.

Documents are joined with an end-of-text token. The same sources and settings give the same bytes.
The folder is written under a temporary name and renamed, so it is complete or absent.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hpjob.core.durable import sync_folder
from hpjob.core.errors import EnvironmentProblemError, UserInputError
from hpjob.recipe.data_files import META_NAME, TOKENIZER_NAME, TOKENS_NAME, TokenFilesMeta, check_token_files, read_meta
from hpjob.runtime.data.sources import TextFile, TextFiles, find_text, read_pieces

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
_KNOWN_END_TOKENS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<|eot_id|>", "<|im_end|>", "<eos>", "[SEP]")
_SMALLEST_VOCAB = 257  # every byte and the end-of-text token
_BATCH_PIECES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareOptions:
    """What decides the result, beside the text itself."""

    vocab_size: int = 1024
    """Of the tokenizer that is trained; not used with ``tokenizer``."""
    tokenizer: Path | None = None
    """A ``tokenizer.json`` to use instead of training one."""
    suffixes: tuple[str, ...] = ()
    limit_bytes: int | None = None


def prepare(sources: list[Path], out: Path, options: PrepareOptions, *, force: bool = False) -> TokenFilesMeta:
    """Tokenize text files into the folder ``out``.

    A folder that already holds the result of the same sources and settings is left as it is.

    Args:
        sources: Files and folders of UTF-8 text.
        out: Folder to make.
        options: Tokenizer, choice of files, limit.
        force: Replace token files of other sources or settings.

    Raises:
        UserInputError: Missing source, no text, unusable option, or ``out`` holds something else.
        EnvironmentProblemError: ``out`` cannot be written.
    """
    if options.tokenizer is None and options.vocab_size < _SMALLEST_VOCAB:
        raise UserInputError(
            f"--vocab-size {options.vocab_size} is too small",
            hint=f"a byte-level vocabulary needs at least {_SMALLEST_VOCAB}: all bytes and the end-of-text token",
        )
    text = find_text(sources, options.suffixes, options.limit_bytes)
    settings = _settings(options)
    existing = _existing(out, text, settings, force)
    if existing is not None:
        return existing
    partial = out.with_name(f"{out.name}.partial-{os.getpid()}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
        meta = _write(partial, text, options, settings, sources)
        _publish(partial, out)
    except OSError as error:
        raise EnvironmentProblemError(
            f"cannot write {error.filename or out}: {error.strerror}", hint="choose another --out or free some space"
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return meta


def _settings(options: PrepareOptions) -> dict[str, str | int | None]:
    given = options.tokenizer
    try:
        tokenizer = hashlib.sha256(given.read_bytes()).hexdigest() if given else None
    except OSError as error:
        raise UserInputError(
            f"tokenizer {given}: {error.strerror}", hint="give the path of a tokenizer.json file"
        ) from None
    return {
        "vocab_size": None if given else options.vocab_size,
        "tokenizer_sha256": tokenizer,
        "suffixes": " ".join(options.suffixes) or None,
        "limit_bytes": options.limit_bytes,
    }


def _existing(out: Path, text: TextFiles, settings: dict[str, str | int | None], force: bool) -> TokenFilesMeta | None:
    """Return what ``out`` holds if it is what was asked for; refuse anything else unless forced."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    if not out.is_dir() or not (out / META_NAME).is_file():
        raise UserInputError(
            f"{out} exists and is no folder of token files", hint="choose a new folder for --out; nothing was changed"
        )
    if force:
        return None
    meta = read_meta(out)
    if (meta.source_sha256, meta.settings) == (text.sha256, settings):
        return check_token_files(out, meta.vocab_size, 1)
    raise UserInputError(
        f"{out} holds token files of other sources or settings",
        hint="add --force to replace them, or choose another --out",
    )


def _write(
    folder: Path, text: TextFiles, options: PrepareOptions, settings: dict[str, str | int | None], sources: list[Path]
) -> TokenFilesMeta:
    tokenizer = _load(options.tokenizer) if options.tokenizer else _train(text, options.vocab_size)
    eos_token, eos_id = _end_token(tokenizer)
    vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    dtype = np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")
    tokenizer.save(str(folder / TOKENIZER_NAME))
    digest = hashlib.sha256()
    num_tokens = 0
    with (folder / TOKENS_NAME).open("wb") as stream:
        for ids in _encode(tokenizer, text, eos_id):
            block = np.asarray(ids, dtype=dtype).tobytes()
            stream.write(block)
            digest.update(block)
            num_tokens += len(ids)
        stream.flush()
        os.fsync(stream.fileno())
    meta = TokenFilesMeta(
        dtype="uint16" if dtype.itemsize == 2 else "uint32",
        num_tokens=num_tokens,
        num_documents=len(text.files),
        vocab_size=vocab_size,
        eos_token=eos_token,
        eos_token_id=eos_id,
        sources=tuple(str(source) for source in sources),
        source_bytes=text.size_bytes,
        source_sha256=text.sha256,
        settings=settings,
        tokens_sha256=digest.hexdigest(),
        tokenizer_sha256=hashlib.sha256((folder / TOKENIZER_NAME).read_bytes()).hexdigest(),
    )
    (folder / META_NAME).write_text(meta.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return meta


def _publish(partial: Path, out: Path) -> None:
    """Move the finished folder to its name; what stood there before goes only after that worked."""
    old = out.with_name(f"{out.name}.old-{os.getpid()}")
    if out.exists():
        out.replace(old)
    partial.replace(out)
    sync_folder(out.parent)
    shutil.rmtree(old, ignore_errors=True)


def _train(text: TextFiles, vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE; it can encode any text and decodes back to it exactly."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((piece for file in text.files for piece in read_pieces(file)), trainer)
    return tokenizer


def _load(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer  # noqa: PLC0415

    try:
        tokenizer = Tokenizer.from_file(str(path))
    # The library raises bare Exception for a file that it cannot parse.
    except Exception as error:
        raise UserInputError(
            f"tokenizer {path}: {error}", hint="give a tokenizer.json of the tokenizers library"
        ) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _end_token(tokenizer: Tokenizer) -> tuple[str, int]:
    for token in _KNOWN_END_TOKENS:
        token_id = tokenizer.token_to_id(token)
        if token_id is not None:
            return token, token_id
    raise UserInputError(
        "the tokenizer has no end-of-text token", hint=f"add one of {', '.join(_KNOWN_END_TOKENS)} to it"
    )


def _encode(tokenizer: Tokenizer, text: TextFiles, eos_id: int) -> Iterator[list[int]]:
    """Yield token ids in the order of the text, an end token after every document."""
    for batch in _batched(_pieces(text.files)):
        encodings = tokenizer.encode_batch([piece for piece, _ in batch], add_special_tokens=False)
        for encoding, (_, is_last) in zip(encodings, batch, strict=True):
            yield encoding.ids + [eos_id] * is_last


def _batched(pieces: Iterable[tuple[str, bool]]) -> Iterator[list[tuple[str, bool]]]:
    iterator = iter(pieces)
    while batch := list(itertools.islice(iterator, _BATCH_PIECES)):
        yield batch


def _pieces(files: tuple[TextFile, ...]) -> Iterator[tuple[str, bool]]:
    """Yield each piece of each document and whether it is the document's last."""
    for file in files:
        previous: str | None = None
        for piece in read_pieces(file):
            if previous is not None:
                yield previous, False
            previous = piece
        if previous is not None:
            yield previous, True
