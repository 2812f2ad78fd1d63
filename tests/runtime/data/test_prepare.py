"""Text to token files: exact, repeatable, and careful with what is already there."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from typer.testing import CliRunner

from hpjob.cli.app import app
from hpjob.core.errors import EnvironmentProblemError, UserInputError
from hpjob.recipe.data_files import read_meta
from hpjob.runtime.data import sources as sources_module
from hpjob.runtime.data.prepare import PrepareOptions, prepare

TEXTS = {
    "a.py": "def main() -> None:\n    print('hello')\n" * 30,
    "sub/b.py": "# Grüße, 世界 🙂\nvalue = 1\n" * 20,
    "c.txt": "plain words, plain words\n" * 10,
}
SMALL = PrepareOptions(vocab_size=300)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    for name, text in TEXTS.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "image.bin").write_bytes(b"\x89PNG\0\0")
    (folder / "latin1.txt").write_bytes("Grüße".encode("latin-1"))
    (folder / "empty.txt").touch()
    return folder


def decode(out: Path) -> str:
    meta = read_meta(out)
    tokens = np.fromfile(out / "tokens.bin", dtype=meta.dtype)
    return Tokenizer.from_file(str(out / "tokenizer.json")).decode(tokens.tolist(), skip_special_tokens=False)


def contents(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir()}


def test_tokens_decode_to_the_documents_in_order(source: Path, tmp_path: Path) -> None:
    meta = prepare([source], tmp_path / "out", SMALL)
    assert decode(tmp_path / "out") == "".join(TEXTS[n] + "<|endoftext|>" for n in ("a.py", "c.txt", "sub/b.py"))
    assert (meta.num_documents, meta.eos_token_id) == (3, 0)
    assert meta.vocab_size <= 300
    assert meta.source_bytes == sum(len(text.encode()) for text in TEXTS.values())


def test_pieces_of_a_long_document_join_without_a_seam(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources_module, "_PIECE_BYTES", 64)
    (source / "one-line.txt").write_text("é" * 500)
    prepare([source], tmp_path / "out", SMALL)
    expected = {**TEXTS, "one-line.txt": "é" * 500}
    order = ("a.py", "c.txt", "one-line.txt", "sub/b.py")
    assert decode(tmp_path / "out") == "".join(expected[name] + "<|endoftext|>" for name in order)


def test_same_input_gives_the_same_bytes_and_other_input_does_not(source: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        prepare([source], tmp_path / name, SMALL)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    (source / "c.txt").write_text("other words\n")
    prepare([source], tmp_path / "three", SMALL)
    assert contents(tmp_path / "one")["tokens.bin"] != contents(tmp_path / "three")["tokens.bin"]


def test_suffix_and_limit_choose_the_text(source: Path, tmp_path: Path) -> None:
    limit = len(TEXTS["a.py"]) + 40
    options = PrepareOptions(vocab_size=300, suffixes=(".py",), limit_bytes=limit)
    prepare([source], tmp_path / "out", options)
    start = TEXTS["sub/b.py"].encode()[:40]
    cut = start[: start.rfind(b"\n") + 1].decode()
    assert decode(tmp_path / "out") == f"{TEXTS['a.py']}<|endoftext|>{cut}<|endoftext|>"


def test_given_tokenizer_is_used(source: Path, tmp_path: Path) -> None:
    prepare([source], tmp_path / "first", SMALL)
    tokenizer = tmp_path / "first" / "tokenizer.json"
    prepare([source], tmp_path / "second", PrepareOptions(tokenizer=tokenizer))
    assert contents(tmp_path / "first")["tokens.bin"] == contents(tmp_path / "second")["tokens.bin"]


def test_large_vocabulary_needs_four_bytes_a_token(source: Path, tmp_path: Path) -> None:
    prepare([source], tmp_path / "first", SMALL)
    tokenizer = Tokenizer.from_file(str(tmp_path / "first" / "tokenizer.json"))
    tokenizer.add_tokens([f"<{index}>" for index in range(1 << 16)])
    tokenizer.save(str(tmp_path / "large.json"))
    meta = prepare([source], tmp_path / "out", PrepareOptions(tokenizer=tmp_path / "large.json"))
    assert meta.dtype == "uint32"
    assert (tmp_path / "out" / "tokens.bin").stat().st_size == 4 * meta.num_tokens
    assert "Grüße, 世界" in decode(tmp_path / "out")


def test_existing_result_is_kept_replaced_only_by_force_and_foreign_folders_never(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare([source], out, SMALL)
    before = (out / "tokens.bin").stat().st_mtime_ns
    prepare([source], out, SMALL)
    assert (out / "tokens.bin").stat().st_mtime_ns == before

    other = PrepareOptions(vocab_size=280)
    with pytest.raises(UserInputError, match="other sources or settings") as refused:
        prepare([source], out, other)
    assert "--force" in refused.value.hint
    assert prepare([source], out, other, force=True).settings["vocab_size"] == 280

    for foreign in (source, source / "a.py"):
        with pytest.raises(UserInputError, match="no folder of token files"):
            prepare([source], foreign, SMALL, force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_folder_that_cannot_be_written_leaves_nothing(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentProblemError, match="cannot write"):
        prepare([source], tmp_path / "file" / "out", SMALL)


def test_failure_half_way_leaves_the_old_result(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    prepare([source], out, SMALL)
    before = contents(out)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(EnvironmentProblemError, match="No space left"):
        prepare([source], out, PrepareOptions(vocab_size=280), force=True)
    assert contents(out) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["nowhere"], "nowhere does not exist", "relative"),
        (["{source}", "--suffix", ".rs"], "no text file that ends in .rs", "--suffix"),
        (["{source}", "--vocab-size", "200"], "too small", "257"),
        (["{source}", "--vocab-size", "300", "--tokenizer", "x"], "exclude each other", "leave one"),
        (["{source}", "--tokenizer", "nowhere.json"], "nowhere.json: No such file", "tokenizer.json"),
        (["{source}", "--tokenizer", "{source}/a.py"], "tokenizer", "tokenizer.json"),
        (["{source}", "--limit-mb", "0"], "leaves no text", "positive"),
    ],
)
def test_mistakes_name_what_is_wrong(
    source: Path, tmp_path: Path, arguments: list[str], message: str, hint: str
) -> None:
    filled = [argument.format(source=source) for argument in arguments]
    result = CliRunner().invoke(app, ["data", "prepare", *filled, "--out", str(tmp_path / "out")])
    assert isinstance(result.exception, UserInputError)
    assert message in result.exception.message
    assert hint in result.exception.hint
    assert not (tmp_path / "out").exists()


def test_json_is_the_only_output(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = CliRunner().invoke(
        app, ["data", "prepare", str(source), "--out", str(out), "--vocab-size", "300", "--json"]
    )
    assert result.exit_code == 0
    assert json.loads(result.stdout) == json.loads((out / "meta.json").read_text())
