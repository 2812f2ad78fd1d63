"""A run starts from a folder's weights, and what it saved is exported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from hpjob.runtime.data.tokens import TokenDataset
from hpjob.runtime.hugging_face.export import export_run
from tests.runtime.hugging_face.jobs import plain_model
from tests.support.run_folder import Run, small_recipe, write_tokens

pytestmark = pytest.mark.distributed


def test_the_first_loss_is_that_of_the_weights(tmp_path: Path) -> None:
    data = write_tokens(tmp_path / "data")
    training = {"steps": 1, "initial_weights": str(tmp_path / "start")}
    recipe = small_recipe(data, training=training, model={"num_hidden_layers": 1})
    start = plain_model(recipe)
    start.save_pretrained(tmp_path / "start")
    run = Run.create(tmp_path / "run", recipe)
    attempt = run.start(dp=1)
    assert attempt.wait() == [0], attempt.log()
    assert "loading-weights" in attempt.event_names()

    inputs, labels = (torch.from_numpy(rows) for rows in TokenDataset(recipe).rows(1, 0, 1))
    with torch.no_grad():
        expected = F.cross_entropy(start(input_ids=inputs).logits.flatten(0, 1), labels.flatten()).item()
    assert run.losses() == [(1, pytest.approx(expected, rel=1e-5))]

    export_run(run.dir, tmp_path / "out")
    moved = AutoModelForCausalLM.from_pretrained(tmp_path / "out").model.norm.weight
    assert not torch.equal(moved, start.model.norm.weight)
    assert torch.allclose(moved, start.model.norm.weight, atol=2 * recipe.optimizer.lr)
