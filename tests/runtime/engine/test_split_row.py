"""Tokens split in one row: no copy of whole activations beside the collectives, whatever the number of sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode

from hpjob.runtime.engine import Engine
from hpjob.runtime.mesh import build_mesh
from hpjob.runtime.parity.case import Case, parse_case
from hpjob.runtime.parity.data import global_batch, rank_batch
from hpjob.runtime.rehearsal.fake_world import fake_world
from hpjob.runtime.sequence.split_gather import gather_sequence, reduce_scatter_sequence

HIDDEN, LENGTH, TP = 32, 16, 4
SMALL = f"hidden_size={HIDDEN} intermediate_size=48 num_hidden_layers=2 vocab_size=96 seq_length={LENGTH}"
COPIES = {"clone", "copy_", "copy", "cat", "stack", "_to_copy"}


def case(batch: int, text: str = "") -> Case:
    split = f"tp_size={TP} sequence_parallelism_mode=split_gather microbatch_size={batch} num_microbatches=2"
    return parse_case(f"{SMALL} {split} precision=fp32 {text}", world=None, steps=1)


class CopiesOf(TorchDispatchMode):
    """Counts operations that copy as many elements as asked for, or more."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements = elements
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in COPIES and isinstance(result, Tensor) and result.numel() >= self.elements:
            self.found.append(name)
        return result


@pytest.fixture
def world() -> Iterator[None]:
    with fake_world(0, TP):
        yield


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("batch", [1, 2, 4])
def test_a_step_copies_no_whole_activation(batch: int) -> None:
    work = case(batch)
    engine = Engine(work.plan, work.recipe, build_mesh(work.plan, "cpu"), torch.device("cpu"))
    whole = rank_batch(global_batch(work.recipe, 1), 0, 1)
    with CopiesOf(batch * LENGTH * HIDDEN) as copies:
        engine.accumulate_gradients(whole)
    assert copies.found == []


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(("batch", "expected"), [(1, 0), (2, 2)])
def test_edges_of_several_rows_do_copy(batch: int, expected: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    shard = torch.ones(batch, LENGTH // TP, HIDDEN)
    with CopiesOf(batch * LENGTH * HIDDEN) as copies:
        reduce_scatter_sequence(gather_sequence(shard, group), group)
    assert len(copies.found) == expected


def recorded(graphs: list[GraphModule]) -> Callable[..., Any]:
    """A compiler that keeps what it is given, and runs it as it is."""

    def keep(graph: GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    compiler: Callable[..., Any] = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    return compiler


# The compiler looks whether a layer's input has a gradient.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.usefixtures("world")
def test_compiled_layers_copy_no_whole_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = 2
    graphs: list[GraphModule] = []
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=recorded(graphs)))
    work = case(batch, "enable_jit_fused=true num_hidden_layers=1")
    engine = Engine(work.plan, work.recipe, build_mesh(work.plan, "cpu"), torch.device("cpu"))
    engine.accumulate_gradients(rank_batch(global_batch(work.recipe, 1), 0, 1))
    nodes = [node for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    names = [getattr(getattr(node.target, "overloadpacket", None), "__name__", "") for node in nodes]
    assert names.count("gather_linear") == names.count("gather_linear_backward") == 2
    assert names.count("linear_scatter") == names.count("linear_scatter_backward") == 2
    copied = [
        name
        for name, node in zip(names, nodes, strict=True)
        if name in COPIES and node.meta["val"].numel() >= batch * LENGTH * HIDDEN
    ]
    assert copied == []


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(("num_microbatches", "made"), [(1, 7), (2, 0)])
def test_weights_whose_gradients_are_handed_on_get_none_of_zeros(
    monkeypatch: pytest.MonkeyPatch, num_microbatches: int, made: int
) -> None:
    graphs: list[GraphModule] = []
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=recorded(graphs)))
    work = case(1, f"enable_jit_fused=true num_hidden_layers=1 precision=bf16 num_microbatches={num_microbatches}")
    engine = Engine(work.plan, work.recipe, build_mesh(work.plan, "cpu"), torch.device("cpu"))
    engine.accumulate_gradients(rank_batch(global_batch(work.recipe, 1), 0, 1))
    weights = {
        tuple(item.local.shape) for item in engine.parameters if item.name.startswith("model.layers.0.") and item.decays
    }
    backward = [graph for graph in graphs if "gather_linear_backward" in graph.code]
    outputs = [node for graph in backward for node in graph.graph.nodes if node.op == "output"]
    shapes = [tuple(v.meta["val"].shape) for node in outputs for v in node.all_input_nodes if "val" in v.meta]
    assert sum(shape in weights for shape in shapes) == made
