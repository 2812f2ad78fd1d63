"""Efficiencies of GPUs, habits of frameworks and fitted corrections, read from packaged data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from importlib.resources import files
from typing import Any, Literal

from hpjob.core import yaml_text

FusionLevel = Literal["eager", "fused", "compiled"]


@dataclass(frozen=True, slots=True)
class GpuConstants:
    """Fractions of the printed peaks that kernels of one kind of GPU reach."""

    name: str
    num_sms: int
    gemm: float
    flash1: tuple[float, float]
    flash2: tuple[float, float]
    memory: float
    cudnn: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Framework:
    """Habits of a framework; ``data/frameworks.yaml`` says what each field means."""

    name: str
    layer_cpu_ms: float
    fused: FusionLevel
    attention: Literal["flash1", "flash2", "cudnn", "unfused"]
    dropout: bool
    gradient_bytes: float
    gradients: Literal["buffer", "lazy"]
    bf16_sum_bytes: float
    shard_bytes: float
    wgrad_bytes: float
    sharded_wgrad_bytes: float
    sharded_from_zero: Literal[1, 2]
    dp_overlap: float
    tp_overlap: float
    pp_overlap: float
    gather_bytes: float
    reduce_bytes: float
    logits_bytes: float
    vocabulary_multiple: int
    gathered_inputs: float
    update_bytes: float
    fragmentation: float
    buffers_gib: float
    zero3_weight_bytes: float
    copy_bytes: float
    stage_buffers: float
    selective: Literal["attention", "half"]
    slack: float
    sharded_slack: float
    default_zero: Literal[0, 1, 2, 3]
    interleaves: bool

    def gradient_traffic(self, zero: int) -> float:
        """Return the bytes moved for a parameter and microbatch to add its gradient to a sum, at a ZeRO stage."""
        return self.sharded_wgrad_bytes if zero >= self.sharded_from_zero else self.wgrad_bytes

    @property
    def is_own(self) -> bool:
        """Whether it is the runtime of this project."""
        return self.name.startswith("hpjob")


@dataclass(frozen=True, slots=True)
class Calibration:
    """Corrections with their physical starting values; a fit or a site's measurements replace them."""

    gemm: float = 1.0
    gemm_a100: float = 1.0
    gemm_h100: float = 1.0
    gemm_b200: float = 1.0
    tail_waves: float = 0.4
    """Idle part of the last wave of tiles."""
    misaligned: float = 0.10
    """Slow-down of a product for every halving of its alignment below 64 elements."""
    attention: float = 1.0
    """Efficiency of fused attention."""
    scores: float = 1.0
    """Traffic of the score matrix of unfused attention."""
    traffic: float = 1.0
    """Traffic of element-wise kernels."""
    host: float = 1.0
    """Host time to issue kernels."""
    island: float = 0.75
    """Part of the printed bandwidth that collectives reach inside an island."""
    network: float = 0.75
    """The same between nodes."""
    hop: float = 1.0
    """Time of a transfer between pipeline stages."""
    jitter: float = 0.004
    """Part of a step lost for every doubling of the nodes that must wait for each other."""
    step_ms: float = 5.0
    """Host work of a step outside the layers."""

    def updated(self, values: Mapping[str, float]) -> Calibration:
        """Return a copy with some values replaced."""
        return replace(self, **dict(values))


CALIBRATION_NAMES = tuple(field.name for field in fields(Calibration))


@lru_cache(maxsize=1)
def calibration() -> Calibration:
    """Return the packaged corrections."""
    return Calibration().updated(_data("calibration")["fitted"])


def held_out_error() -> float:
    """Return the mean relative error of step times on families of runs that no fit has seen."""
    return float(_data("calibration")["held_out_mape"])


@lru_cache(maxsize=64)
def gpu_constants(gpu_model: str) -> GpuConstants:
    """Return the efficiencies of a kind of GPU; an unknown one gets those of an A100."""
    entries = _data("gpus")["gpus"]
    found = _first_match(entries, gpu_model) or _first_match(entries, "A100") or {}
    values = {key: value for key, value in found.items() if key not in ("match", "source")}
    values.setdefault("cudnn", values["flash2"])
    return GpuConstants(name=str(found["match"]).split("|", maxsplit=1)[0].lower(), **values)


@lru_cache(maxsize=64)
def framework(name: str) -> Framework:
    """Return the habits of a framework; an unknown one gets common habits."""
    found = _first_match(_data("frameworks")["frameworks"], name) or {}
    values = {key: value for key, value in found.items() if key not in ("match", "source")}
    return Framework(name=name, **values)


@lru_cache(maxsize=256)
def known_model(name: str) -> dict[str, Any]:
    """Return sizes that tables leave out of a model with experts, or an empty mapping."""
    return _first_match(_data("known_models")["models"], name) or {}


def _first_match(entries: list[dict[str, Any]], name: str) -> dict[str, Any] | None:
    return next((entry for entry in entries if re.search(str(entry["match"]), name, re.IGNORECASE)), None)


@lru_cache(maxsize=8)
def _data(name: str) -> dict[str, Any]:
    path = files("hpjob.plan") / "data" / f"{name}.yaml"
    document, _ = yaml_text.load(path.read_text(encoding="utf-8"), source=f"{name}.yaml")
    return dict(document)
