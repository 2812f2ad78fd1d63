"""What ranks do for these tests."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from hpjob.runtime.api import HybridParallelPlugin
from hpjob.runtime.parity.worker import Part

EXAMPLE = Path(__file__).parents[3] / "examples/train_with_plugin.py"
SMALL = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
}
LENGTH, BATCH = 15, 8


def texts() -> dict[str, torch.Tensor]:
    """Return a global batch with unequal numbers of ignored labels."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 97, (BATCH, LENGTH), generator=generator)
    labels = ids.clone()
    for row in range(BATCH):
        labels[row, : row + 1] = -100
    return {"input_ids": ids, "labels": labels}


def _whole_logits_loss(outputs: Any, micro_batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), micro_batch["labels"][:, 1:].flatten())


CRITERIA = {"loss": lambda outputs, _: outputs.loss, "logits": _whole_logits_loss, "tokens": None}


def _configured(settings: dict[str, Any], folder: Path) -> tuple[HybridParallelPlugin, Any, Any, dict[str, Any]]:
    plugin = HybridParallelPlugin(**settings)
    model, optimizer = plugin.configure(
        str(folder), {"schedule": "constant"}, seq_length=LENGTH, global_batch_size=BATCH, initial_weights=str(folder)
    )
    size, rank = BATCH // model.plan.degrees.dp, model.engine.mesh.dp_rank
    part = {name: tensor[rank * size : (rank + 1) * size] for name, tensor in texts().items()}
    return plugin, model, optimizer, part


def gradients(settings: dict[str, Any], folder: Path, criterion: str) -> tuple[float | None, list[Part]]:
    """Return what execute_pipeline says and the gradients it leaves."""
    plugin, model, optimizer, part = _configured(settings, folder)
    result = plugin.execute_pipeline(iter([part]), model, CRITERIA[criterion], optimizer)
    parts = [(p.name, p.region, p.local_gradient.clone()) for p in model.engine.parameters]
    loss = result["loss"]
    return None if loss is None else loss.item(), parts


def logits(settings: dict[str, Any], folder: Path) -> tuple[int, torch.Tensor] | None:
    """Return this rank's position on dp and the logits of its part of the batch, on ranks of the last stage."""
    _, model, _, part = _configured(settings, folder)
    with torch.no_grad():
        output = model.eval()(**part)
    return None if output is None else (model.engine.mesh.dp_rank, output.logits)


def misuse(settings: dict[str, Any], folder: Path, what: str) -> None:
    """Do something that is refused."""
    plugin, model, optimizer, part = _configured(settings, folder)
    if what == "call":
        model(part)
    elif what == "no-optimizer":
        plugin.execute_pipeline(iter([part]), model)
    elif what == "step-twice":
        plugin.execute_pipeline(iter([part]), model, None, optimizer)
        optimizer.step()
        optimizer.step()
    elif what == "unused-gradients":
        plugin.execute_pipeline(iter([part]), model, None, optimizer)
        model.train_step(part)
    elif what == "left-padding":
        mask = torch.ones_like(part["input_ids"])
        mask[:, 0] = 0
        model.train_step({**part, "attention_mask": mask})
    elif what == "no-scalar":
        plugin.execute_pipeline(iter([part]), model, lambda outputs, _: outputs.logits, optimizer)
    elif what == "no-checkpoint":
        model.load_checkpoint(folder / "nowhere")


def save_and_load(settings: dict[str, Any], other: dict[str, Any], folder: Path, to: Path) -> list[float]:
    """Train, save, load in another layout; return the next loss of both, and that of the exported folder."""
    _, model, _, part = _configured(settings, folder)
    model.train_step(part)
    model.save_checkpoint(to / "checkpoint")
    model.save_pretrained(to / "folder")
    next_loss = model.train_step(part).loss
    _, loaded, _, part = _configured(other, folder)
    loaded.load_checkpoint(to / "checkpoint")
    losses = [next_loss, loaded.train_step(part).loss]
    loaded.load_pretrained(to / "folder")
    return [*losses, loaded.evaluate(part)[0]]


def example(arguments: list[str]) -> list[float]:
    """Run the example script in this process's world."""
    losses: list[float] = runpy.run_path(str(EXAMPLE))["main"](arguments)
    return losses
