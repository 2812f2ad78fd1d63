"""The attempts of a run as lines for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from hpjob.core.hostlist import fold
from hpjob.core.quantity import duration
from hpjob.report.timeline import Accounting, AttemptSummary

_SHOWN = 12


def accounting_line(account: Accounting) -> str:
    """Write where the time went, such as ``93 % of 2 h 10 min on nodes, 25 min in the queue, 0 steps lost``."""
    share = "?" if account.goodput is None else f"{100 * account.goodput:.0f}"
    lost = f"{account.steps_lost} step{'' if account.steps_lost == 1 else 's'} lost"
    return f"{share} % of {duration(account.held_s)} on nodes, {duration(account.queued_s)} in the queue, {lost}"


def attempt_lines(attempts: Sequence[AttemptSummary], now: float) -> list[str]:
    """Write one line an attempt, the newest last; of very many only the newest."""
    rows = [_row(attempt, now) for attempt in attempts[-_SHOWN:]]
    widths = [max(len(row[column]) for row in rows) for column in range(4)] if rows else []
    lines = [f"  ({len(attempts) - _SHOWN} earlier ones: --json)"] if len(attempts) > _SHOWN else []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append("  " + "  ".join([*cells, row[4]]).rstrip())
    return lines


def _row(attempt: AttemptSummary, now: float) -> tuple[str, str, str, str, str]:
    end = now if attempt.ended_at is None else attempt.ended_at
    waited = "" if attempt.queued_s is None else f"waited {duration(attempt.queued_s)}, "
    steps = "no step" if attempt.first_step is None else f"steps {attempt.first_step}-{attempt.last_step}"
    why = attempt.why + (f"; then without {fold(attempt.left_out)}" if attempt.left_out else "")
    nodes = fold(attempt.nodes) if attempt.nodes else "?"
    return str(attempt.index), nodes, f"{waited}ran {duration(end - attempt.started_at)}", steps, why
