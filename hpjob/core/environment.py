"""Settings from environment variables."""

from __future__ import annotations

import os


def seconds_from_env(name: str, default: float) -> float:
    """Return a time from an environment variable, in seconds; what is no number counts as not set."""
    try:
        return float(os.environ.get(name, default))
    except ValueError:
        return default
