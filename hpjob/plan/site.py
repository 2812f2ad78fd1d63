"""Constants that were measured at a site; they replace the packaged ones.

A YAML file, read from ``--site FILE``, else from the file that ``HPJOB_SITE`` names, else from
``~/.config/hpjob/site.yaml``::

    version: 1
    basis: measured            # or rehearsed: single ranks ran alone
    note: microbenchmarks of March
    gpus:
      H100: {gemm: 0.70, memory: 0.90, attention: [0.55, 0.46]}    # parts of the printed peaks that kernels reach
    links: {island_gb_s: 340, network_gb_s: 330}    # a GPU inside an island, all NICs of a node; large collectives
    layers:                    # seconds of one decoder layer and microbatch, without communication
      - {hidden: 8192, ffn: 28672, tokens: 4096, seq: 4096, tp: 4, forward_s: 0.0051, backward_s: 0.0102}
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from hpjob.core import yaml_text
from hpjob.core.errors import UserInputError
from hpjob.core.schema import Persisted, parse
from hpjob.plan.hardware import Hardware, MeasuredLayer
from hpjob.recipe.model import Precision, SequenceParallelismMode

_ENVIRONMENT = "HPJOB_SITE"
_DEFAULT = Path("~/.config/hpjob/site.yaml")

Share = Annotated[float, Field(gt=0, le=1.2)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(gt=0)]


class SiteGpu(Persisted):
    """Parts of the printed peaks that kernels of one kind of GPU reach; what is left out stays as packaged."""

    gemm: Share | None = None
    memory: Share | None = None
    attention: tuple[Share, Share] | None = None
    """Fused attention, forward and backward; causal work only."""


class SiteLinks(Persisted):
    """What large collectives reach, per direction."""

    island_gb_s: Positive | None = None
    """A GPU inside an island."""
    network_gb_s: Positive | None = None
    """All NICs of a node together."""
    island_latency_us: Positive | None = None
    network_latency_us: Positive | None = None


class SiteLayer(Persisted):
    """Seconds of one decoder layer for one microbatch on one rank, without any communication."""

    hidden: Count
    ffn: Count
    tokens: Count
    """Of one rank, before tensor parallelism."""
    seq: Count
    tp: Count = 1
    sp: Count = 1
    ep: Count = 1
    sequence_mode: SequenceParallelismMode | None = None
    precision: Precision = "bf16"
    forward_s: Positive
    backward_s: Positive
    """All gradients."""


class Site(Persisted):
    """Everything that a site file says."""

    version: Literal[1] = 1
    basis: Literal["measured", "rehearsed"] = "measured"
    note: str = ""
    gpus: dict[str, SiteGpu] = Field(default_factory=dict)
    """Pattern of the GPU's name -> its constants; the first one that matches counts."""
    links: SiteLinks = SiteLinks()
    layers: tuple[SiteLayer, ...] = ()

    def constants(self, gpu_model: str) -> SiteGpu:
        """Return the constants of a kind of GPU; an unnamed one has none."""
        found = (gpu for name, gpu in self.gpus.items() if re.search(re.escape(name), gpu_model, re.IGNORECASE))
        return next(found, SiteGpu())


def load_site(path: str | Path) -> Site:
    """Read a site file.

    Raises:
        UserInputError: It is missing or holds something else; all problems at once.
    """
    file = Path(path).expanduser()
    source = f"site file {path}"
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserInputError(f"{source}: cannot be read: {error}", hint="give a readable UTF-8 file") from None
    document, refused = yaml_text.load(text, source=source)
    if refused:
        raise UserInputError("\n".join(refused), hint="correct the lines above")
    return parse(Site, document, source=source)


def default_site(environment: Mapping[str, str] = os.environ) -> tuple[Site, str] | None:
    """Return the site file of this user with its path, or None when there is none."""
    named = environment.get(_ENVIRONMENT, "")
    path = named or str(_DEFAULT)
    if not named and not _DEFAULT.expanduser().is_file():
        return None
    return load_site(path), path


def with_site(hardware: Hardware, site: Site, gpu_model: str) -> tuple[Hardware, tuple[str, ...]]:
    """Return the hardware with measured constants, and what was replaced, in words.

    A measured constant is taken as it is: the fitted correction of its packaged counterpart is switched off.
    """
    found, links = site.constants(gpu_model), site.links
    gpu, fit, words = hardware.gpu, hardware.fit, list[str]()
    if found.gemm is not None:
        gpu = replace(gpu, gemm=found.gemm)
        fit = fit.updated({"gemm": 1.0, "gemm_a100": 1.0, "gemm_h100": 1.0, "gemm_b200": 1.0})
        words.append(f"gemm {found.gemm:g}")
    if found.memory is not None:
        gpu, fit = replace(gpu, memory=found.memory), fit.updated({"traffic": 1.0})
        words.append(f"memory {found.memory:g}")
    if found.attention is not None:
        gpu = replace(gpu, flash1=found.attention, flash2=found.attention, cudnn=found.attention)
        fit = fit.updated({"attention": 1.0})
        words.append(f"attention {found.attention[0]:g} and {found.attention[1]:g}")
    hardware = replace(hardware, gpu=gpu, fit=fit)
    if links.island_gb_s is not None:
        fit = hardware.fit.updated({"island": 1.0})
        hardware = replace(hardware, island_bandwidth=links.island_gb_s * 1e9, fit=fit)
        words.append(f"island {links.island_gb_s:g} GB/s")
    if links.network_gb_s is not None:
        fit = hardware.fit.updated({"network": 1.0})
        hardware = replace(hardware, nic_bandwidth=links.network_gb_s * 1e9, fit=fit)
        words.append(f"network {links.network_gb_s:g} GB/s a node")
    if links.island_latency_us is not None:
        hardware = replace(hardware, island_latency=links.island_latency_us * 1e-6)
    if links.network_latency_us is not None:
        hardware = replace(hardware, nic_latency=links.network_latency_us * 1e-6)
    if site.layers:
        measured = {_key(layer): MeasuredLayer(layer.forward_s, layer.backward_s) for layer in site.layers}
        hardware = replace(hardware, measured_layers=measured)
        words.append(f"{len(measured)} measured layers")
    return hardware, tuple(words)


def _key(layer: SiteLayer) -> tuple[object, ...]:
    return (
        layer.hidden,
        layer.ffn,
        layer.tokens,
        layer.seq,
        layer.tp,
        layer.sp,
        layer.ep,
        layer.sequence_mode,
        layer.precision,
    )
