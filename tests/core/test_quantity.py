"""Durations: what is clear is read, anything else refused."""

from __future__ import annotations

import pytest

from hpjob.core.quantity import parse_duration_s


def test_clear_durations_are_read() -> None:
    for text, seconds in (("90m", 5400), ("1h30m", 5400), ("01:30:00", 5400), ("2-12:00:00", 216_000)):
        assert parse_duration_s(text) == seconds


@pytest.mark.parametrize("value", ["", "0", "90", "1:30", "-5m", "1e3h", "\u0663h", "\u0663:00:00", 90, True])
def test_anything_else_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="write"):
        parse_duration_s(value)
