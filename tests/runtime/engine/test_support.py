"""Plans that the runtime refuses, and what it says."""

from __future__ import annotations

import pytest

from hpjob.core.errors import UserInputError
from hpjob.runtime.model.families import family_of
from hpjob.runtime.parity.case import parse_case
from hpjob.runtime.support import refuse_unsupported, unsupported


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("tp_size=3 num_key_value_heads=1", "num_attention_heads 8 does not divide by tp 3"),
        ("tp_size=4 num_attention_heads=12 num_key_value_heads=6 hidden_size=48", "neither is a multiple of the other"),
        ("tp_size=2 intermediate_size=97", "intermediate_size 97 does not divide by tp 2"),
        ("tp_size=4 vocab_size=5", "vocab_size 5 leaves a rank of tp 4 without tokens"),
        ("cpu_offload=true zero_stage=0", "it needs zero_stage of at least 1"),
        ("zero_shard_size=1 zero_stage=0", "it needs zero_stage of at least 1"),
        ("zero_shard_size=2", "zero_shard_size 2 does not divide dp 1 x sp 1 = 1"),
        ("recompute=full num_ckpt_layers_per_stage=9", "does not fit stages of [8] layers"),
        ("num_ckpt_layers_per_stage=1", "needs the recomputation policy full, not none"),
        ("sequence_parallelism_mode=split_gather", "split_gather needs tp of at least 2"),
        ("tp_size=2 sp_size=2 sequence_parallelism_mode=ring", "ring shares the tp group"),
        ("sp_size=2", "sp 2 needs a sequence_parallelism_mode"),
        ("sp_size=3 sequence_parallelism_mode=all_to_all", "8 attention heads of a tp rank over sp, which 3"),
        ("ep_size=2", "ep 2 needs a model with experts"),
        ("num_experts=4 num_experts_per_tok=2", "llama models have no experts"),
        ("pp_size=2 pp_style=zbv", "zbv has two model chunks per pipeline rank, not 1"),
        ("pp_size=2 num_model_chunks=2", "1f1b has one model chunk per pipeline rank, not 2"),
        ("pp_size=2 pp_style=interleaved", "interleaved needs at least two model chunks"),
        ("pp_size=2 pp_style=interleaved num_model_chunks=2 num_microbatches=3", "multiples of pp 2"),
    ],
)
def test_each_reason_is_a_sentence(text: str, sentence: str) -> None:
    case = parse_case(f"{text} dp_size=1", world=8, steps=1)
    reasons = unsupported(case.plan, case.recipe)
    assert len(reasons) == 1
    assert sentence in reasons[0]
    with pytest.raises(UserInputError, match=sentence.split(maxsplit=1)[0]):
        refuse_unsupported(case.plan, case.recipe)


def test_all_reasons_come_at_once() -> None:
    case = parse_case("tp_size=3 cpu_offload=true zero_stage=0 dp_size=1", world=8, steps=1)
    assert len(unsupported(case.plan, case.recipe)) >= 2


@pytest.mark.parametrize(
    ("model", "text", "sentence"),
    [
        ("mixtral", "dp_size=1", "mixtral needs num_experts"),
        ("mixtral", "num_experts=6 num_experts_per_tok=2 ep_size=4 dp_size=4", "num_experts 6 does not divide by ep 4"),
        ("qwen3_moe", "num_experts=4 num_experts_per_tok=2 ep_size=4 dp_size=2", "dp 2 x sp 1 does not divide by ep 4"),
    ],
)
def test_experts_that_do_not_fit_are_refused(model: str, text: str, sentence: str) -> None:
    case = parse_case(text, world=8, steps=1, model_type=model)
    assert any(sentence in reason for reason in unsupported(case.plan, case.recipe))


def test_a_plan_of_another_batch_size_is_refused() -> None:
    case = parse_case("dp_size=2", world=2, steps=1)
    wrong = case.plan.model_copy(update={"global_batch_size": 3})
    assert "global_batch_size 3 is not dp 2 x 2 microbatches x 1 = 4" in unsupported(wrong, case.recipe)[0]


def test_an_unknown_family_gets_the_nearest_name() -> None:
    with pytest.raises(UserInputError) as caught:
        family_of("lama")
    assert "did you mean 'llama'?" in caught.value.hint
