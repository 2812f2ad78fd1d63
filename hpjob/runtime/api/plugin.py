"""The plugin: one set of parameters, checked before anything starts, for training from a script of one's own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from hpjob.core.errors import UserInputError
from hpjob.core.schema import parse
from hpjob.plan.model import Plan
from hpjob.recipe.model import OptimizerSettings
from hpjob.runtime.api.layout import plan_for, recipe_for
from hpjob.runtime.api.parameters import PluginParameters
from hpjob.runtime.api.ranks import world_size_of_environment
from hpjob.runtime.api.refusals import broken_rules, notes

if TYPE_CHECKING:
    from torch.utils.data import DataLoader, Dataset

    from hpjob.runtime.api.model import HybridModel, HybridOptimizer

log = logging.getLogger(__name__)


class HybridParallelPlugin:
    """Tensor, pipeline, sequence, expert and data parallelism with ZeRO, by the names that are in use for them.

    Args:
        tp_size: Tensor-parallel ranks.
        pp_size: Pipeline-parallel ranks.
        settings: Any field of :class:`PluginParameters`; ``docs/api.md`` explains each.

    Raises:
        UserInputError: A name is unknown, or a rule is broken; all of them at once, with the nearest right ones.

    Example::

        plugin = HybridParallelPlugin(tp_size=2, pp_size=2, num_microbatches=4, precision="bf16", zero_stage=1)
        model, optimizer = plugin.configure("path/to/config.json", seq_length=2048, global_batch_size=64)
        for batch in plugin.prepare_dataloader(dataset):
            model.train_step(batch)
    """

    def __init__(self, tp_size: int | None = None, pp_size: int | None = None, **settings: Any) -> None:
        # A size that a misspelt name leaves out is said with the nearest name, not by Python.
        sizes = {"tp_size": tp_size, "pp_size": pp_size}
        document = {name: size for name, size in sizes.items() if size is not None} | settings
        self.parameters = parse(PluginParameters, document, source=type(self).__name__)
        rules = broken_rules(self.parameters)
        if rules:
            raise UserInputError(
                "\n".join(f"{type(self).__name__}: {rule}" for rule in rules), hint="correct the parameters named"
            )
        self.notes = tuple(notes(self.parameters))
        """Parameters that were set and change nothing, and why."""
        for note in self.notes:
            log.info("%s", note)
        self._plan: Plan | None = None

    def plan(
        self,
        model: object,
        *,
        world_size: int | None = None,
        seq_length: int | None = None,
        global_batch_size: int | None = None,
    ) -> Plan:
        """Return the layout for a model, or say why there is none; starts nothing and needs no torch.

        Args:
            model: As of :meth:`configure`.
            world_size: Ranks; None = as many as torchrun or srun started.
            seq_length: As of :meth:`configure`.
            global_batch_size: Likewise.

        Raises:
            UserInputError: The layout is not legal; the hint has the nearest that are.
        """
        recipe = recipe_for(
            self.parameters,
            model,
            seq_length=seq_length,
            global_batch_size=global_batch_size,
            optimizer=None,
            steps=None,
            seed=None,
        )
        return plan_for(self.parameters, recipe, world_size or world_size_of_environment())

    def configure(
        self,
        model: object,
        optimizer: OptimizerSettings | Mapping[str, Any] | None = None,
        *,
        seq_length: int | None = None,
        global_batch_size: int | None = None,
        steps: int | None = None,
        seed: int | None = None,
        initial_weights: str | None = None,
    ) -> tuple[HybridModel, HybridOptimizer]:
        """Join the other ranks and build this rank's part of a model and its optimizer. A collective of all ranks.

        Ranks are those of an initialised default process group, else of torchrun (``RANK``, ``WORLD_SIZE``,
        ``MASTER_ADDR``) or of srun.

        Args:
            model: A recipe, a config of transformers, a dict of its values, or the path of a config or its folder.
            optimizer: AdamW and its learning rate schedule: ``lr``, ``betas``, ``eps``, ``weight_decay``,
                ``schedule``, ``warmup_steps``, ``min_lr_ratio``; ``max_norm`` is the plugin's unless given here.
            seq_length: Tokens of a sequence; a recipe has its own.
            global_batch_size: Sequences of an optimizer step over all ranks; a recipe has its own.
            steps: Of the learning rate schedule.
            seed: Of the initial weights.
            initial_weights: Hugging Face folder to start from.

        Raises:
            UserInputError: The layout is not legal, or the weights are of another model.
        """
        recipe = recipe_for(
            self.parameters,
            model,
            seq_length=seq_length,
            global_batch_size=global_batch_size,
            optimizer=optimizer,
            steps=steps,
            seed=seed,
        )
        plan = plan_for(self.parameters, recipe, world_size_of_environment())
        # Only now: a layout that is not legal is refused before torch is imported.
        from hpjob.runtime.api.build import build_model  # noqa: PLC0415

        start = initial_weights or recipe.training.initial_weights
        built = build_model(recipe, plan, start, gathers_logits=not self.parameters.parallel_output)
        self._plan = plan
        return built

    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: HybridModel,
        criterion: Callable[[Any, Any], Any] | None = None,
        optimizer: HybridOptimizer | None = None,
        return_loss: bool = True,
        return_outputs: bool = False,
    ) -> dict[str, Any]:
        """Run one batch through the pipeline, forward and backward; works for every layout.

        Args:
            data_iter: Gives this data-parallel rank's batch; called once, on every rank.
            model: From :meth:`configure`.
            criterion: ``criterion(outputs, micro_batch)`` returns a scalar; ``outputs`` has ``loss`` and ``logits``.
                Gradients are of its mean over microbatches and data-parallel ranks. None = the exact mean over all
                valid tokens of the global batch, which is what ``train_step`` trains on.
            optimizer: From :meth:`configure`. None = forward only, under ``torch.no_grad()``.
            return_loss: Whether the loss is wanted.
            return_outputs: Whether logits of all microbatches are wanted, which takes their memory.

        Returns:
            ``loss``: detached, the mean over this rank's microbatches, on ranks of the last stage, else None.
            ``outputs``: with ``logits`` of the whole batch there, else None.

        Raises:
            UserInputError: The batch has another shape than the plan, or gradients of the last call are unused.
        """
        return model.execute_pipeline(
            data_iter, criterion, optimizer, return_loss=return_loss, return_outputs=return_outputs
        )

    def prepare_dataloader(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        *,
        shuffle: bool = False,
        seed: int = 1024,
        drop_last: bool = True,
        **kwargs: Any,
    ) -> DataLoader[Any]:
        """Return a loader of this data-parallel rank's share of a data set; after :meth:`configure`.

        Args:
            dataset: Its items are sequences.
            batch_size: Sequences of this rank in a step; None = as many as the layout needs.
            shuffle: Anew each epoch; call ``loader.sampler.set_epoch``.
            seed: Of the order.
            drop_last: Leave out sequences that fill no batch.
            kwargs: Of :class:`torch.utils.data.DataLoader`.

        Raises:
            UserInputError: Called before :meth:`configure`.
        """
        if self._plan is None:
            raise UserInputError("prepare_dataloader needs a layout", hint="call plugin.configure(…) first")
        from hpjob.runtime.api.build import make_dataloader  # noqa: PLC0415

        return make_dataloader(
            self._plan, dataset, batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last, **kwargs
        )
