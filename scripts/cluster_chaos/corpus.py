"""Token files of random tokens, so that a run needs neither text nor tokenizer."""

from __future__ import annotations

import array
import hashlib
import json
import random
from pathlib import Path

NUM_TOKENS = 100_000
VOCAB_SIZE = 1024


def write_corpus(folder: Path) -> None:
    """Write ``tokens.bin`` and ``meta.json``, the same every time."""
    folder.mkdir()
    source = random.Random(1)
    tokens = array.array("H", (source.randrange(VOCAB_SIZE) for _ in range(NUM_TOKENS)))
    (folder / "tokens.bin").write_bytes(tokens.tobytes())
    meta = {
        "version": 1,
        "dtype": "uint16",
        "num_tokens": NUM_TOKENS,
        "num_documents": 1,
        "vocab_size": VOCAB_SIZE,
        "eos_token": "<eos>",
        "eos_token_id": 0,
        "sources": [],
        "source_bytes": 0,
        "source_sha256": "",
        "settings": {},
        "tokens_sha256": hashlib.sha256(tokens.tobytes()).hexdigest(),
        "tokenizer_sha256": "",
    }
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
