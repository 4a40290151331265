"""AdamW, and its rate as a function of the step."""

import math

import torch
from torch import Tensor, nn

from ..runs.config import OptimizerConfig
from ..runs.processes import whole


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(
        parameters, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=_can_fuse(parameters)
    )


def _can_fuse(parameters: list[nn.Parameter]) -> bool:
    from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

    devices = _get_fused_kernels_supported_devices()
    return all(parameter.is_floating_point() and parameter.device.type in devices for parameter in parameters)


def create_state(optimizer: torch.optim.Optimizer) -> None:
    """Make AdamW's moments before its first step, so that saving and loading see them at every step alike."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = {
                    "step": torch.zeros((), device=parameter.device if group["fused"] else "cpu"),
                    "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                    "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                }


def rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """The learning rate of a step: linear warm-up, then constant or a decay to zero."""
    warm = min(1.0, (step + 1) / config.warmup) if config.warmup else 1.0
    if config.decay == "constant":
        return config.lr * warm
    end = config.decay_steps or steps
    progress = min(1.0, max(0.0, (step - config.warmup) / max(1, end - config.warmup)))
    falling = 1.0 - progress if config.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * warm * falling


def set_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = value


@torch.no_grad()
def clip_gradient(parameters: list[nn.Parameter], largest: float | None) -> Tensor:
    """The norm of the gradient before clipping."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if largest is not None:
        torch.nn.utils.clip_grads_with_norm_(parameters, largest, norm)
    return whole(norm)
