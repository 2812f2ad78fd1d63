"""Token files for tests, without a tokenizer."""

from __future__ import annotations

import array
import hashlib
import json
import random
from pathlib import Path


def write_corpus(folder: Path, num_tokens: int = 10_000, vocab_size: int = 1024) -> None:
    """Write token files of random tokens that pass the check before submission."""
    folder.mkdir()
    source = random.Random(1)
    tokens = array.array("H", (source.randrange(vocab_size) for _ in range(num_tokens)))
    (folder / "tokens.bin").write_bytes(tokens.tobytes())
    meta = {
        "version": 1, "dtype": "uint16", "num_tokens": num_tokens, "num_documents": 1, "vocab_size": vocab_size,
        "eos_token": "<eos>", "eos_token_id": 0, "sources": [], "source_bytes": 0, "source_sha256": "", "settings": {},
        "tokens_sha256": hashlib.sha256(tokens.tobytes()).hexdigest(), "tokenizer_sha256": "",
    }  # fmt: skip
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
