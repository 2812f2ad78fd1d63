"""What a rank does with packed documents of token files."""

from __future__ import annotations

from pathlib import Path

import torch

from hpjob.runtime.data.batches import BatchReader
from hpjob.runtime.data.tokens import TokenDataset
from hpjob.runtime.engine import Engine
from hpjob.runtime.mesh import build_mesh
from hpjob.runtime.parity.case import Case, parse_case
from hpjob.runtime.parity.worker import Part

SMALL = "num_hidden_layers=2 hidden_size=32 intermediate_size=48 vocab_size=97 precision=fp32 dp_size=1"


def packed_case(layout: str, data: Path) -> Case:
    """Return a case whose samples are packed documents of a folder of token files."""
    case = parse_case(f"{SMALL} {layout}", world=None, steps=1)
    settings = case.recipe.data.model_copy(update={"path": str(data), "pack_documents": True})
    recipe = case.recipe.model_copy(update={"data": settings})
    return Case(case.text, recipe, case.plan)


def gradients_of_packed_documents(layout: str, data: Path) -> tuple[float, int, list[Part]]:
    """Return loss, valid tokens and gradients of the first step."""
    case = packed_case(layout, data)
    mesh, device = build_mesh(case.plan, "cpu"), torch.device("cpu")
    engine = Engine(case.plan, case.recipe, mesh, device)
    batch = BatchReader(TokenDataset(case.recipe), mesh.dp_rank, mesh.dp_size, device).read(1)
    loss, num_tokens = engine.accumulate_gradients(batch)
    torch.distributed.all_reduce(loss)
    parts = [(p.name, p.region, p.local_gradient.clone()) for p in engine.parameters if p.local_gradient is not None]
    return loss.item(), int(num_tokens), parts
