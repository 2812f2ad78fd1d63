"""Parameters by the plugin's names: what is refused, what has no effect, and the nearest right ones."""

from __future__ import annotations

from typing import Any

import pytest

from hpjob.core.errors import UserInputError
from hpjob.runtime.api import HybridParallelPlugin
from hpjob.runtime.api.parameters import REFUSED_UNLESS_DEFAULT, WITHOUT_EFFECT, PluginParameters
from hpjob.runtime.api.ranks import ranks_of_environment
from tests.runtime.api.jobs import SMALL


def _refusal(**settings: Any) -> UserInputError:
    with pytest.raises(UserInputError) as caught:
        HybridParallelPlugin(**{"tp_size": 1, "pp_size": 1, **settings})
    return caught.value


@pytest.mark.parametrize(
    ("settings", "sentence", "hint"),
    [
        (dict(zero_stge=1), "zero_stge: unknown key", "did you mean `zero_stage`?"),
        (dict(precision="int8"), "expected 'bf16', 'fp16' or 'fp32', found 'int8'", ""),
        (dict(zero_stage=4), "zero_stage: expected 0, 1, 2 or 3, found 4", ""),
        (dict(tp_size=0), "tp_size: expected more than 0", ""),
        (dict(fp8_communication=True), "fp8_communication=True is not supported", ""),
        (dict(custom_policy=object()), "is not supported: a further model family is an entry", ""),
        (dict(min_scale=2.0), "only initial_scale can be set", ""),
        (dict(sp_size=2), "sp_size=2 needs enable_sequence_parallelism=True", ""),
        (dict(sequence_parallelism_mode="ring"), "needs enable_sequence_parallelism=True", ""),
        (dict(enable_sequence_parallelism=True), "needs a sequence_parallelism_mode", ""),
        (
            dict(enable_sequence_parallelism=True, sequence_parallelism_mode="split_gather"),
            "shares the tp group, so tp_size must be above 1",
            "",
        ),
        (dict(pp_size=2), "needs num_microbatches or microbatch_size", ""),
        (dict(pp_size=2, microbatch_size=1, pp_style="zbv"), "num_model_chunks=2, not 1", ""),
        (dict(pp_size=2, microbatch_size=1, pp_style="interleaved"), "num_model_chunks of at least 2", ""),
        (dict(pp_size=2, microbatch_size=1, num_model_chunks=2), "num_model_chunks=1, not 2", ""),
        (dict(pp_size=2, microbatch_size=1, num_layers_per_stage=[4]), "has 1 numbers, there are 2 stages", ""),
        (dict(inner_ring_size=2), "needs ring_attn", ""),
    ],
)
def test_each_broken_rule_is_a_sentence(settings: dict[str, Any], sentence: str, hint: str) -> None:
    error = _refusal(**settings)
    assert sentence in error.message
    assert hint in error.hint


def test_all_broken_rules_come_at_once() -> None:
    assert len(_refusal(fp8_communication=True, sp_size=2, pp_size=2).message.splitlines()) == 3


def test_what_has_no_effect_is_said() -> None:
    plugin = HybridParallelPlugin(2, 1, overlap_p2p=False, static_graph=True)
    assert len(plugin.notes) == 2
    assert "overlap_p2p=False has no effect: messages between stages always overlap" in plugin.notes
    assert HybridParallelPlugin(2, 1).notes == ()


def test_every_parameter_is_documented() -> None:
    from pathlib import Path

    text = (Path(__file__).parents[3] / "docs/api.md").read_text()
    assert [name for name in PluginParameters.model_fields if f"`{name}`" not in text] == []
    assert set(PluginParameters.model_fields) >= {*REFUSED_UNLESS_DEFAULT, *WITHOUT_EFFECT}


@pytest.mark.parametrize(("ratio", "policy", "every"), [(0, "none", 1), (1.0, "full", 1), (0.5, "full", 2)])
def test_a_ratio_of_recomputed_layers(ratio: float, policy: str, every: int) -> None:
    plan = HybridParallelPlugin(1, 1, gradient_checkpoint_config=ratio).plan(
        SMALL, world_size=1, seq_length=16, global_batch_size=2
    )
    assert (plan.recompute, plan.recompute_every_kth_layer) == (policy, every)


def test_the_plan_is_what_was_asked_for() -> None:
    plugin = HybridParallelPlugin(
        2, 2, num_microbatches=4, pp_style="interleaved", num_model_chunks=2, zero_stage=2, precision="bf16"
    )
    plan = plugin.plan(SMALL, world_size=8, seq_length=16, global_batch_size=16)
    assert (plan.degrees.tp, plan.degrees.pp, plan.degrees.dp) == (2, 2, 2)
    assert (plan.pipeline.num_microbatches, plan.pipeline.microbatch_size) == (4, 2)
    assert plan.pipeline.layers_per_stage == (1, 1, 1, 1)
    assert (plan.zero_stage, plan.precision) == (2, "bf16")


def test_ranks_come_from_torchrun_or_srun() -> None:
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "7"}
    ranks = ranks_of_environment(torchrun)
    assert (ranks.rank, ranks.world_size, ranks.local_rank, ranks.master_port) == (3, 4, 1, 7)
    slurm = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "12"}
    ranks = ranks_of_environment({**slurm, "SLURM_STEP_NODELIST": "node[03-06]"})
    assert (ranks.rank, ranks.world_size, ranks.master_addr) == (5, 8, "node03")
    assert ranks_of_environment({}).world_size == 1
    with pytest.raises(UserInputError, match="MASTER_ADDR and MASTER_PORT not set"):
        ranks_of_environment({"RANK": "0", "WORLD_SIZE": "2"})


def test_a_misspelt_size_is_named_with_the_right_one() -> None:
    with pytest.raises(UserInputError) as caught:
        HybridParallelPlugin(tpsize=2, pp_size=1)
    text = f"{caught.value.message} {caught.value.hint}"
    assert "tpsize: unknown key" in text
    assert "did you mean `tp_size`?" in text
    with pytest.raises(UserInputError, match="tp_size"):
        HybridParallelPlugin(pp_size=1)
