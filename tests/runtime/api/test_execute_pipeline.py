"""The plugin's calls give what plain transformers computes, in every layout."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from hpjob.runtime.parity.compare import assemble, relative_difference
from hpjob.runtime.process_pool import ProcessPool, WorkerError
from tests.runtime.api.jobs import EXAMPLE, SMALL, example, gradients, logits, misuse, save_and_load, texts

pytestmark = pytest.mark.distributed

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2 pp2": dict(tp_size=2, pp_size=2, num_microbatches=4),
    "pp2 zbv dp2": dict(
        tp_size=1,
        pp_size=2,
        pp_style="zbv",
        num_model_chunks=2,
        num_microbatches=2,
        zero_stage=1,
        parallel_output=False,
    ),
    "ring_attn dp2": dict(
        tp_size=1,
        pp_size=1,
        sp_size=2,
        enable_sequence_parallelism=True,
        sequence_parallelism_mode="ring_attn",
        microbatch_size=2,
        parallel_output=False,
    ),
    "tp2 all_to_all": dict(
        tp_size=2,
        pp_size=1,
        sp_size=2,
        enable_sequence_parallelism=True,
        sequence_parallelism_mode="all_to_all",
        microbatch_size=2,
        parallel_output=False,
    ),
    "tp2 ring pp2": dict(
        tp_size=2,
        pp_size=2,
        enable_sequence_parallelism=True,
        sequence_parallelism_mode="ring",
        microbatch_size=2,
        parallel_output=False,
    ),
}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    torch.manual_seed(2)
    config = LlamaConfig(**{k: v for k, v in SMALL.items() if k != "model_type"})
    model = AutoModelForCausalLM.from_config(config)
    folder = tmp_path_factory.mktemp("start")
    model.save_pretrained(folder)
    return folder, model


def _plain(model: Any, num_parts: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Mean of the losses of equal parts of the batch, and its gradients; 0 parts = the mean over all tokens."""
    model.zero_grad()
    batch = texts()
    if num_parts:
        size = len(batch["input_ids"]) // num_parts
        parts = [{n: t[i * size : (i + 1) * size] for n, t in batch.items()} for i in range(num_parts)]
        loss = torch.stack([model(**part).loss for part in parts]).mean()
    else:
        loss = model(**batch).loss
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("layout", "criterion", "parts"),
    [
        ("tp2 pp2", "loss", 4),
        ("tp2 pp2", "tokens", 0),
        ("pp2 zbv dp2", "logits", 4),
        ("ring_attn dp2", "logits", 4),
        ("ring_attn dp2", "loss", 4),
        ("tp2 all_to_all", "logits", 4),
        ("tp2 ring pp2", "logits", 4),
    ],
)
def test_gradients_are_those_of_the_criterion(
    pool: ProcessPool, start: tuple[Path, Any], layout: str, criterion: str, parts: int
) -> None:
    folder, plain = start
    loss, expected = _plain(plain, parts)
    settings = {**LAYOUTS[layout], "precision": "fp32"}
    results = pool.run(gradients, settings, folder, criterion, world=4)
    found, differing = assemble(part for _, gradient_parts in results for part in gradient_parts)
    assert not differing
    assert relative_difference(found, expected) < 1e-5
    losses = [value for value, _ in results if value is not None]
    assert len(losses) == 4 // settings["pp_size"]
    # Each data-parallel rank has the mean of its own microbatches.
    assert sum(losses) / len(losses) == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("layout", ["tp2 pp2", "pp2 zbv dp2", "ring_attn dp2"])
def test_the_model_itself_gives_the_logits_of_transformers(
    pool: ProcessPool, start: tuple[Path, Any], layout: str
) -> None:
    folder, plain = start
    settings = {**LAYOUTS[layout], "precision": "fp32", "parallel_output": False}
    with torch.no_grad():
        expected = plain(input_ids=texts()["input_ids"]).logits
    shown = [result for result in pool.run(logits, settings, folder, world=4) if result is not None]
    assert len(shown) == 4 // settings["pp_size"]
    for dp_rank, found in shown:
        begin = dp_rank * len(found)
        assert torch.allclose(found, expected[begin : begin + len(found)], atol=1e-5)


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("call", "no loss.backward() of its own"),
        ("no-optimizer", "has no optimizer to leave them to"),
        ("step-twice", "there are no gradients"),
        ("unused-gradients", "the gradients of the last batch were not used"),
        ("left-padding", "hides tokens before others"),
        ("no-scalar", "the criterion returned Tensor of shape"),
        ("no-checkpoint", "holds no checkpoint"),
    ],
)
def test_misuse_says_what_to_do(pool: ProcessPool, start: tuple[Path, Any], what: str, sentence: str) -> None:
    settings = dict(tp_size=1, pp_size=1, precision="fp32")
    with pytest.raises(WorkerError) as caught:
        pool.run(misuse, settings, start[0], what, world=1)
    assert sentence in (caught.value.refusal or "")


def test_what_is_saved_is_loaded_by_another_layout(pool: ProcessPool, start: tuple[Path, Any], tmp_path: Path) -> None:
    first = dict(tp_size=2, pp_size=2, microbatch_size=1, precision="fp32")
    second = dict(tp_size=1, pp_size=2, microbatch_size=2, precision="fp32", zero_stage=1)
    went_on, loaded, evaluated = pool.run(save_and_load, first, second, start[0], tmp_path, world=4)[0]
    assert loaded == pytest.approx(went_on, rel=1e-5)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    with torch.no_grad():
        assert plain(**texts()).loss.item() == pytest.approx(evaluated, rel=1e-5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "folder"]


def test_the_example_learns_in_a_pipeline(pool: ProcessPool) -> None:
    losses = pool.run(example, ["--tp", "2", "--pp", "2"], world=4)
    assert losses[-1][-1] < losses[-1][0]
    assert math.isnan(losses[0][1])  # the criterion's loss is on the last stage only


def test_the_example_runs_under_torchrun() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", str(EXAMPLE), "--pp", "2", "--steps", "2"]
    root = EXAMPLE.parents[1]
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    assert "step 2: loss" in done.stdout
