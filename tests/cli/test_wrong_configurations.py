"""Configurations that cannot run get the sentence a user needs before anything starts, and the nearest legal ones.

Each is tried through ``hpjob plan``, ``hpjob submit --dry-run`` and ``HybridParallelPlugin``.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hpjob.core.errors import UserInputError
from hpjob.recipe.load import load_recipe
from hpjob.runtime.api import HybridParallelPlugin
from tests.cli.conftest import Cli

# A model of 4 layers, 4 heads of which 2 have keys and values, MLP width 384; 16 sequences; 8 ranks.
FREE = ("tp_size", "pp_size", "sp_size", "pp_style", "num_microbatches", "microbatch_size")
BASE = [f"parallel.{name}=auto" for name in FREE] + ["job.gpus_per_node=8"]
MIXTRAL = dict(model_type="mixtral", num_experts=6, num_experts_per_tok=2)


@dataclass(frozen=True)
class Wrong:
    """One configuration.

    Attributes:
        name: In words.
        parallel: Settings by the names that recipe and plugin share.
        sentence: What has to be said.
        nearest: Beginning of a layout that has to be offered; empty = the model itself is at fault.
        model: Changes of the model.
        batch: Sequences of a step.
        plugin: What the plugin says instead, where it has a rule of its own.
    """

    name: str
    parallel: dict[str, Any]
    sentence: str
    nearest: str = ""
    model: dict[str, Any] = field(default_factory=dict)
    batch: int = 16
    plugin: str = ""


def _sp(mode: str, **degrees: int) -> dict[str, Any]:
    return {"enable_sequence_parallelism": True, "sequence_parallelism_mode": mode, **degrees}


def _pipeline(style: str, chunks: int, **settings: int) -> dict[str, Any]:
    return {"tp_size": 1, "pp_size": 2, "pp_style": style, "num_model_chunks": chunks, "microbatch_size": 1, **settings}


TABLE = [
    Wrong("tp and heads", dict(tp_size=8), "4 attention heads do not divide by tp 8", "tp 4"),
    Wrong(
        "the world",
        dict(tp_size=2, pp_size=3, microbatch_size=1),
        "tp 2 x pp 3 = 6 does not divide the world size 8",
        "tp 2",
    ),
    Wrong(
        "tp and key-value heads",
        dict(tp_size=4),
        "6 key-value heads and tp 4: neither is a multiple of the other",
        "tp 2",
        model=dict(num_attention_heads=12, num_key_value_heads=6, hidden_size=768),
    ),
    Wrong(
        "tp and MLP",
        dict(tp_size=4),
        "MLP width 390 does not divide by tp 4",
        "tp 2",
        model=dict(intermediate_size=390),
    ),
    Wrong(
        "pp and layers", dict(pp_size=8, microbatch_size=1), "4 layers are fewer than pp 8 x 1 chunks", "tp 1 · pp 4"
    ),
    Wrong(
        "ep and experts", dict(ep_size=4), "6 experts do not divide by ep 4", "tp 1 · pp 1 · dp 8 · ep 2", model=MIXTRAL
    ),
    Wrong(
        "ep and ranks",
        dict(tp_size=4, ep_size=6),
        "dp 2 x sp 1 does not divide by ep 6",
        "tp 4 · pp 1 · dp 2",
        model=MIXTRAL,
    ),
    Wrong("ep without experts", dict(ep_size=2), "ep 2 needs a model with experts", "tp 1 · pp 1 · dp 8"),
    Wrong(
        "mode without tp",
        _sp("split_gather", tp_size=1),
        "so tp must be above 1",
        "tp ",
        plugin="tp_size must be above 1",
    ),
    Wrong(
        "tp's mode with sp",
        _sp("ring", tp_size=4, sp_size=2),
        "ring has no axis of its own, so sp must be 1, not 2",
        "tp 4 · pp 1 · dp 1 · sp 2, ring_attn",
        plugin="ring shares the tp group: leave sp_size out, not 2",
    ),
    Wrong(
        "Ulysses and heads",
        _sp("all_to_all", tp_size=1, sp_size=8),
        "4 heads do not divide by sp 8 x tp 1 (all_to_all)",
        "tp 1 · pp 1 · dp 1 · sp 8, ring_attn",
    ),
    Wrong(
        "sp that is off",
        dict(sp_size=2, enable_sequence_parallelism=False),
        "sp 2 needs sequence parallelism: all_to_all or ring_attn",
        "tp 1 · pp 1 · dp 8",
        plugin="sp_size=2 needs enable_sequence_parallelism=True",
    ),
    Wrong(
        "the global batch and dp",
        dict(tp_size=1, pp_size=1, sp_size=1),
        "global batch 6 does not divide by dp 8",
        "tp 1 · pp 4 · dp 2",
        batch=6,
    ),
    Wrong(
        "the global batch and microbatches",
        dict(tp_size=2, pp_size=2, sp_size=1, num_microbatches=3, microbatch_size=3),
        "dp 2 x 3 microbatches x 3 = 18 is not the global batch 16",
        "tp 2 · pp 2 · dp 2, 2 microbatches of 4",
    ),
    Wrong(
        "zbv chunks", _pipeline("zbv", 3), "zbv has two model chunks", "tp 1 · pp 2", plugin="num_model_chunks=2, not 3"
    ),
    Wrong("1f1b chunks", _pipeline("1f1b", 2), "one model chunk per rank, not 2", "tp 1 · pp 2", plugin="=1, not 2"),
    Wrong(
        "interleaved chunks",
        _pipeline("interleaved", 1),
        "interleaved needs at least two model chunks",
        "tp 1 · pp 2 · dp 4, interleaved with 2 chunks",
        plugin="needs num_model_chunks of at least 2",
    ),
    Wrong(
        "interleaved microbatches",
        _pipeline("interleaved", 2, num_microbatches=3),
        "interleaved needs microbatches (3) in multiples of pp 2",
        "tp ",
        batch=12,
    ),
    Wrong(
        "experts of a dense family", {}, "llama models have no experts, but", model={**MIXTRAL, "model_type": "llama"}
    ),
    Wrong("a family that needs experts", {}, "mixtral needs num_experts", model=dict(model_type="mixtral")),
    Wrong(
        "more chosen than there are", {}, "8 is more than num_experts 6", model={**MIXTRAL, "num_experts_per_tok": 8}
    ),
    Wrong("fp8", dict(precision="fp8"), "expected 'bf16', 'fp16' or 'fp32', found 'fp8'"),
    Wrong("a loss scale of nothing", dict(precision="fp16", initial_scale=0), "initial_scale: expected more than 0"),
    Wrong("ZeRO", dict(zero_stage=4), "zero_stage: expected 0, 1, 2 or 3"),
]


def _overrides(wrong: Wrong) -> list[str]:
    found = [*BASE, f"training.global_batch_size={wrong.batch}"]
    found += [f"model.{name}={value}" for name, value in wrong.model.items()]
    return found + [f"parallel.{name}={str(value).lower()}" for name, value in wrong.parallel.items()]


@pytest.mark.parametrize("command", [["plan"], ["submit", "--dry-run"]], ids=["plan", "submit"])
@pytest.mark.parametrize("wrong", TABLE, ids=lambda wrong: wrong.name)
def test_the_command_line_refuses(cli: Cli, wrong: Wrong, command: list[str]) -> None:
    sets = [word for override in _overrides(wrong) for word in ("--set", override)]
    result = cli(*command, "--recipe", "tiny", "--machine", "hgx-h100", "--nodes", "1", *sets)
    assert result.code == 2, result.out
    assert wrong.sentence in result.err
    assert f"nearest legal layouts: {wrong.nearest}" in result.err if wrong.nearest else "hint: " in result.err


@pytest.mark.parametrize("wrong", TABLE, ids=lambda wrong: wrong.name)
def test_the_plugin_refuses(wrong: Wrong) -> None:
    recipe = load_recipe("tiny", _overrides(Wrong(wrong.name, {}, "", model=wrong.model, batch=wrong.batch)))
    settings = {"tp_size": 1, "pp_size": 1, "precision": "fp32", **wrong.parallel}
    with pytest.raises(UserInputError) as caught:
        HybridParallelPlugin(**settings).plan(recipe, world_size=8)
    assert (wrong.plugin or wrong.sentence) in caught.value.message
    if wrong.nearest and not wrong.plugin:
        assert "nearest legal layouts: tp " in caught.value.hint


def test_the_same_base_is_legal(cli: Cli) -> None:
    sets = [word for override in BASE for word in ("--set", override)]
    assert cli("plan", "--recipe", "tiny", "--machine", "hgx-h100", "--nodes", "1", *sets).code == 0
    plugin = HybridParallelPlugin(2, 2, microbatch_size=1, precision="fp32")
    assert plugin.plan(load_recipe("tiny", BASE), world_size=8).degrees.dp == 2


def test_weights_that_are_not_there_or_of_another_model_are_refused_before_the_queue(cli: Cli, tmp_path: Path) -> None:
    command = ["submit", "--dry-run", "--recipe", "tiny", "--machine", "hgx-h100", "--nodes", "1"]
    command += [word for override in BASE for word in ("--set", override)]
    missing = cli(*command, "--set", "training.initial_weights=nowhere")
    assert (missing.code, "no such folder" in missing.err) == (2, True)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 96}))
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    other = cli(*command, "--set", f"training.initial_weights={tmp_path}")
    assert (other.code, "has hidden_size 96, the recipe has 128" in other.err) == (2, True)
