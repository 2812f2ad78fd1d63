"""Tables of published runs: what is read, what is refused, and the figures that come out."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpjob.plan.constants import CALIBRATION_NAMES, Calibration
from hpjob.plan.published.fit import Fitter, Observation
from hpjob.plan.published.hardware_names import machine_for_row, network_gb_s
from hpjob.plan.published.measured import measured
from hpjob.plan.published.predict import predict
from hpjob.plan.published.rows import Unpredictable, read_case
from hpjob.plan.published.score import predict_table, read_table, report, spearman

_REPOSITORY = Path(__file__).resolve().parents[2]
_ROW = {
    "id": "a-1",
    "family": "a",
    "model": "Llama2-7B",
    "n_layers": "32",
    "hidden": "4096",
    "ffn_hidden": "11008",
    "n_heads": "32",
    "vocab": "32000",
    "seq_len": "4096",
    "gpu": "A100-80GB-SXM",
    "gpus_per_node": "8",
    "interconnect": "8x HDR200 IB",
    "n_gpus": "8",
    "dp": "8",
    "tp": "1",
    "pp": "1",
    "zero_stage": "1",
    "recompute": "full",
    "micro_batch": "1",
    "global_batch": "64",
    "precision": "bf16",
    "flash_attention": "1",
    "framework": "Megatron-Core",
    "step_time_s": "12.0",
    "outcome": "ok",
}


def test_measured_columns_do_not_change_a_prediction() -> None:
    plain = predict(read_case(_ROW))
    other = {**_ROW, "step_time_s": "99", "tokens_per_gpu_s": "5", "tflops_per_gpu": "7", "peak_mem_gib": "3"}
    assert predict(read_case(other | {"outcome": "oom", "mfu_percent": "3", "hfu_percent": "4"})) == plain


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"flag": "looks swapped"}, "flagged: looks swapped"),
        ({"seq_len": ""}, "sequence length not published"),
        ({"tp": ""}, "layout not published"),
        ({"dp": "4"}, "is not the number of GPUs"),
        ({"hidden": ""}, "model sizes not published"),
        ({"gpu": "TPUv4"}, "GPU not known"),
        ({"precision": "nvfp4"}, "4-bit"),
        ({"micro_batch": "", "global_batch": ""}, "batch not published"),
        ({"n_gpus": "inf"}, "number of GPUs not published"),
        ({"n_gpus": "-8"}, "number of GPUs not published"),
        ({"model": "Phi-3.5-MoE"}, "experts not published"),
        ({"ep": "8"}, "experts not published"),
        ({"n_heads": "5000"}, "5000 heads"),
    ],
)
def test_rows_that_cannot_be_priced_say_why(change: dict[str, str], reason: str) -> None:
    with pytest.raises(Unpredictable, match=reason):
        read_case(_ROW | change)


def test_short_lines_and_rows_without_an_id_are_listed_by_their_place() -> None:
    short = dict.fromkeys(_ROW) | {"family": "a", None: ["left", "over"]}
    table = read_table([_ROW, short, _ROW | {"id": "", "outcome": "crashed"}, _ROW | {"outcome": "OOM"}])
    assert table.skipped == {"number of GPUs not published": ["row 2"], "outcome not known: crashed": ["row 3"]}
    assert [truth.outcome for _, truth in table.cases] == ["ok", "oom"]


def test_no_number_is_no_measurement() -> None:
    assert read_table([_ROW | {"step_time_s": "nan"}]).skipped == {"nothing measured that can be compared": ["a-1"]}


def test_unknown_fields_become_options_and_published_ones_do_not() -> None:
    assert len(read_case(_ROW).layouts) == 1
    open_row = _ROW | {"recompute": "", "micro_batch": ""}
    assert len(read_case(open_row).layouts) == 4 * 3
    assert {layout.chunks for layout in read_case(_ROW | {"pp": "4", "dp": "2"}).layouts} == {1, 2, 4, 8}
    assert {layout.chunks for layout in read_case(_ROW | {"pp": "4", "dp": "2", "virtual_pp": "1"}).layouts} == {1}


def test_rates_become_step_times_under_their_own_definition() -> None:
    case = read_case(_ROW)
    blank = {**_ROW, "step_time_s": ""}
    assert measured(blank | {"tokens_per_gpu_s": "4096"}, case).step_s == pytest.approx(8.0)
    hardware = blank | {"tflops_per_gpu": "150", "tflops_def": "hardware_full_recompute"}
    model = blank | {"tflops_per_gpu": "150", "tflops_def": "model_full_attn"}
    assert (measured(hardware, case).step_s or 0) > 1.25 * (measured(model, case).step_s or 0)
    assert measured(blank | {"tflops_per_gpu": "150", "tflops_def": "unstated"}, case).step_s is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("NVLink3/NVSwitch; 8x HDR200 IB (Selene)", 200),
        ("NVLink 4-link; 4x Omni-Path 100", 50),
        ("1600 Gbps node-node RoCE", 200),
        ("800 Gbps/node inter, NVLink intra", 100),
        ("single node NVLink", None),
    ],
)
def test_words_about_the_network(text: str, expected: float | None) -> None:
    assert network_gb_s(text) == expected


def test_words_about_the_gpu() -> None:
    pcie = machine_for_row("A100-PCIe-80GB", 8, "")
    assert pcie is not None
    assert pcie.island_kind == "pcie"
    cut = machine_for_row("H800", 8, "")
    assert cut is not None
    assert cut.island_bandwidth_gb_s == 200


def test_report_counts_errors_ranks_and_memory_verdicts() -> None:
    rows = []
    for index, (tp, slower) in enumerate([(1, 1.0), (2, 1.0), (4, 1.0), (8, 1.0)]):
        row = _ROW | {"id": f"a-{index}", "tp": str(tp), "dp": str(8 // tp)}
        rows.append(row | {"step_time_s": str(predict(read_case(row)).step_s * 1.25 * slower)})
    rows.append(_ROW | {"id": "a-9", "zero_stage": "0", "micro_batch": "64", "recompute": "none", "outcome": "oom"})
    rows.append(_ROW | {"id": "a-10", "flag": "bad"})
    table = read_table(rows)
    figures = report(predict_table(table), table.skipped)
    assert figures["macro_mape_time"] == pytest.approx(0.2, abs=0.15)
    assert figures["spearman"] == pytest.approx(1.0)
    assert figures["regret"] == pytest.approx(0.0)
    assert figures["oom_recall"] == 1.0
    assert figures["oom_false_alarms"] == 0.0
    assert figures["skipped"] == {"flagged: bad": ["a-10"]}


def test_rank_correlation_shares_ties() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 1, 2], [5, 5, 9]) == pytest.approx(1)
    assert spearman([1, 1], [1, 2]) == 0.0


def test_fit_recovers_a_correction_and_leaves_a_family_out() -> None:
    cases = [
        read_case(_ROW | {"tp": str(tp), "dp": str(8 // tp), "global_batch": str(b)}) for tp in (1, 2) for b in (32, 64)
    ]
    truth = Calibration().updated({"gemm": 0.92})
    observations = [
        Observation(family, lambda fit, case=case: predict(case, fit).step_s, predict(case, truth).step_s * factor)
        for family, factor in (("honest", 1.0), ("also", 1.0), ("far off", 3.0))
        for case in cases
    ]
    fitter = Fitter(observations)
    without = fitter.fit(without="far off")
    errors = [abs(o.predicted(without) / o.measured - 1) for o in observations if o.family != "far off"]
    assert max(errors) < 0.02
    everything = fitter.fit()
    assert observations[0].predicted(everything) > observations[0].predicted(without)
    assert all(getattr(without, name) > 0 for name in CALIBRATION_NAMES)


def _published_table() -> Path:
    folder = os.environ.get("HPJOB_TEST_DATA")
    path = Path(folder or "") / "published_runs.csv"
    if not folder or not path.is_file():
        pytest.skip("HPJOB_TEST_DATA names no folder with published_runs.csv")
    return path


def test_error_on_families_that_the_fit_has_not_seen() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/score_planner.py", str(_published_table()), "--leave-one-family-out", "--json"],
        cwd=_REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    figures = json.loads(done.stdout)
    assert figures["macro_mape_time"] <= 0.12
    assert abs(figures["macro_bias_time"]) <= 0.05
    assert figures["mape_memory"] <= 0.10
    assert figures["regret"] <= 0.05
    assert figures["spearman"] >= 0.7
    assert figures["oom_recall"] >= 0.95
    assert figures["oom_false_alarms"] <= 0.10
    assert any("frameworks.yaml" in sentence for sentence in figures["seen"])


def test_packaged_corrections_on_the_table_they_were_fitted_on() -> None:
    with _published_table().open(newline="") as file:
        table = read_table(list(csv.DictReader(file)))
    figures = report(predict_table(table), table.skipped)
    assert figures["macro_mape_time"] is not None
    assert float(str(figures["macro_mape_time"])) <= 0.08
