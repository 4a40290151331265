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


class ScheduleFree(torch.optim.Optimizer):
    """Defazio et al. (2024), SGD: y = (1-β) z + β x is trained, x the average of z; eval() lends x, train() takes y."""

    def __init__(self, params, lr=1.0, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum, "k": 0, "train_mode": False})

    def train(self):
        self._turn(True)

    def eval(self):
        self._turn(False)

    @torch.no_grad()
    def _turn(self, training):
        for group in self.param_groups:
            if group["train_mode"] != training:
                beta = group["momentum"]
                for p in (p for p in group["params"] if "z" in self.state[p]):
                    p.lerp_(self.state[p]["z"], 1 - beta if training else 1 - 1 / beta)
                group["train_mode"] = training

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            assert group["train_mode"]
            beta, weight = group["momentum"], 1 / (group["k"] + 1)
            for p in (p for p in group["params"] if p.grad is not None):
                z = self.state[p].setdefault("z", p.clone())
                x = p.lerp(z, 1 - 1 / beta)
                z.sub_(p.grad, alpha=group["lr"])
                x.lerp_(z, weight)
                p.copy_(x.lerp(z, 1 - beta))
            group["k"] += 1


class NeedsClosure(torch.optim.Optimizer):
    def __init__(self, params, lr=1.0):
        super().__init__(params, {"lr": lr})

    def step(self, closure):  # pyright: ignore[reportIncompatibleMethodOverride]
        return closure()


def not_an_optimizer(params, lr):
    return 3
