"""One row of a table of published runs as something that the planner can price.

Measured columns (times, rates, memory, outcome) are read only in ``measured.py``; unknown layout fields
become several possible layouts, never a default that nobody published.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import Literal

from hpjob.plan.constants import Framework, framework, known_model
from hpjob.plan.layout import Layout
from hpjob.plan.published.hardware_names import machine_for_row
from hpjob.plan.shape import Latent, Shape
from hpjob.recipe.model import PipelineStyle, Precision, RecomputePolicy
from hpjob.topology.model import MachineType

Row = Mapping[str, str]
_GATED = re.compile(r"llama|qwen|mistral|mixtral|deepseek|yi-|gemma|baichuan|internlm|aquila|nemo-?12", re.IGNORECASE)
_LEARNED_POSITIONS = re.compile(r"gpt-?[0-9]|gpt-h|opt|mt-nlg", re.IGNORECASE)
_NO_ROTARY = re.compile(r"gpt-?[0-9]|gpt-h|opt|mt-nlg|bloom|mpt", re.IGNORECASE)
_TIED = re.compile(r"gpt-?[0-9]|gpt-h|mt-nlg|bloom|mpt|opt", re.IGNORECASE)
_WITH_EXPERTS = re.compile(r"moe|\d+x\d+(\.\d+)?b|-a\d+(\.\d+)?b", re.IGNORECASE)
_TYPICAL_HEAD = 128


class Unpredictable(Exception):
    """A row that cannot be priced; the text is the reason that the listing shows."""


@dataclass(frozen=True)
class Case:
    """A row without its measured columns."""

    row_id: str
    family: str
    group: tuple[str, ...]
    """Rows that differ only in layout share it."""
    shape: Shape
    layouts: tuple[Layout, ...]
    """What the published fields allow; a tuned run is taken to be the fastest that fits."""
    machine: MachineType
    habits: Framework
    num_gpus: int
    global_batch: int

    @property
    def tokens(self) -> int:
        return self.global_batch * self.layouts[0].seq


def _with_notes(habits: Framework, note: str) -> Framework:
    """Overlap that a table's remarks switch on or off."""
    if re.search(r"overlap (paths )?(off|disabled)", note):
        return replace(habits, dp_overlap=0.0, tp_overlap=0.0, pp_overlap=0.0)
    if re.search(r"overlap (on|enabled)", note):
        return replace(habits, dp_overlap=0.9, tp_overlap=0.7, pp_overlap=0.7)
    return habits


def number(row: Row, name: str) -> int | None:
    """Return a whole number of a column, or None when it is blank or no number."""
    text = row.get(name, "").strip()
    try:
        value = int(float(text)) if text else None
    except (ValueError, OverflowError):
        return None
    return value if value is not None and value >= 0 else None


def real(row: Row, name: str) -> float | None:
    """Return a number of a column, or None when it is blank or no number."""
    text = row.get(name, "").strip()
    try:
        value = float(text) if text else None
    except ValueError:
        return None
    return value if value is not None and isfinite(value) else None


def read_case(row: Row) -> Case:
    """Read a row.

    Raises:
        Unpredictable: A field that no physics can do without is missing or contradicts others.
    """
    if row.get("flag", "").strip():
        raise Unpredictable(f"flagged: {row['flag'].strip()}")
    num_gpus = number(row, "n_gpus")
    if not num_gpus:
        raise Unpredictable("number of GPUs not published")
    seq = number(row, "seq_len")
    if not seq:
        raise Unpredictable("sequence length not published")
    machine = machine_for_row(row.get("gpu", ""), number(row, "gpus_per_node") or 0, row.get("interconnect", ""))
    if machine is None:
        raise Unpredictable(f"GPU not known: {row.get('gpu', '')}")
    habits = _with_notes(framework(row.get("framework", "")), row.get("note", ""))
    shape = read_shape(row)
    layouts = _layouts(row, shape, habits, seq, num_gpus)
    batch = number(row, "global_batch") or layouts[0].global_batch
    same = ("family", "model", "n_layers", "hidden", "n_heads", "gpu", "n_gpus", "seq_len", "global_batch", "precision")
    group = tuple(row.get(name, "") for name in same)
    return Case(
        row_id=row.get("id", ""),
        family=row.get("family", ""),
        group=group,
        shape=shape,
        layouts=tuple(layouts),
        machine=machine,
        habits=habits,
        num_gpus=num_gpus,
        global_batch=batch,
    )


