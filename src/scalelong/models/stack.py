"""Several U-ViTs of one shape as one network: a sweep of small networks, trained at once.

In a small network a third to a half of a step goes into calling operations, not into arithmetic. `UViTStack` calls each
operation once for S networks: a weight is (S, in, out), features are (S, B L, D), and a linear layer is a batched
product. Attention takes the images of all networks as one batch. Nothing mixes networks, so each computes what it would
compute alone, up to rounding; numbers that are not finite stay in their own network.

    stack = UViTStack([model_0, model_1, model_2])
    output = stack(x, t)                                # x: (3, B, C, H, W), t: (3, B)
    output.square().flatten(1).mean(1).sum().backward() # each network gets the gradient of its own loss
    optimizer.step()                                    # of stack.parameters, elementwise
    stack.copy_to(1, model_1)                           # the weights of one of them, back in its module

`shape_of` says which networks fit together: those that it finds equal. They may differ in weights and in constants of
their scaling, so a start, another initialisation and CS stack with the plain network. What is not a plain U-ViT has no
shape: hooks, adapters, gates that depend on the data.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..scaling.base import UNSCALED
from ..scaling.baselines import ResidualBranch
from ..scaling.constant import FixedSkipScaling
from .cpu import is_untouched
from .uvit import MLP, Attention, Block, PositionEmbedding, SkipMerge, UViT, cut_patches, timestep_embedding, unpatchify

PARTS = (UViT, Block, Attention, MLP, SkipMerge, PositionEmbedding, ResidualBranch, FixedSkipScaling)
PARTS += (nn.ModuleList, nn.Sequential, nn.Linear, nn.LayerNorm, nn.Conv2d, nn.Embedding, nn.Identity, nn.SiLU)
"""What a network may consist of: not their subclasses, which may do anything."""


def shape_of(model: nn.Module) -> tuple[Any, ...] | None:
    """Networks with equal shapes stack; None for one that cannot be stacked."""
    parts = list(model.modules())
    plain = type(model) is UViT and all(type(part) in PARTS and _is_usual(part) for part in parts)
    if not plain or not is_untouched(parts, [type(part) for part in parts]):
        return None
    assert isinstance(model, UViT)
    kinds = {(value.dtype, value.device, value.requires_grad) for value in model.parameters()}
    tied = len(list(model.named_parameters(remove_duplicate=False))) > len(list(model.parameters()))
    if tied or model.checkpointing or model.interpolate_positions or len(kinds) != 1 or not next(iter(kinds))[2]:
        return None
    arguments = {name: value for name, value in model.arguments().items() if name != "scaling"}
    return str(arguments), *(part.eps for part in parts if isinstance(part, nn.LayerNorm)), *map(str, *kinds)


def _is_usual(part: nn.Module) -> bool:
    """Whether options that may change nothing at first are as a U-ViT has them: edges of images, embeddings."""
    options = {"padding_mode": "zeros", "padding_idx": None, "max_norm": None, "scale_grad_by_freq": False}
    return all(getattr(part, name, value) == value for name, value in options.items())


class UViTStack:
    """U-ViTs of one shape. `parameters` has theirs by name, (S, ...) each; the modules themselves stay as they are.

    The weights of linear layers are transposed: autograd then finds their gradients as they are laid out, and need not
    copy them.
    """

    def __init__(self, models: Sequence[UViT]) -> None:
        shapes = {shape_of(model) for model in models}
        if len(shapes) != 1 or None in shapes:
            raise ValueError("networks that do not have the same shape cannot be stacked")
        self.model = models[0]
        parts = dict(self.model.named_modules())
        linear = {f"{name}.weight" for name, part in parts.items() if isinstance(part, nn.Linear | SkipMerge)}
        own = [dict(model.named_parameters()) for model in models]
        self.parameters: dict[str, nn.Parameter] = {}
        for name in own[0]:
            values = [each[name].detach() for each in own]
            self.parameters[name] = nn.Parameter(torch.stack([v.t() for v in values] if name in linear else values))
        self.linear = linear
        self.eps = {name: part.eps for name, part in parts.items() if isinstance(part, nn.LayerNorm)}
        self.tau = {name: part.tau for name, part in parts.items() if isinstance(part, ResidualBranch)}
        merges = range(1, self.model.depth // 2 + 1)
        constants = [[model.skip_scaling.constants(i) or UNSCALED for model in models] for i in merges]
        self.factors = [tuple(map(self._column, zip(*each, strict=True))) for each in constants]
        """(main, skip) of each merge, outermost first: (S, 1, 1) each, or None where all are 1."""

    def __len__(self) -> int:
        return len(self._like)

    @property
    def _like(self) -> Tensor:
        return self.parameters["norm.weight"]

    def _column(self, values: Sequence[float]) -> Tensor | None:
        return None if set(values) == {1.0} else self._like.new_tensor(values).view(-1, 1, 1)

    @torch.no_grad()
    def copy_to(self, position: int, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            value = self.parameters[name][position]
            parameter.copy_(value.t() if name in self.linear else value)

    @torch.no_grad()
    def keep(self, positions: Sequence[int]) -> dict[nn.Parameter, nn.Parameter]:
        """Leave the other networks out. Gradients stay with those that are kept. From the old parameters to the new."""
        chosen = torch.tensor(positions, device=self._like.device)
        renewed = {}
        for name, old in self.parameters.items():
            new = renewed[old] = self.parameters[name] = nn.Parameter(old.index_select(0, chosen))
            new.grad = None if old.grad is None else old.grad.index_select(0, chosen)
        self.factors = [tuple(None if k is None else k.index_select(0, chosen) for k in each) for each in self.factors]
        return renewed

    def __call__(
        self, x: Tensor, t: Tensor, condition: Tensor | None = None, features: dict[str, Tensor] | None = None
    ) -> Tensor:
        """x: (S, B, C, H, W), t: (S, B), condition: (S, B) labels or (S, B, length, dim) tokens of a text.

        `features` is given what comes out of each block, by its name: (S, B L, D).
        """
        model, count = self.model, len(self)
        rows, columns = (side // model.patch_size for side in model.image_size)
        tokens = self._embed(x, t, condition) + self.parameters["position_embedding.weight"]
        shape = tokens.shape  # (S, B, L, D)
        h, skips = tokens.flatten(1, 2), []
        for i in range(model.depth // 2):
            h = self._block(f"encoder.{i}", h, shape, features)
            skips.append(h)
        h = self._block("middle", h, shape, features)
        for i, factors in enumerate(reversed(self.factors)):
            h = self._merge(f"decoder.{i}.merge", h, skips.pop(), factors)
            h = self._block(f"decoder.{i}", h, shape, features)
        h = self._norm("norm", h).view(shape)[:, :, model.extra_tokens :].flatten(1, 2)
        patches = self._linear("to_patches", h).view(-1, rows * columns, model.patch_size**2 * model.channels)
        return self._final(unpatchify(patches, (rows, columns), model.patch_size, model.channels).view_as(x), count)

    def _embed(self, x: Tensor, t: Tensor, condition: Tensor | None) -> Tensor:
        """(S, B, L, D), in the order class, time, context, patches."""
        model, (count, images) = self.model, t.shape
        cut = cut_patches(x, model.patch_size).flatten(1, 2)
        kernel, bias = (self.parameters[f"patch_embedding.{kind}"] for kind in ("weight", "bias"))
        patches = torch.baddbmm(bias.unsqueeze(1), cut, kernel.flatten(2).transpose(1, 2))
        patches = patches.view(count, images, -1, model.dim)
        time = timestep_embedding(t.flatten(), model.dim).to(x.dtype).view(count, images, -1)
        if model.time_mlp:
            time = self._linear("time_embedding.2", F.silu(self._linear("time_embedding.0", time)))
        tokens = [time.unsqueeze(2)]
        if model.classes:
            assert condition is not None
            number = torch.arange(count, device=condition.device).unsqueeze(1)
            tokens.insert(0, self.parameters["class_embedding.weight"][number, condition].unsqueeze(2))
        if model.context_dim:
            assert condition is not None
            context = self._linear("context_embedding", condition.flatten(1, 2))
            tokens.append(context.view(count, images, -1, model.dim))
        return torch.cat([*tokens, patches], dim=2)

    def _block(self, name: str, x: Tensor, shape: Sequence[int], features: dict[str, Tensor] | None) -> Tensor:
        """x: (S, B L, D)."""
        count, images, length, dim = shape
        heads, block = self.model.heads, f"{name}.attention"
        qkv = self._linear(f"{block}.qkv", self._norm(f"{block}_norm", x))
        q, k, v = qkv.view(count * images, length, 3, heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        if self.model.qk_norm:
            q, k = (
                self._norm(f"{block}.{kind}_norm", value.reshape(count, -1, dim // heads)).view(value.shape)
                for kind, value in (("query", q), ("key", k))
            )
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        x = self._add(f"{block}_residual", x, self._linear(f"{block}.out", attended))
        hidden = F.gelu(self._linear(f"{name}.mlp.expand", self._norm(f"{name}.mlp_norm", x)))
        x = self._add(f"{name}.mlp_residual", x, self._linear(f"{name}.mlp.reduce", hidden))
        if features is not None:
            features[name] = x.detach()
        return x

    def _merge(self, name: str, main: Tensor, skip: Tensor, factors: Sequence[Tensor | None]) -> Tensor:
        if self.model.merge_norm:
            main, skip = self._norm(f"{name}.main_norm", main), self._norm(f"{name}.skip_norm", skip)
        main, skip = (x if k is None else x * k for x, k in zip((main, skip), factors, strict=True))
        return self._linear(name, torch.cat((main, skip), dim=2))

    def _add(self, name: str, x: Tensor, branch: Tensor) -> Tensor:
        alpha, tau = self.parameters.get(f"{name}.alpha"), self.tau[name]
        if alpha is not None:
            return x + branch * alpha.view(-1, 1, 1)
        return branch.add_(x) if tau == 1.0 else torch.add(x, branch, alpha=tau)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        """x: (S, rows, in)."""
        weight, bias = self.parameters[f"{name}.weight"], self.parameters.get(f"{name}.bias")
        return torch.bmm(x, weight) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, weight)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight, bias = (self.parameters[f"{name}.{kind}"].unsqueeze(1) for kind in ("weight", "bias"))
        return torch.addcmul(bias, F.layer_norm(x, x.shape[-1:], eps=self.eps[name]), weight)

    def _final(self, x: Tensor, count: int) -> Tensor:
        """The last convolution, with a group for each network."""
        weight = self.parameters.get("final_conv.weight")
        if weight is None:
            return x
        bias = self.parameters["final_conv.bias"].flatten()
        images = x.transpose(0, 1).flatten(1, 2)  # (B, S C, H, W)
        output = F.conv2d(images, weight.flatten(0, 1), bias, padding=1, groups=count)
        return output.unflatten(1, (count, -1)).transpose(0, 1)
