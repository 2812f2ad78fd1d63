"""The layouts that are compared, for any number of GPUs, as parity cases write them."""

from __future__ import annotations

_SG = "enable_sequence_parallelism=true sequence_parallelism_mode=split_gather"
_RING = "enable_sequence_parallelism=true sequence_parallelism_mode=ring"


def single_axis(n: int) -> dict[str, str]:
    """Return every way to spread a model over one axis of ``n`` GPUs, by name."""
    # The order is that of interest, should time run out.
    layouts = {f"dp{n} zero {stage}": f"dp_size={n} zero_stage={stage}" for stage in (1, 3)}
    layouts |= {
        f"tp{n}": f"tp_size={n} zero_stage=0",
        f"tp{n} split_gather": f"tp_size={n} zero_stage=0 {_SG}",
        f"tp{n} ring": f"tp_size={n} zero_stage=0 {_RING}",
        f"pp{n} 1f1b": f"pp_size={n} zero_stage=0 pp_style=1f1b",
        f"pp{n} interleaved": f"pp_size={n} zero_stage=0 pp_style=interleaved num_model_chunks=2",
        f"pp{n} zbv": f"pp_size={n} zero_stage=0 pp_style=zbv num_model_chunks=2",
        f"sp{n} all_to_all": f"sp_size={n} zero_stage=1 {_sp('all_to_all')}",
        f"sp{n} ring_attn": f"sp_size={n} zero_stage=1 {_sp('ring_attn')}",
    }
    return layouts | {f"dp{n} zero {stage}": f"dp_size={n} zero_stage={stage}" for stage in (0, 2)}


def mixed(n: int) -> dict[str, str]:
    """Return layouts with several axes; none for fewer than four GPUs."""
    layouts: dict[str, str] = {}
    if n >= 4:
        layouts[f"tp2 dp{n // 2} zero 1"] = f"tp_size=2 zero_stage=1 {_SG}"
        layouts[f"pp2 dp{n // 2} zero 1"] = "pp_size=2 zero_stage=1 pp_style=1f1b"
        layouts[f"tp2 dp{n // 2} zero 3"] = "tp_size=2 zero_stage=3"
        layouts[f"dp{n} zero 2 in pairs"] = f"dp_size={n} zero_stage=2 zero_shard_size=2"
        layouts[f"sp2 ring_attn dp{n // 2}"] = f"sp_size=2 zero_stage=1 {_sp('ring_attn')}"
    if n >= 8:
        layouts[f"tp2 pp2 dp{n // 4} zero 1"] = f"tp_size=2 pp_size=2 zero_stage=1 pp_style=1f1b {_SG}"
        layouts[f"tp4 pp2 dp{n // 8}"] = (
            f"tp_size=4 pp_size=2 zero_stage=1 pp_style=interleaved num_model_chunks=2 {_SG}"
        )
        layouts[f"tp2 sp2 all_to_all dp{n // 4}"] = f"tp_size=2 sp_size=2 zero_stage=1 {_sp('all_to_all')}"
    return layouts


def expert_parallel(n: int) -> dict[str, str]:
    """Return layouts of a mixture of experts."""
    return {f"ep{n}": f"ep_size={n} dp_size={n} zero_stage=1"}


def _sp(mode: str) -> str:
    return f"enable_sequence_parallelism=true sequence_parallelism_mode={mode}"