def read_shape(row: Row) -> Shape:
    """Read the sizes of a row's model; names fill in what tables leave out (experts, latent attention)."""
    name = row.get("model", "")
    known = known_model(name)
    hidden, vocab = number(row, "hidden"), number(row, "vocab")
    params = real(row, "n_params")
    if not hidden or not vocab:
        raise Unpredictable("model sizes not published")
    gated = bool(_GATED.search(name))
    ffn = number(row, "ffn_hidden") or known.get("ffn") or (0 if gated else 4 * hidden)
    if not ffn:
        raise Unpredictable("MLP width not published")
    heads = number(row, "n_heads") or _typical_heads(hidden)
    if heads > hidden:
        raise Unpredictable(f"{heads} heads of a hidden size of {hidden}")
    layers = number(row, "n_layers")
    per_layer = 4 * hidden * hidden + (3 if gated else 2) * hidden * ffn
    if not layers and params:
        layers = max(1, round((params - vocab * hidden) / per_layer))
    if not layers:
        raise Unpredictable("number of layers not published")
    latent = known.get("latent")
    experts = int(known.get("num_experts", 0))
    if not experts and ((number(row, "ep") or 1) > 1 or _WITH_EXPERTS.search(name)):
        raise Unpredictable("experts not published")
    dense_layers = int(known.get("dense_layers", 0))
    if "cut" in name.lower():
        # Models shortened for one node keep a single dense layer.
        dense_layers = min(1, dense_layers)
    return Shape(
        num_layers=layers,
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        kv_heads=number(row, "n_kv_heads") or heads,
        head_dim=int(known.get("head_dim", 0)) or hidden // heads,
        vocab=vocab,
        gated=gated,
        tied=bool(_TIED.search(name)),
        rotary=not _NO_ROTARY.search(name),
        rms_norm=gated,
        num_experts=experts,
        experts_per_token=int(known.get("experts_per_token", 0)),
        shared_experts=int(known.get("shared_experts", 0)),
        dense_layers=dense_layers,
        dense_ffn=int(known.get("dense_ffn", 0)),
        learned_positions=(number(row, "seq_len") or 0) if _LEARNED_POSITIONS.search(name) else 0,
        latent=Latent(**latent) if latent else None,
    )


