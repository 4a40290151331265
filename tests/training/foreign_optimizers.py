"""Optimisers of someone else's, as a user would name them: package.module:Class."""

# pyright: reportIncompatibleMethodOverride=false

import torch


class Lion(torch.optim.Optimizer):
    """Chen et al. (2023): the sign of a mix of gradient and momentum."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_((momentum * group["betas"][0] + p.grad * (1 - group["betas"][0])).sign(), alpha=group["lr"])
                momentum.lerp_(p.grad, 1 - group["betas"][1])


class ScheduleFree(Lion):
    """Holds an average of its own, and lends it between `eval()` and `train()`."""

    def train(self):
        pass

    def eval(self):
        pass


class NeedsClosure(torch.optim.Optimizer):
    def __init__(self, params, lr=1.0):
        super().__init__(params, {"lr": lr})

    def step(self, closure):  # pyright: ignore[reportIncompatibleMethodOverride]
        return closure()


def not_an_optimizer(params, lr):
    return 3
