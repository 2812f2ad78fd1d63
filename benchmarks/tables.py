"""Tables of ``docs/speed.md`` from the JSON of a measurement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def multi_gpu_table(record: Mapping[str, Any]) -> str:
    """Return parity, run checks, speed and whole models of a ``multi_gpu.py`` file as Markdown."""
    parts = (_parity(record), _runs(record), _speed(record), _models(record), _regret(record))
    return "\n\n".join(part for part in parts if part)


def _parity(record: Mapping[str, Any]) -> str:
    lines = ["| layout | precision | loss | gradient | weight | |", "|---|---|---|---|---|---|"]
    for row in [*record.get("parity", []), *record.get("small", [])]:
        figures = " | ".join(_small(row.get(key)) for key in ("loss_rel", "grad_rel", "weight_rel"))
        verdict = "ok" if row["ok"] else _short(row.get("reason") or "too far")
        lines.append(f"| {row['layout']} | {row['precision']} | {figures} | {verdict} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def _runs(record: Mapping[str, Any]) -> str:
    lines = []
    for meshes in record.get("checkpoint", []):
        for row in meshes if isinstance(meshes, list) else [meshes]:
            outcome = _small(row.get("loss_rel")) if row["ok"] else _short(row.get("reason", "too far"))
            lines.append(f"- checkpoint on {row.get('mesh')} (saved by {row.get('resumed_from')}): {outcome}")
    for row in record.get("kill", []):
        outcome = f"{row['seconds']:.1f} s" if "seconds" in row else _short(row["reason"])
        lines.append(f"- one rank killed, the other ended after {outcome}")
    return "\n".join(lines)


def _speed(record: Mapping[str, Any]) -> str:
    head = (
        "sequence",
        "layout",
        "tokens/s per GPU",
        "of one GPU",
        "bound",
        "MFU",
        "peak GiB",
        "predicted",
        "predicted step",
        "error",
    )
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in record.get("speed", []):
        if "tokens_per_s_per_gpu" not in row:
            why = "; ".join(row["refused"]) if "refused" in row else row.get("failed") or row.get("skipped")
            lines.append(f"| {row['seq']:,} | {row['layout']} | {_short(str(why))} |" + " |" * (len(head) - 3))
            continue
        cells = (
            f"{row['seq']:,}",
            row["layout"],
            f"{row['tokens_per_s_per_gpu']:,.0f}",
            _share(row.get("of_one_gpu")),
            _share(row.get("schedule_bound")),
            f"{row['mfu']:.1%}",
            f"{max((gib or 0.0) for gib in row['peak_reserved_gib']):.0f}",
            *_prediction(row),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def _prediction(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return memory, step and error; nothing of other systems."""
    if "predicted_s" not in row:
        return "", "", ""
    memory = f"{row['predicted_gib']:.0f}" if "predicted_gib" in row else ""
    return memory, f"{row['predicted_s']:.3f} s", f"{row['predicted_error']:+.1%}"


def _models(record: Mapping[str, Any]) -> str:
    head = ("model", "layout", "samples/s", "tokens/s per GPU", "MFU", "GiB", "predicted", "step", "error", "share")
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in record.get("models", []):
        if "tokens_per_s_per_gpu" not in row:
            lines.append(f"| {row['work']} | {row['layout']} | {_not_measured(row)} |" + " |" * (len(head) - 3))
            continue
        peaks = [gib for gib in row["peak_reserved_gib"] if gib is not None]
        cells = (
            row["work"],
            f"{row['layout']} ({row['plan']}, recompute {row['recompute']})",
            f"{row['samples_per_s']:.2f}",
            f"{row['tokens_per_s_per_gpu']:,.0f}",
            f"{row['mfu']:.1%}",
            f"{max(peaks):.0f}" if peaks else "",
            f"{row['predicted_gib']:.0f}",
            f"{row['median_step_s']:.3f} s",
            f"{row['predicted_error']:+.1%}",
            f"{row['share']:.2f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def _not_measured(row: Mapping[str, Any]) -> str:
    if "same_as" in row:
        return f"the same as {row['same_as']}"
    return _short("; ".join(row["refused"]) if "refused" in row else str(row.get("failed") or row.get("skipped")))


def _regret(record: Mapping[str, Any]) -> str:
    lines = []
    for row in record.get("regret", []):
        loss = "was not measured" if row["regret"] is None else f"loses {row['regret']:.1%} to it"
        lines.append(f"- {row['work']}: best of {row['tried']} is {row['best']}; the planner's choice {loss}")
    return "\n".join(lines)


def _small(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _short(text: str) -> str:
    return text.strip().splitlines()[-1][:110].replace("|", "/")


def gpu_train_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Return tokens/s, MFU, share of the sustained rate and memory of ``gpu_train.py`` files as Markdown."""
    lines = ["| sequence | variant | tokens/s | MFU | of sustained | peak GiB |", "|---|---|---|---|---|---|"]
    for record in records:
        sustained = sum(record["sustained_tflops"]) / len(record["sustained_tflops"])
        for name, turns in record["variants"].items():
            good = [turn for turn in turns if "failed" not in turn]
            if not good:
                lines.append(f"| {record['seq']:,} | {name} | {_short(turns[0]['failed'])} | | | |")
                continue
            mean = {key: sum(turn[key] for turn in good) / len(good) for key in ("tokens_per_s", "mfu", "tflops")}
            peak = max(turn["peak_gib"] for turn in good)
            lines.append(
                f"| {record['seq']:,} | {name} | {mean['tokens_per_s']:,.0f} | {mean['mfu']:.1%} "
                f"| {mean['tflops'] / sustained:.3f} | {peak:.1f} |"
            )
    return "\n".join(lines)
