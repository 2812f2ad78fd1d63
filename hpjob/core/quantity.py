"""Quantities as people write them: time limits.

YAML 1.1 reads ``1:30`` as 90, so a bare integer is refused for a time limit: nobody can tell
whether 90 was meant as minutes (Slurm's habit) or came from a misread clock.
"""

from __future__ import annotations

import re

_UNIT_S = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_SUFFIXED = re.compile(r"(?:\d+(?:\.\d+)?\s*(?:min|[smhd])\s*)+", re.ASCII)
_SUFFIXED_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(min|[smhd])", re.ASCII)
_SLURM_DAYS = re.compile(r"(\d+)-(\d{1,2})(?::(\d{1,2}))?(?::(\d{1,2}))?", re.ASCII)
_LONGEST_S = 10 * 366 * 86400
_CLOCK = re.compile(r"(\d+):(\d{2}):(\d{2})", re.ASCII)


def parse_duration_s(value: object) -> int:
    """Read a duration as ``"90m"``, ``"1h30m"``, ``"01:30:00"`` or ``"2-12:00:00"`` in seconds.

    Raises:
        ValueError: A bare number, an ambiguous form such as ``1:30``, no duration at all, or more than ten years.
    """
    seconds = _duration_s(value)
    if seconds > _LONGEST_S:
        raise ValueError("is longer than ten years: write what one attempt may take, such as 12h or 7-00:00:00")
    return round(seconds)


def _duration_s(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, str):
        raise ValueError('needs a unit: write "90m", "1h30m" or "01:30:00" in quotes')
    text = value.strip()
    if _SUFFIXED.fullmatch(text):
        return sum(float(n) * _UNIT_S[u] for n, u in _SUFFIXED_PART.findall(text))
    if match := _SLURM_DAYS.fullmatch(text):
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if match := _CLOCK.fullmatch(text):
        hours, minutes, seconds = (int(part) for part in match.groups())
        return (hours * 60 + minutes) * 60 + seconds
    raise ValueError('is no clear duration: write "90m", "1h30m" or "01:30:00" in quotes')


def slurm_time(seconds: int) -> str:
    """Write seconds the way sbatch reads them: ``D-HH:MM:SS``, rounded up to a whole minute."""
    minutes = -(-seconds // 60)
    days, rest = divmod(minutes, 24 * 60)
    hours, minutes = divmod(rest, 60)
    clock = f"{hours:02d}:{minutes:02d}:00"
    return f"{days}-{clock}" if days else clock


def duration(seconds: float) -> str:
    """Write seconds as ``45 s``, ``12 min`` or ``3 h 20 min``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min" if minutes >= 5 else f"{minutes} min {rest} s" if minutes else f"{rest} s"
