"""Muon: the momentum of a hidden matrix is orthogonalised before it is its update; all other parameters have AdamW.

    optimizer = sl.Muon(sl.muon_groups(model, lr=8e-3, weight_decay=0.03))
    ...
    loss.backward(); optimizer.step(); optimizer.zero_grad()

A gradient often has few large singular values. Muon (Jordan et al., 2024) sets all of them to about 1 by five
Newton-Schulz steps, so that rare directions are learned as fast as frequent ones. The update is then multiplied by
0.2 √(larger side), which gives its entries the size that they have with AdamW (Liu et al., 2025): rate and decay are
AdamW's. Updates are those of `torch.optim.Muon(adjust_lr_fn="match_rms_adamw")` up to rounding. That one takes the
matrices one by one; here those of one shape are multiplied together.
"""

import fnmatch
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.adamw import adamw

from .errors import InvalidConfigError, UnclearParameterError, UnsupportedModelError
from .models import gain_of_bfloat16
from .mup import LR_SCALE, Base, Given, Kind, bare, kinds as kinds_of, layer_sides, width_of

# pyright: reportPrivateImportUsage=false

Products = Literal["auto", "float32", "bfloat16"]

A, B, C = 3.4445, -4.7750, 2.0315
"""x ← A x + B (x xᵀ) x + C (x xᵀ)² x: steep at zero, and singular values stay near 1 (Jordan et al.)."""
TINY = 1e-7
LARGEST_STACK = 2**26
"""Entries that are orthogonalised at once: more would only take more memory."""
FUSED = ("cpu", "cuda")
"""Devices where one kernel does all of AdamW."""
NARROW = 16
"""Layers with fewer channels on a side are taken for inputs or outputs, where nothing better is known."""
GAIN = 1.2
"""How much faster a CPU must multiply bfloat16 to use it."""


# Which parameters


def muon_groups(
    model: nn.Module, *, lr: float, weight_decay: float = 0.01, base: Base | None = None, kinds: Given | None = None
) -> list[dict[str, Any]]:
    """Parameter groups for `Muon`: hidden matrices by Muon; inputs, outputs, embeddings, norms, biases, gates by AdamW.

    U-ViT and diffusers' UNets are known (`sl.mup.kinds`). Of other networks all linear layers and convolutions are
    hidden, except the first, the last, and those with fewer than 16 channels on a side; `kinds` corrects that by names:
    {"head.*": "output"}. A convolution is the matrix (out, in × kernel); grouped ones are AdamW's.
    With `base`, the network at the width where the rate was tuned (see `sl.mup.kinds`), rates follow μP.
    """
    host = bare(model)
    found = _told(host, kinds) if base is None else kinds_of(host, base, kinds=kinds)
    return groups_for_muon(host, found, lr=lr, weight_decay=weight_decay)


def groups_for_muon(
    model: nn.Module, found: Mapping[str, Kind] | None, *, lr: float, weight_decay: float
) -> list[dict[str, Any]]:
    """The groups of kinds that are known already.

    μP asks that updates move features by as much at every width. The largest singular value of a hidden update must
    stay then; with entries of one size it grows as √m. So the rate is divided by √m, where Adam's is divided by m.
    """
    found = _told(model, None) if found is None else found
    groups: dict[tuple[bool, float], dict[str, Any]] = {}
    for name, parameter in bare(model).named_parameters():
        if not parameter.requires_grad:
            continue
        kind = found[name]
        by_muon = kind.kind == "hidden" and layer_sides(bare(model), name) is not None
        scale = 1 / math.sqrt(kind.m) if by_muon else kind.rate
        if (by_muon, scale) not in groups:
            group: dict[str, Any] = {"params": [], "muon": by_muon}
            group |= {"lr": lr * scale, "weight_decay": weight_decay / scale}
            groups[by_muon, scale] = group | ({LR_SCALE: scale} if scale != 1.0 else {})
        groups[by_muon, scale]["params"].append(parameter)
    # The rate of the first group is the one that logs show.
    return sorted(groups.values(), key=lambda group: LR_SCALE in group)


def _told(model: nn.Module, given: Given | None) -> Mapping[str, Kind]:
    """The kinds without a base: of a known family by its class, of other networks by the places of their layers."""
    width = width_of(model)
    if width is not None:
        try:
            return kinds_of(model, width, kinds=given)
        except (InvalidConfigError, UnclearParameterError):
            pass  # it has more than its class has, such as adapters
    sides = {name: layer_sides(model, name) for name, _ in model.named_parameters()}
    layers = [name for name, found in sides.items() if found is not None]
    hidden = {name for name in layers[1:-1] if min(sides[name] or (0,)) >= NARROW}
    found = {name: Kind("hidden" if name in hidden else "vector") for name in sides}
    for pattern, kind in (given or {}).items():
        named = fnmatch.filter(found, pattern)
        if not named:
            raise InvalidConfigError(f"kinds names {pattern}, which no parameter of the model is called")
        found |= dict.fromkeys(named, kind if isinstance(kind, Kind) else Kind(kind))
    return found


# The optimiser