def _typical_heads(hidden: int) -> int:
    """Heads of about 128 elements when a table does not give them."""
    return next(count for count in range(max(1, hidden // _TYPICAL_HEAD), 0, -1) if hidden % count == 0)


def _layouts(row: Row, shape: Shape, habits: Framework, seq: int, num_gpus: int) -> list[Layout]:
    tp, pp = number(row, "tp"), number(row, "pp")
    if not tp or not pp:
        raise Unpredictable("layout not published")
    cp, ep = number(row, "cp") or 1, number(row, "ep") or 1
    dp = number(row, "dp") or num_gpus // (tp * pp * cp)
    if dp * tp * pp * cp != num_gpus:
        raise Unpredictable(f"dp x tp x pp x cp is not the number of GPUs {num_gpus}")
    if shape.num_layers < pp:
        raise Unpredictable("fewer layers than pipeline stages")
    precision, fp8 = _precision(row)
    found = []
    for microbatch, count in _batches(row, dp):
        for style, chunks in _schedules(row, shape, habits, pp, count):
            for recompute in _recompute(row):
                for sharded in _sharded(row, tp, habits):
                    found.append(
                        Layout(
                            tp=tp,
                            pp=pp,
                            dp=dp,
                            sp=cp,
                            ep=ep,
                            num_microbatches=count,
                            microbatch=microbatch,
                            seq=seq,
                            sequence_mode="ring_attn" if cp > 1 else "split_gather" if sharded else None,
                            tp_sharded=sharded,
                            zero=_zero(row, habits),
                            style=style,
                            chunks=chunks,
                            recompute=recompute,
                            precision=precision,
                            fp8=fp8,
                            flash=_flash(row, habits),
                        )
                    )
    if not found:
        raise Unpredictable("global batch does not divide by dp")
    return found


def _precision(row: Row) -> tuple[Precision, bool]:
    text = row.get("precision", "").lower()
    if "fp4" in text:
        raise Unpredictable("4-bit precision")
    if "fp8" in text:
        return "bf16", True
    if "fp32" in text or "tf32" in text:
        raise Unpredictable("fp32 precision")
    return ("fp16" if text.startswith("fp16") else "bf16"), False


def _batches(row: Row, dp: int) -> list[tuple[int, int]]:
    """Microbatch sizes and counts that the published batch allows."""
    batch, microbatch = number(row, "global_batch"), number(row, "micro_batch")
    if microbatch and not batch:
        return [(microbatch, 1)]
    if not batch:
        raise Unpredictable("batch not published")
    if microbatch:
        return [(microbatch, max(1, -(-batch // (dp * microbatch))))]
    per_rank = batch // dp
    return [(size, per_rank // size) for size in (1, 2, 4, 8) if per_rank and per_rank % size == 0]


def _schedules(row: Row, shape: Shape, habits: Framework, pp: int, count: int) -> list[tuple[PipelineStyle, int]]:
    if pp == 1:
        return [("1f1b", 1)]
    name, chunks = row.get("pp_schedule", "").lower(), number(row, "virtual_pp")
    if name.startswith(("zb", "v-", "dualpipe")):
        return [("zbv", 2)] if shape.num_layers >= 2 * pp else [("1f1b", 1)]
    if chunks and chunks > 1 and shape.num_layers >= pp * chunks:
        return [("interleaved", chunks)] if count % pp == 0 else [("1f1b", 1)]
    if chunks == 1 or "1f1b" in name or not habits.interleaves:
        return [("1f1b", 1)]
    options: list[tuple[PipelineStyle, int]] = [("1f1b", 1)]
    if count % pp == 0:
        most = -(-shape.num_layers // pp)
        options += [("interleaved", v) for v in range(2, most + 1) if most % v == 0 and shape.num_layers >= pp * v]
    return options


def _recompute(row: Row) -> list[RecomputePolicy]:
    text = row.get("recompute", "").strip().lower()
    if not text:
        return ["none", "selective", "full"]
    if text in ("none", "0", "no", "off", "false", "disabled"):
        return ["none"]
    if "full" in text or "every" in text:
        return ["full"]
    return ["selective"]


def _sharded(row: Row, tp: int, habits: Framework) -> list[bool]:
    if tp == 1:
        return [False]
    text = row.get("sequence_parallel", "").strip()
    if text in ("0", "1"):
        return [text == "1"]
    return [habits.attention != "unfused"]


def _zero(row: Row, habits: Framework) -> Literal[0, 1, 2, 3]:
    stages: dict[int | None, Literal[0, 1, 2, 3]] = {0: 0, 1: 1, 2: 2, 3: 3}
    return stages.get(number(row, "zero_stage"), habits.default_zero)


def _flash(row: Row, habits: Framework) -> bool:
    text = row.get("flash_attention", "").strip().lower()
    if text in ("0", "false", "no", "none"):
        return False
    return habits.attention != "unfused" if not text else True
