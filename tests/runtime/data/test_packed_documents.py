"""Packed documents: tokens see their own document only, and a packed step equals separate sequences."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the runtime's tests need the [train] extra")
pytest.importorskip("transformers", reason="the runtime's tests need the [train] extra")

import torch
import torch.nn.functional as F

from hpjob.runtime.data.batches import BatchReader
from hpjob.runtime.data.documents import document_ids, document_positions, ignore_ends
from hpjob.runtime.data.tokens import TokenDataset
from hpjob.runtime.model.families import family_of
from hpjob.runtime.model.initial import initial_weight
from hpjob.runtime.parity.case import Case
from hpjob.runtime.parity.compare import assemble, relative_difference
from tests.runtime.data.packing_job import gradients_of_packed_documents, packed_case
from tests.support.rank_pool import shared_rank_pool
from tests.support.run_folder import write_tokens

END = 0


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # About every eighth token ends a document.
    return write_tokens(tmp_path_factory.mktemp("packed") / "data", num_tokens=400, vocab_size=8)


def test_numbers_positions_and_labels_of_a_row() -> None:
    tokens = torch.tensor([[5, 6, END, 7, END, END, 8]])
    numbers = document_ids(tokens, END)
    assert numbers.tolist() == [[0, 0, 0, 1, 1, 2, 3]]
    assert document_positions(numbers).tolist() == [[0, 1, 2, 0, 1, 0, 0]]
    labels = torch.tensor([[6, END, 7, END, END, 8, 9]])
    assert ignore_ends(labels, numbers).tolist() == [[6, END, -100, END, -100, -100, 9]]


def test_a_sample_is_one_text_unless_packing_is_asked_for(data: Path) -> None:
    case = packed_case("seq_length=15", data)
    whole = case.recipe.model_copy(update={"data": case.recipe.data.model_copy(update={"pack_documents": False})})
    packed = BatchReader(TokenDataset(case.recipe), 0, 1, torch.device("cpu")).read(1)
    plain = BatchReader(TokenDataset(whole), 0, 1, torch.device("cpu")).read(1)
    assert plain.document_ids is None
    assert plain.position_ids[0].tolist() == list(range(15))
    assert torch.equal(packed.input_ids, plain.input_ids)
    ends = packed.input_ids == END
    assert bool((packed.labels[ends] == -100).all())
    assert torch.equal(packed.labels[~ends], plain.labels[~ends])
    assert packed.document_ids is not None
    assert int(packed.document_ids.max()) > 0


def _separately(case: Case) -> tuple[float, int, dict[str, torch.Tensor]]:
    """Run every document on its own through plain transformers."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(family_of("llama").config(case.recipe.model))
    seed = case.recipe.training.seed
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_weight(name, tuple(parameter.shape), seed=seed, std=0.02))
    inputs, labels = TokenDataset(case.recipe).rows(1, 0, 1)
    total, count = torch.zeros(()), 0
    for tokens, targets in _documents(torch.from_numpy(inputs), torch.from_numpy(labels)):
        logits = model(input_ids=tokens[None]).logits[0]
        total = total + F.cross_entropy(logits, targets, reduction="sum", ignore_index=-100)
        count += int((targets != -100).sum())
    (total / count).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return total.item() / count, count, gradients


def _documents(inputs: torch.Tensor, labels: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for row, targets in zip(inputs, labels, strict=True):
        begins = [0, *(i + 1 for i, token in enumerate(row.tolist()) if token == END)]
        for begin, end in zip(begins, [*begins[1:], len(row)], strict=True):
            if begin < end:
                own = targets[begin:end].clone()
                own[row[begin:end] == END] = -100
                yield row[begin:end], own


# 15 tokens divide by none of these, so sequences are filled up as well.
@pytest.mark.distributed
@pytest.mark.parametrize(
    "layout",
    [
        "tp_size=2 pp_size=2",
        "tp_size=2 pp_size=2 sequence_parallelism_mode=split_gather",
        "tp_size=2 sequence_parallelism_mode=ring",
        "tp_size=2 sp_size=2 sequence_parallelism_mode=all_to_all",
        "sp_size=4 sequence_parallelism_mode=ring_attn",
        "pp_size=2 sp_size=2 sequence_parallelism_mode=ring_attn",
    ],
)
def test_a_packed_step_equals_separate_sequences(layout: str, data: Path) -> None:
    layout = f"{layout} seq_length=15 num_microbatches=4"
    case = packed_case(layout, data)
    loss, count, expected = _separately(case)
    results = shared_rank_pool().run(gradients_of_packed_documents, layout, data, world=case.world)
    assert {result[1] for result in results} == {count}
    assert results[0][0] == pytest.approx(loss, rel=1e-6)
    found, differing = assemble(part for result in results for part in result[2])
    assert not differing
    assert relative_difference(found, expected) < 1e-5
