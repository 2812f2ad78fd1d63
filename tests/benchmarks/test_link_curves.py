"""The line through the times of a link."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.link_curves import fit_line, main, sent_bytes


def test_a_line_is_found_again() -> None:
    points = [(size, 20e-6 + size / 250e9) for size in (1e6, 16e6, 256e6, 1e9)]
    fit = fit_line(points)
    assert fit["latency_us"] == pytest.approx(20.0)
    assert fit["gb_s"] == pytest.approx(250.0)
    assert fit["worst"] < 1e-9


def test_a_latency_is_never_negative() -> None:
    fit = fit_line([(1e6, 1e-6), (1e9, 5e-3)])
    assert fit["latency_us"] == 0.0
    assert fit["gb_s"] > 0


def test_an_all_reduce_sends_each_byte_twice() -> None:
    assert sent_bytes("all_gather", 64.0, 4) == 48.0
    assert sent_bytes("all_reduce", 64.0, 4) == 96.0
    assert sent_bytes("message", 64.0, 4) == 64.0


def test_lines_of_another_tool_are_fitted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bw.txt"
    lines = [f'{{"MiB": {size}, "ag_busbw": 200.0, "rs_busbw": 200.0}}' for size in (64, 256)]
    file.write_text("\n".join(["a warning", *lines]))
    assert main(["--fit", str(file)]) == 0
    assert '"island_gb_s": 200.0' in capsys.readouterr().out