class Muon(torch.optim.Optimizer):
    """Muon for the groups with `muon=True`, AdamW for the others. `muon_groups` makes both of a model.

    `betas` and `eps` are AdamW's, `momentum`, `nesterov` and `ns_steps` Muon's; rate and decay belong to both.
    `products`: the precision of Newton-Schulz. "auto" is bfloat16 on accelerators, and on a CPU that multiplies it
    faster, as measured when the optimiser is made; the state dict keeps it, so that a resumed run has the same bits.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        products: Products = "auto",
        muon: bool = True,
    ) -> None:
        for name, value, top in (
            ("lr", lr, math.inf),
            ("weight_decay", weight_decay, math.inf),
            ("momentum", momentum, 1),
        ):
            if not 0 <= value < top:
                raise InvalidConfigError(f"{name} of Muon must be in [0, {top:g}), got {value!r}")
        if ns_steps < 1 or products not in ("auto", "float32", "bfloat16"):
            raise InvalidConfigError(
                f"ns_steps of Muon must be at least 1 and products auto, float32 or bfloat16; got {ns_steps!r} and "
                f"{products!r}"
            )
        shared = {"lr": lr, "weight_decay": weight_decay, "muon": muon, "betas": betas, "eps": eps}
        super().__init__(
            params, {**shared, "momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "products": products}
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for parameter in group["params"]:
            if group["muon"] and parameter.dim() < 2:
                raise InvalidConfigError(
                    f"Muon is for matrices, and a parameter has the shape {tuple(parameter.shape)}: make the groups "
                    f"with muon_groups(model, lr=...), or give its group muon=False"
                )
            if group["muon"] and hasattr(parameter, "full_tensor"):
                raise UnsupportedModelError(
                    "Muon needs whole matrices, and these are sharded (FSDP): use DistributedDataParallel, or AdamW"
                )
        if group["products"] == "auto":
            group["products"] = _fast_products(group["params"][0].device)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            self._create_state(parameters, group["muon"])
            (self._muon if group["muon"] else self._adamw)(parameters, group)
        return loss

    def _create_state(self, parameters: list[Tensor], by_muon: bool) -> None:
        for parameter in parameters:
            state = self.state[parameter]
            if state:
                continue
            for name in ("momentum_buffer",) if by_muon else ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            if not by_muon:
                state["step"] = torch.zeros((), device=parameter.device if _fused(parameters) else "cpu")

    def _muon(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        gradients: list[Any] = [parameter.grad for parameter in parameters]
        buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
        wanted = torch._foreach_lerp(gradients, buffers, group["momentum"]) if group["nesterov"] else buffers
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        dtype = torch.bfloat16 if group["products"] == "bfloat16" else torch.float32
        for places, transposed in stacks(parameters):
            stack = torch.stack([wanted[place].flatten(1) for place in places])
            stack = orthogonalised(stack.mT if transposed else stack, group["ns_steps"], dtype)
            size = 0.2 * math.sqrt(stack.shape[2])
            targets = [parameters[place] for place in places]
            updates = (stack.mT if transposed else stack).to(targets[0].dtype, memory_format=torch.contiguous_format)
            updates = updates.view(len(places), *targets[0].shape).unbind()
            torch._foreach_add_(targets, updates, alpha=-group["lr"] * size)

    def _adamw(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        states = [self.state[parameter] for parameter in parameters]
        means, squares, steps = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step"))
        adamw(
            parameters,
            [parameter.grad for parameter in parameters],  # pyright: ignore[reportArgumentType]
            means,
            squares,
            [],
            steps,
            fused=_fused(parameters),
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def stacks(parameters: list[Tensor]) -> list[tuple[list[int], bool]]:
    """Places of the matrices of one shape, and whether they lie: the smaller side comes first in the products."""
    found: dict[tuple[Any, ...], list[int]] = {}
    for place, parameter in enumerate(parameters):
        key = (parameter.shape, parameter.dtype, parameter.device)
        found.setdefault(key, []).append(place)
    result = []
    for (shape, *_), places in found.items():
        rows, columns = shape[0], math.prod(shape[1:])
        most = max(1, LARGEST_STACK // (rows * columns))
        result += [(places[i : i + most], rows > columns) for i in range(0, len(places), most)]
    return result


def orthogonalised(stack: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """(n, rows, columns) with rows ≤ columns to matrices whose singular values are about 1, by Newton-Schulz."""
    x = stack.to(dtype)
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp_min(TINY)
    with torch.autocast(x.device.type, enabled=False):
        for _ in range(steps):
            gram = x @ x.mT
            polynomial = torch.baddbmm(gram, gram, gram, beta=B, alpha=C)
            x = torch.baddbmm(x, polynomial, x, beta=A)
    return x


def _fused(parameters: list[Tensor]) -> bool:
    return parameters[0].device.type in FUSED


@lru_cache
def _fast_products(device: torch.device) -> Products:
    if device.type != "cpu":
        fast = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
        return "bfloat16" if fast else "float32"
    # Several processes might measure differently, and then their weights would part.
    alone = not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
    return "bfloat16" if alone and gain_of_bfloat16() > GAIN else "float32"
