"""Plans: legal, inside the memory, deterministic, explained; impossible wishes get the nearest legal layouts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hpjob.cli.app import app
from hpjob.core.errors import ExitCode, NothingFitsError, UserInputError
from hpjob.plan.explain import render_plan
from hpjob.plan.hardware import hardware_of
from hpjob.plan.legality import layout_of, problems, unsupported_by_runtime
from hpjob.plan.losses import exceeds_words, link_words
from hpjob.plan.model import Plan
from hpjob.plan.planner import make_plan
from hpjob.plan.shape import shape_of
from hpjob.recipe.load import load_recipe
from hpjob.runtime.support import unsupported
from hpjob.topology.load import load_machine, local_topology, machine_topology


def _plan(recipe: str, nodes: int, machine: str, *overrides: str, gpus_per_node: int | None = None) -> Plan:
    topology = machine_topology(load_machine(machine), nodes)
    return make_plan(load_recipe(recipe, list(overrides)), topology, gpus_per_node=gpus_per_node)


@pytest.mark.parametrize(
    ("recipe", "nodes", "machine"),
    [
        ("7b", 1, "dgx-a100-80g"),
        ("7b", 3, "hgx-h100"),
        ("13b", 2, "dgx-a100-40g"),
        ("70b", 4, "dgx-a100-80g"),
        ("70b", 8, "hgx-h200"),
        ("llama3-8b", 2, "mi300x"),
        ("7b", 2, "pcie-l40s"),
        ("70b", 16, "gb200-nvl72"),
        ("mixtral-8x7b", 4, "hgx-h100"),
        ("qwen3-30b-a3b", 2, "hgx-h200"),
    ],
)
def test_plan_is_legal_fits_and_can_run(recipe: str, nodes: int, machine: str) -> None:
    plan = _plan(recipe, nodes, machine)
    world = nodes * plan.gpus_per_node
    assert plan.degrees.world_size == world == len(plan.placement)
    assert problems(shape_of(load_recipe(recipe, []).model), layout_of(plan), world) == []
    assert unsupported_by_runtime(plan) == []
    assert unsupported(plan, load_recipe(recipe, [])) == [], "the runtime says the same"
    assert max(rank.total_gib for rank in plan.memory) <= plan.memory_limit_gib
    pipeline = plan.pipeline
    assert plan.degrees.dp * pipeline.num_microbatches * pipeline.microbatch_size == plan.global_batch_size
    assert plan.time.low_s < plan.time.step_s < plan.time.high_s
    assert plan == _plan(recipe, nodes, machine)
    assert Plan.model_validate_json(plan.model_dump_json()) == plan


def test_fixed_values_are_kept_and_what_the_runtime_lacks_is_said() -> None:
    plan = _plan("70b-a100-published", 4, "dgx-a100-80g")
    assert (plan.degrees.tp, plan.degrees.pp, plan.degrees.dp, plan.zero_stage) == (4, 4, 2, 1)
    assert (plan.pipeline.style, plan.pipeline.num_model_chunks, plan.pipeline.num_microbatches) == (
        "interleaved",
        2,
        8,
    )
    assert plan.precision == "bf16"
    for sentence in unsupported_by_runtime(plan):
        assert sentence in plan.warnings


def test_eight_bit_products_rule_out_the_modes_that_cannot_have_them() -> None:
    plain, eight = _plan("7b", 1, "hgx-h100"), _plan("7b", 1, "hgx-h100", "parallel.use_fp8=true")
    assert eight.time.step_s < plain.time.step_s
    fixed = ["parallel.use_fp8=true", "parallel.pp_size=4", "parallel.pp_style=zbv"]
    with pytest.raises(UserInputError, match="use_fp8 is not possible with zbv"):
        _plan("7b", 1, "hgx-h100", *fixed)


def test_tiny_runs_as_two_by_two_by_two_here() -> None:
    recipe = load_recipe("tiny", [])
    plan = make_plan(recipe, local_topology(2, 4))
    assert (plan.degrees.tp, plan.degrees.pp, plan.degrees.dp) == (2, 2, 2)
    assert (plan.num_nodes, plan.gpus_per_node, plan.precision) == (2, 4, "fp32")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["parallel.tp_size=3"], "tp 3 does not divide the world size 32"),
        (["parallel.tp_size=4", "parallel.pp_size=3"], "tp 4 x pp 3 = 12 does not divide the world size 32"),
        (
            [
                "parallel.tp_size=32",
                "model.num_attention_heads=96",
                "model.num_key_value_heads=48",
                "model.head_dim=128",
            ],
            "48 key-value heads and tp 32: neither is a multiple of the other",
        ),
        (["parallel.pp_size=32", "model.num_hidden_layers=8"], "8 layers are fewer than pp 32"),
        (
            ["parallel.tp_size=4", "parallel.pp_size=4", "parallel.sp_size=1", "training.global_batch_size=15"],
            "global batch 15 does not divide by dp 2",
        ),
        (
            ["parallel.tp_size=4", "parallel.pp_size=4", "parallel.sp_size=1", "parallel.microbatch_size=3"],
            "does not divide by 3 sequences a microbatch",
        ),
        (["parallel.zero_stage=0", "parallel.cpu_offload=true"], "offloading to the host needs ZeRO stage 1 or more"),
        (["parallel.tp_size=8", "parallel.zero_shard_size=3"], "does not divide by zero_shard_size 3"),
    ],
)
def test_impossible_wishes_get_the_rule_and_the_nearest_legal_layouts(overrides: list[str], expected: str) -> None:
    with pytest.raises(UserInputError) as caught:
        _plan("70b", 4, "dgx-a100-80g", *overrides)
    assert expected in caught.value.message
    assert "nearest legal layouts: tp " in caught.value.hint or "global_batch_size" in caught.value.hint


def test_shards_in_groups_and_offloading_reach_the_plan() -> None:
    changes = ["parallel.zero_stage=3", "parallel.zero_shard_size=2"]
    grouped = _plan("7b", 2, "hgx-h100", *changes)
    offloaded = _plan("7b", 2, "hgx-h100", *changes, "parallel.cpu_offload=true")
    assert (grouped.zero_shard_size, "in groups of 2" in grouped.summary) == (2, True)
    assert grouped.memory[0].optimizer_gib > 0
    assert (offloaded.cpu_offload, offloaded.memory[0].optimizer_gib) == (True, 0)
    assert offloaded.time.optimizer_s > grouped.time.optimizer_s


def test_nothing_fits_says_how_much_is_missing_and_what_helps() -> None:
    with pytest.raises(NothingFitsError) as caught:
        _plan("70b", 1, "dgx-a100-80g", "parallel.cpu_offload=false")
    assert "GiB a GPU" in caught.value.message
    assert "GiB are missing" in caught.value.message
    assert caught.value.hint.endswith("; or use --nodes 2")
    # 69e9 parameters of 16 bytes in the memory of one node.
    assert "leave cpu_offload auto (slower; takes about 1,028 GiB of a node's own memory)" in caught.value.hint
    everything = [f"parallel.{name}=1" for name in ("tp_size", "pp_size", "sp_size", "zero_stage")]
    with pytest.raises(NothingFitsError) as caught:
        _plan("70b", 2, "dgx-a100-80g", *everything)
    assert caught.value.hint == "leave tp_size, pp_size, sp_size, zero_stage auto"
    with pytest.raises(NothingFitsError) as caught:
        _plan("70b", 4, "dgx-a100-80g", "parallel.tp_size=4", "parallel.pp_size=4", "parallel.num_microbatches=8")
    assert "--set training.global_batch_size=" in caught.value.hint


def test_the_choice_does_not_depend_on_hashing() -> None:
    code = (
        "from hpjob.plan.planner import make_plan; from hpjob.recipe.load import load_recipe; "
        "from hpjob.topology.load import load_machine, machine_topology; "
        "print(make_plan(load_recipe('7b', []), machine_topology(load_machine('hgx-h100'), 1)).model_dump_json())"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    runs = [
        subprocess.run(
            [sys.executable, "-c", code],
            env=environment | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "7")
    ]
    assert runs[0] == runs[1] == _plan("7b", 1, "hgx-h100").model_dump_json() + "\n"


def test_too_many_gpus_per_node_is_the_users_mistake() -> None:
    with pytest.raises(UserInputError, match="9 GPUs a node asked for, but the nodes have 8"):
        _plan("7b", 1, "hgx-h100", gpus_per_node=9)


def test_text_names_choice_memory_time_reasons_and_runners_up() -> None:
    plan = _plan("70b", 4, "dgx-a100-80g", "parallel.pp_style=interleaved")
    text = render_plan(plan)
    assert plan.summary in text
    for label in ("memory per GPU", "step time", "why", "next best"):
        assert label in text
    assert all(runner_up.why_not in text for runner_up in plan.runners_up)
    chunks, layers = plan.pipeline.num_model_chunks, plan.pipeline.layers_per_stage[0]
    assert chunks > 1
    assert f"activations between {plan.degrees.pp} stages of {chunks} chunks of {layers} layers" in text


def test_text_names_the_groups_inside_layers() -> None:
    plan = _plan("qwen3-30b-a3b", 2, "hgx-h100")
    rows = [line.split()[:2] for line in render_plan(plan).splitlines()]
    assert ["ep", str(plan.degrees.ep)] in rows
    assert f"ep {plan.time.tp_comm_s:.2f} s" in render_plan(plan)


def test_one_change_names_every_count_of_nodes_once() -> None:
    one, two = (_plan("7b", nodes, "hgx-h100") for nodes in (1, 2))
    assert [change.change for change in one.changes if "node" in change.change] == ["2 nodes"]
    assert [change.change for change in two.changes if "node" in change.change] == ["1 node", "3 nodes", "4 nodes"]


def test_links_say_how_many_gpus_share_what_leaves_a_node() -> None:
    hardware = hardware_of(load_machine("hgx-h100"))
    assert link_words(hardware, 16, 1).endswith("GB/s for 8 GPUs of a node")
    assert link_words(hardware, 4, 8).endswith("GB/s a GPU")
    assert link_words(hardware, 8, 1).endswith("GB/s a GPU")


def test_a_fixed_schedule_without_a_pipeline_is_said_to_have_no_effect() -> None:
    plan = _plan("7b", 1, "hgx-h100", "parallel.pp_size=1", "parallel.pp_style=zbv")
    assert "schedule zbv (of no effect: pp 1 is no pipeline)" in plan.reasons[0]
    assert "schedule 1f1b" not in plan.reasons[0]


def test_pictures_need_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    place = ["--machine", "hgx-h100", "--pictures", str(tmp_path / "file")]
    done = CliRunner().invoke(app, ["plan", "--recipe", "7b", "--nodes", "1", *place])
    assert isinstance(done.exception, UserInputError)


def test_what_the_prices_leave_out_is_said() -> None:
    sparse = _plan("qwen3-30b-a3b", 2, "hgx-h200", "model.config_values={mlp_only_layers: [0]}")
    assert any("layers without experts" in warning for warning in sparse.warnings)
    for precision, warned in (("bf16", True), ("fp16", False)):
        plan = _plan("7b", 4, "dgx-v100", f"parallel.precision={precision}")
        assert any("V100 has no tensor cores for bf16" in warning for warning in plan.warnings) == warned


def test_what_exceeds_the_memory_never_reads_as_equal() -> None:
    assert exceeds_words(80.14, 74.45) == "80.1 of 74.5 GiB"
    assert exceeds_words(172.98, 172.96) == "172.98 of 172.96 GiB"


def test_layers_counted_stage_by_stage_are_fixed_recomputation() -> None:
    counts = "parallel.gradient_checkpoint_config.num_ckpt_layers_per_stage=[8, 8]"
    plan = _plan("7b", 1, "hgx-h100", "parallel.pp_size=2", "parallel.pp_style=1f1b", counts)
    assert any(reason.startswith("recompute") and "fixed by the recipe" in reason for reason in plan.reasons)
    assert "full recompute of [8, 8] layers of the stages" in render_plan(plan)


def test_command_prints_one_document_and_maps_errors_to_codes() -> None:
    runner = CliRunner()
    done = runner.invoke(app, ["plan", "--recipe", "7b", "--nodes", "2", "--machine", "hgx-h100", "--json"])
    assert done.exit_code == 0
    assert Plan.model_validate_json(done.stdout).num_nodes == 2
    failed = runner.invoke(app, ["plan", "--recipe", "70b", "--nodes", "1", "--machine", "dgx-v100"])
    assert isinstance(failed.exception, NothingFitsError)
    assert failed.exception.exit_code == ExitCode.NOTHING_FITS
    shown = runner.invoke(app, ["recipes", "show", "tiny"])
    assert "num_hidden_layers: 4" in shown.stdout
    assert "70b" in runner.invoke(app, ["recipes", "list"]).stdout
