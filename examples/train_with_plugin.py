"""Train a model from a script of one's own, spread over ranks by ``HybridParallelPlugin``.

    torchrun --nproc-per-node 4 examples/train_with_plugin.py --tp 2 --pp 2
    srun --ntasks 8 --gpus-per-task 1 python examples/train_with_plugin.py --tp 2 --pp 2 --config path/to/folder

Runs on GPUs where there are some, else on CPUs. Without ``--config`` the model is a small Llama with random weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from hpjob.runtime.api import HybridParallelPlugin

SMALL_LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}


class CountingTexts(Dataset[dict[str, torch.Tensor]]):
    """Sequences that count upwards from a random number: a model learns them in some tens of steps."""

    def __init__(self, size: int, length: int, vocab_size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        starts = torch.randint(0, vocab_size, (size, 1), generator=generator)
        self.tokens = (starts + torch.arange(length)) % vocab_size

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train some steps and return their losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--config", help="config.json, or the folder that holds one and weights to start from")
    options = parser.parse_args(arguments)

    plugin = HybridParallelPlugin(
        tp_size=options.tp,
        pp_size=options.pp,
        microbatch_size=1,
        zero_stage=1,
        precision="bf16" if torch.cuda.is_available() else "fp32",
        max_norm=1.0,
    )
    model, optimizer = plugin.configure(
        options.config or SMALL_LLAMA,
        {"lr": 1e-2, "schedule": "constant", "weight_decay": 0.0},
        seq_length=32,
        global_batch_size=8,
        initial_weights=options.config,
    )
    vocab_size = model.recipe.model.vocab_size
    loader = plugin.prepare_dataloader(CountingTexts(8 * options.steps, 32, vocab_size))

    losses = []
    for step, batch in enumerate(loader, start=1):
        if step % 2:
            # The whole step in one call; the loss is the exact mean over all tokens of the global batch.
            losses.append(model.train_step(batch).loss)
        else:
            # The same in parts, with a criterion of one's own.
            result = plugin.execute_pipeline(iter([batch]), model, lambda outputs, _: outputs.loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(result["loss"].item() if result["loss"] is not None else float("nan"))
        if dist.get_rank() == dist.get_world_size() - 1:
            print(f"step {step}: loss {losses[-1]:.4f}", flush=True)
    return losses


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
