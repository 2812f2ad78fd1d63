"""AdamW on the local shards of parameters, with state that is named like the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from hpjob.recipe.model import OptimizerSettings
from hpjob.runtime.model.parameters import ShardedParameter
from hpjob.runtime.optimizer.fused_update import FusedUpdate
from hpjob.runtime.optimizer.gradients import clip, clip_scale

_FIRST, _SECOND, _STEP = "optimizer.exp_avg", "optimizer.exp_avg_sq", "optimizer.step"


class AdamW:
    """AdamW with decoupled weight decay on matrices only; moments are fp32.

    It works on local tensors: handing DTensors to torch's optimizer costs host time per parameter and
    refuses a mix of meshes.

    Args:
        parameters: All of this rank.
        settings: Betas, eps, weight decay.
        compiled: Clip, update and round in one compiled pass; else in torch's fused one and two more.
    """

    def __init__(
        self, parameters: Sequence[ShardedParameter], settings: OptimizerSettings, *, compiled: bool = False
    ) -> None:
        self._parameters = list(parameters)
        self._settings = settings
        self._compiled = compiled
        # By parameter and not by name: a rank may hold both copies of a tied one.
        self._first = {id(item): torch.zeros_like(item.local) for item in parameters}
        self._second = {id(item): torch.zeros_like(item.local) for item in parameters}
        self.steps = 0
        """Updates made so far."""

    def step(self, lr: float, norm: Tensor, loss_scale: float = 1.0) -> None:
        """Clip and update the parameters in place from their gradients.

        Args:
            lr: Learning rate.
            norm: Norm of all gradients of the whole mesh without the loss scale, a scalar tensor.
            loss_scale: Contained in the gradients.
        """
        if self._compiled:
            self._update_compiled(lr, clip_scale(norm, self._settings.max_norm, loss_scale))
        else:
            clip(self._parameters, norm, self._settings.max_norm, loss_scale)
            for decays in (True, False):
                self._update([item for item in self._parameters if item.decays is decays], lr, decays=decays)
            for item in self._parameters:
                item.publish()
                item.exchange(has_changed=True)
        self.steps += 1

    def _update_compiled(self, lr: float, scale: Tensor) -> None:
        update = FusedUpdate(self._settings, lr, self.steps + 1, scale)
        with torch.no_grad():
            for item in self._parameters:
                gradient = item.local_gradient
                if gradient is not None and gradient.numel():
                    moments = self._first[id(item)], self._second[id(item)]
                    weight = item.compute_weight
                    in_one_pass = weight is None or weight.is_contiguous()
                    written = weight if in_one_pass else None
                    update.apply(item.local, *moments, gradient.contiguous(), written, decays=item.decays)
                    if not in_one_pass:
                        item.publish()
                item.exchange(has_changed=item.parameter.requires_grad)

    def _update(self, items: list[ShardedParameter], lr: float, *, decays: bool) -> None:
        held = [(item, gradient) for item in items if (gradient := item.local_gradient) is not None]
        held = [(item, gradient) for item, gradient in held if gradient.numel()]
        if not held:
            return
        settings = self._settings
        device = held[0][1].device
        counters = torch.full((len(held),), float(self.steps), device=device).unbind()
        with torch.no_grad():
            adamw(
                [item.local for item, _ in held],
                [gradient.float().contiguous() for _, gradient in held],
                [self._first[id(item)] for item, _ in held],
                [self._second[id(item)] for item, _ in held],
                [],
                list(counters),
                fused=True,
                amsgrad=False,
                beta1=settings.betas[0],
                beta2=settings.betas[1],
                lr=lr,
                weight_decay=settings.weight_decay if decays else 0.0,
                eps=settings.eps,
                maximize=False,
            )

    def moments(self) -> list[Tensor]:
        """Return both moments of all parameters, as they lie here."""
        return [*self._first.values(), *self._second.values()]

    def state_dict(self) -> dict[str, Any]:
        """Return the moments under ``optimizer.exp_avg.<name>`` and so on, cut like their parameters."""
        state: dict[str, Any] = {_STEP: torch.tensor(self.steps, dtype=torch.int64)}
        for item in self._parameters:
            state[f"{_FIRST}.{item.name}"] = item.like(self._first[id(item)])
            state[f"{_SECOND}.{item.name}"] = item.like(self._second[id(item)])
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over moments and step count; tensors already in place are not copied again."""
        self.steps = int(state[_STEP])
        for item in self._parameters:
            for prefix, mine in ((_FIRST, self._first), (_SECOND, self._second)):
                copy_local(mine[id(item)], state[f"{prefix}.{item.name}"])


def copy_local(target: Tensor, source: Tensor) -> None:
    """Copy the local part of a possibly distributed tensor, unless both share their memory."""
    local = getattr(source, "to_local", lambda: source)()
    if local.data_ptr() != target.data_ptr():
        target.copy_(local)
