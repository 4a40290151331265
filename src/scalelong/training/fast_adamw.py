"""The step of torch's fused AdamW, for small networks: the same kernel without the work that repeats at every step."""

from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

# pyright: reportPrivateImportUsage=false, reportPrivateUsage=false


class QuickAdamW:
    """`step` and `zero_grad` of torch's fused AdamW, without the work that is the same at every step.

    torch looks up the state of each parameter and sorts all tensors by device and type, every time: for a small network
    that takes longer than the update. Here the lists are made once, and the steps of all parameters, which each have a
    tensor of their own, become views of one. The kernel is the same, and so is every bit.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.lists: list[tuple[list[Any], ...]] = []
        self.steps: list[torch.Tensor] = []
        """For each group, the tensor that has the steps of all of its parameters."""

    @staticmethod
    def fits(optimizer: torch.optim.Optimizer) -> bool:
        """One device and type in each group, and nothing that another kernel would be called for."""
        return type(optimizer) is torch.optim.AdamW and all(
            group["fused"]
            and not (group["amsgrad"] or group["maximize"] or group["capturable"])
            and {type(parameter) for parameter in group["params"]} == {nn.Parameter}
            and len({(parameter.device, parameter.dtype) for parameter in group["params"]}) == 1
            for group in optimizer.param_groups
        )

    def step(self) -> None:
        optimizer = self.optimizer
        if not self._is_current():
            self.steps = [self._joined_steps(group) for group in optimizer.param_groups]
            self.lists = [self._lists(group) for group in optimizer.param_groups]
        gradients = [[parameter.grad for parameter in lists[0]] for lists in self.lists]
        if any(gradient is None for group in gradients for gradient in group):
            optimizer.step()  # parameters that took no part in the loss are left as they are
            return
        # The monitor reads gradients in a hook, which comes and goes.
        for before in (*_global_optimizer_pre_hooks.values(), *optimizer._optimizer_step_pre_hooks.values()):
            before(optimizer, (optimizer,), {})
        self._update(gradients)
        for after in (*optimizer._optimizer_step_post_hooks.values(), *_global_optimizer_post_hooks.values()):
            after(optimizer, (optimizer,), {})

    @torch.no_grad()
    def _update(self, gradients: list[list[Any]]) -> None:
        found_inf = getattr(self.optimizer, "found_inf", None)  # set by the guard: no update
        if found_inf is not None and found_inf.is_cpu:
            if found_inf:
                return
            found_inf = None
        for group, given, together, (parameters, means, squares, steps) in zip(
            self.optimizer.param_groups, gradients, self.steps, self.lists, strict=True
        ):
            beta1, beta2 = group["betas"]
            together += 1
            torch._fused_adamw_(
                parameters,
                given,
                means,
                squares,
                [],
                steps,
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
                found_inf=found_inf,
            )
            if found_inf is not None:
                together -= found_inf

    def zero_grad(self) -> None:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    @torch.no_grad()
    def _joined_steps(self, group: dict[str, Any]) -> torch.Tensor:
        states = [self.optimizer.state[parameter] for parameter in group["params"]]
        together = torch.stack([state["step"] for state in states])
        for state, step in zip(states, together.unbind(), strict=True):
            state["step"] = step
        return together

    def _lists(self, group: dict[str, Any]) -> tuple[list[Any], ...]:
        states = [self.optimizer.state[parameter] for parameter in group["params"]]
        return group["params"], *([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step"))

    def _is_current(self) -> bool:
        """Not before the first step, and not when a state was loaded, which makes new tensors."""
        state = self.optimizer.state
        return bool(self.lists) and all(state[lists[0][-1]]["exp_avg"] is lists[1][-1] for lists in self.lists)
