"""What a token costs, and the tables that documents show."""

import pytest

from benchmarks.layouts import mixed, single_axis
from benchmarks.tables import gpu_train_table, multi_gpu_table
from benchmarks.workload import LLAMA_7B, flops_per_token, work_case
from hpjob.runtime.parity.case import parse_case


def test_flops_are_six_a_weight_and_causal_attention_once() -> None:
    case = work_case("zero_stage=0", LLAMA_7B, {"num_hidden_layers": 8, "seq_length": 2048}, world=1)
    weights = 8 * (4 * 4096**2 + 3 * 4096 * 11008) + 32000 * 4096
    assert flops_per_token(case) == 6 * weights + 6 * 8 * 4096 * 2048


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_every_layout_fills_the_gpus(gpus: int) -> None:
    for text in {**single_axis(gpus), **mixed(gpus)}.values():
        assert parse_case(f"{text} num_hidden_layers=16", world=gpus, steps=1).world == gpus


def test_tables_show_figures_refusals_and_failures() -> None:
    row = {
        "seq": 2048,
        "layout": "tp2",
        "tokens_per_s_per_gpu": 23707.0,
        "of_one_gpu": 0.888,
        "mfu": 0.504,
        "peak_reserved_gib": [53.0, 52.0],
        "predicted_s": 1.44,
        "predicted_error": 0.042,
    }
    refused = {"seq": 2048, "layout": "pp2 zbv", "refused": ["zbv is not supported"]}
    peer = {name: value for name, value in row.items() if not name.startswith(("predicted", "of_"))}
    rows = [row, refused, {**peer, "layout": "torchtitan"}]
    text = multi_gpu_table({"speed": rows, "kill": [{"ok": True, "seconds": 21.5}]})
    assert "| 2,048 | tp2 | 23,707 | 0.888 |" in text
    assert "| 2,048 | torchtitan | 23,707 |  |  | 50.4% | 53 |  |  |  |" in text
    assert "zbv is not supported" in text
    assert "after 21.5 s" in text


def test_the_single_gpu_table_averages_turns() -> None:
    turns = [{"tokens_per_s": t, "mfu": 0.5, "tflops": 500.0, "peak_gib": 40.0} for t in (50_000.0, 52_000.0)]
    record = {"seq": 2048, "sustained_tflops": [600.0, 650.0], "variants": {"hpjob": turns, "peer": [{"failed": "no"}]}}
    text = gpu_train_table([record])
    assert "| 2,048 | hpjob | 51,000 | 50.0% | 0.800 | 40.0 |" in text
    assert "| 2,048 | peer | no |" in text
