"""Gradient norms and relative updates per block, read around the steps of whatever optimiser trains the model."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle


class UpdateWatch:
    """While `on`, keeps the norms of gradients, weights and updates of the next optimiser step, on the device."""

    def __init__(self, groups: dict[str, list[nn.Parameter]]) -> None:
        self.on = False
        self.groups = groups
        self._block_of = {id(parameter): name for name, group in groups.items() for parameter in group}
        self._before: list[tuple[nn.Parameter, Tensor]] = []
        self.clear()
        # Hooks of all optimisers: the loop need not tell us which one is its own.
        self._handles: list[RemovableHandle] = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def clear(self) -> None:
        self.gradients: dict[str, list[Tensor]] = {}
        self.weights: dict[str, list[Tensor]] = {}
        self.updates: dict[str, list[Tensor]] = {}

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _mine(self, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return [p for p in parameters if p.grad is not None and id(p) in self._block_of]

    @torch.no_grad()
    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self.on:
            return
        mine = self._mine(optimizer)
        gradients = [p.grad.coalesce() if p.grad.is_sparse else p.grad for p in mine if p.grad is not None]
        self._add(self.gradients, mine, gradients)
        self._before = [(p, p.detach().clone()) for p in mine]

    @torch.no_grad()
    def _after_step(self, *_: Any) -> None:
        if not self._before:
            return
        mine, before = [p for p, _ in self._before], [value for _, value in self._before]
        self._before = []
        self._add(self.weights, mine, before)
        self._add(self.updates, mine, [p.detach() - value for p, value in zip(mine, before, strict=True)])

    def _add(self, into: dict[str, list[Tensor]], parameters: list[nn.Parameter], values: list[Tensor]) -> None:
        for parameter, value in zip(parameters, values, strict=True):
            wide = torch.float32 if value.dtype in (torch.float16, torch.bfloat16) else None
            norm = torch.linalg.vector_norm(value, dtype=wide)
            # A sharded tensor (FSDP2) gives the norm of all shards; its class is slow to import.
            whole = getattr(norm, "full_tensor", None)
            norm = norm if whole is None else whole()
            into.setdefault(self._block_of[id(parameter)], []).append(norm)

    def readings(self) -> dict[str, Tensor]:
        """Squared norms are added up per block; nothing is read from the device here."""
        result = {f"gradient_norm/{name}": _joint(norms) for name, norms in self.gradients.items()}
        if result:
            result["gradient_norm/all"] = _joint(list(result.values()))
        for name, norms in self.updates.items():
            weight = _joint(self.weights[name])
            result[f"update_ratio/{name}"] = _joint(norms) / weight.clamp(min=torch.finfo(weight.dtype).tiny)
        return result


def _joint(norms: list[Tensor]) -> Tensor:
    device = norms[0].device
    return torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]))
