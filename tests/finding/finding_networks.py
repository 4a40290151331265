"""Small networks for the search: how many long skips each has, and what must not be taken for one.

`EXPECTED` gives the number of long skips, "none", or "refused" where either answer would be a guess. They are found,
not scaled: `hard_networks.py` holds networks with their own references for the scaling.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import deceptive
from deceptive import D as C

EXPECTED: dict[str, tuple[type[nn.Module], int | str]] = {}


def expect(count: int | str):
    def register(cls):
        EXPECTED[cls.__name__] = (cls, count)
        return cls

    return register


def conv(inside: int, outside: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inside, outside, 3, stride, 1)


class Levels(deceptive.Levels):
    """Three levels of a U on images; `middle` and `join` are what the networks below differ in."""

    dims = 2

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        return (torch.randn(2, 5, 16, 16),)


class AddedLevels(Levels):
    joined = C

    def join(self, i: int, h: Tensor, skip: Tensor) -> Tensor:
        return h + skip


# ------------------------------------------------------------------------------ in the bottleneck


@expect(3)
class InlineResidual(AddedLevels):
    """The residual around the middle stands beside the additions of the U."""

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        h, skips = self.encode(x)
        h = h + self.mid(F.silu(h))
        for up, dec in zip(self.up, self.dec, strict=True):
            h = F.silu(dec(up(h) + skips.pop()))
        return self.head(h)


@expect(3)
class TorchTransformer(AddedLevels):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(C, 2, 8, batch_first=True)
        self.transformer = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def middle(self, h: Tensor, *more: Tensor) -> Tensor:
        return self.transformer(h.flatten(2).mT).mT.reshape(h.shape)


@expect(3)
class InlinePooledPyramid(Levels):
    """PSPNet: the feature and pooled versions of it, side by side, next to the merges of the U."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Conv2d(C, C, 1) for _ in range(2))
        self.fuse = nn.Conv2d(3 * C, C, 1)

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        h, skips = self.encode(x)
        pooled = [branch(h.mean((2, 3), keepdim=True)).expand_as(h) for branch in self.branches]
        h = self.fuse(torch.cat([h, *pooled], 1))
        for up, dec in zip(self.up, self.dec, strict=True):
            h = F.silu(dec(torch.cat([up(h), skips.pop()], 1)))
        return self.head(h)


class Branches(nn.Module):
    """A block of Inception."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b1, self.b2, self.out = nn.Conv2d(C, C, 1), nn.Conv2d(C, C, 1), conv(C, C), nn.Conv2d(2 * C, C, 1)

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        one = self.a(x)
        other = self.b2(F.relu(self.b1(x)))
        return self.out(torch.cat([one, other], 1))


@expect(3)
class BottleneckInception(Levels):
    """Parallel branches in the middle are no long skip."""

    def __init__(self) -> None:
        super().__init__()
        self.mid = Branches()  # pyright: ignore


@expect(3)
class SpatialReduction(AddedLevels):
    """Attention over keys of half the resolution, with its residual, in a method."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.reduce = nn.Linear(C, C), nn.Linear(C, 2 * C), nn.Conv2d(C, C, 2, 2)

    def middle(self, h: Tensor, *more: Tensor) -> Tensor:
        k, v = self.kv(self.reduce(h).flatten(2).mT).chunk(2, -1)
        tokens = F.scaled_dot_product_attention(self.q(h.flatten(2).mT), k, v)
        return h + tokens.mT.reshape(h.shape)

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        return (torch.randn(2, 5, 32, 32),)


@expect(3)
class SpatialGate(AddedLevels):
    """A gate for each position and channel, in the middle: a product of two features."""

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        h, skips = self.encode(x)
        h = h * self.mid(h).sigmoid()
        for up, dec in zip(self.up, self.dec, strict=True):
            h = F.silu(dec(up(h) + skips.pop()))
        return self.head(h)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        return torch.from_numpy(np.einsum("bchw,dc->bdhw", x.detach().numpy(), weight.detach().numpy()))


class NumpyLayer(nn.Module):
    """A layer that leaves torch: nothing of it is seen but its argument and its result."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(C, C))

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        return Doubled.apply(x, self.weight)


class FillingLayer(NumpyLayer):
    """Writes into memory that torch made, as kernels of Triton do."""

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        out = torch.empty_like(x)
        out.numpy()[...] = np.einsum("bchw,dc->bdhw", x.numpy(), self.weight.detach().numpy())
        return out


@expect(3)
class UnseenBottleneck(AddedLevels):
    """Nothing else lies between the innermost encoder and decoder: the innermost skip goes around this alone."""

    layer: type[nn.Module] = NumpyLayer

    def __init__(self) -> None:
        super().__init__()
        self.unseen = self.layer()

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        h, skips = F.silu(self.stem(x)), []
        for down in self.down:
            h = F.silu(down(h))
            skips.append(h)
        h = self.unseen(h)
        for up, dec in zip(self.up, self.dec, strict=True):
            h = F.silu(dec(up(h + skips.pop())))
        return self.head(h)


@expect(3)
class FilledBottleneck(UnseenBottleneck):
    layer = FillingLayer


# ------------------------------------------------------------------------------ ways to write a U


@expect(3)
class WrittenOutAdditions(AddedLevels):
    """Demucs without a loop: the innermost addition goes around the middle alone."""

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        s1 = F.silu(self.down[0](F.silu(self.stem(x))))
        s2 = F.silu(self.down[1](s1))
        s3 = F.silu(self.down[2](s2))
        h = F.silu(self.mid(s3))
        h = F.silu(self.dec[0](self.up[0](h + s3)))
        h = F.silu(self.dec[1](self.up[1](h + s2)))
        h = F.silu(self.dec[2](self.up[2](h + s1)))
        return self.head(h)


@expect(3)
class OtherConcatenations(Levels):
    def join(self, i: int, h: Tensor, skip: Tensor) -> Tensor:
        if i == 3:
            return torch.hstack([h, skip])
        return torch.concat((h, skip), dim=1) if i == 2 else torch.concatenate([h, skip], dim=-3)


@expect(3)
class TimeMaps(Levels):
    """A map of the time is concatenated after each merge; the skips are divided by the root of 2."""

    joined = 3 * C

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Linear(1, C)

    def join(self, i: int, h: Tensor, skip: Tensor) -> Tensor:
        time = self.time(torch.ones(len(h), 1))[:, :, None, None].expand_as(h)
        return torch.cat([torch.cat([h, skip / 2**0.5], 1), time], 1)


@expect(3)
class InPlaceHalves(Levels):
    """Half of the channels are changed in place; the other half must not be taken for changed."""

    def middle(self, h: Tensor, *more: Tensor) -> Tensor:
        first, second = self.mid(h).chunk(2, 1)
        first.relu_()
        return torch.cat([second, first], 1)


@expect(3)
class Reinterpreted(Levels):
    """Aliases that no operation made."""

    def join(self, i: int, h: Tensor, skip: Tensor) -> Tensor:
        return torch.cat([h, skip.data if i > 1 else skip.detach()], 1)


@expect(3)
class UnpooledByIndices(Levels):
    """Max-unpooling takes the places of the maxima from the encoder: numbers of positions, not features."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(conv(C, C) for _ in range(3))
        self.up = nn.ModuleList(conv(C, C) for _ in range(3))

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        h, skips, places = F.silu(self.stem(x)), [], []
        for down in self.down:
            skips.append(h)
            h, place = F.max_pool2d(F.silu(down(h)), 2, return_indices=True)
            places.append(place)
        h = F.silu(self.mid(h))
        for up, dec in zip(self.up, self.dec, strict=True):
            h = up(F.max_unpool2d(h, places.pop(), [2, 2]))
            h = F.silu(dec(torch.cat([h, skips.pop()], 1)))
        return self.head(h)


@expect(3)
class Masked(AddedLevels):
    """A mask of the input, at each size, multiplies every level."""

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        h, skips, masks = F.silu(self.stem(x)), [], [(x > 0).float().mean(1, keepdim=True).expand(-1, C, -1, -1)]
        for down in self.down:
            h = h * masks[-1]
            skips.append(h)
            h = F.silu(down(h))
            masks.append(F.max_pool2d(masks[-1], 2))
        for up, dec in zip(self.up, self.dec, strict=True):
            masks.pop()
            h = F.silu(dec(up(h) + skips.pop())) * masks[-1]
        return self.head(h)


@expect(3)
class NormBeforeTheInnermost(Levels):
    """Norms and activations at every step, features taken behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(2, C) for _ in range(4))

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        h, skips = self.stem(x), []
        for norm, down in zip(self.norms, self.down, strict=False):
            h = F.relu(norm(h), inplace=True)
            skips.append(h)
            h = down(h)
        h = self.mid(F.relu(self.norms[3](h), inplace=True))
        for up, dec in zip(self.up, self.dec, strict=True):
            h = F.relu_(dec(torch.cat((skips.pop(), up(h)), 1)))
        return self.head(h)


# ------------------------------------------------------------------------------ no U, or more than one


@expect("none")
class InjectedInput(nn.Module):
    """The embedded input is added before every block, as in networks of recurrent depth."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = conv(5, C), conv(C, 5)
        self.blocks = nn.ModuleList(conv(C, C) for _ in range(5))

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        return (torch.randn(2, 5, 8, 8),)

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        first = h = F.silu(self.stem(x))
        for block in self.blocks:
            h = F.silu(block(h + first))
        return self.head(h)


@expect("none")
class ResidualGroups(InjectedInput):
    """RCAN: residual blocks in residual groups in one long residual."""

    def group(self, h: Tensor) -> Tensor:
        start = h
        for block in self.blocks[:3]:
            h = h + block(F.silu(h))
        return self.blocks[3](h) + start

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        first = h = self.stem(x)
        for _ in range(3):
            h = self.group(h)
        return self.head(self.blocks[4](h) + first)


@expect("none")
class NoisyAutoencoder(InjectedInput):
    """Constants that are made anew lie where features lay: nothing goes around."""

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        h = F.relu_(self.stem(x))
        for block in self.blocks:
            maps = torch.linspace(0, 1, h.shape[-1]).expand(len(h), C, h.shape[-2], -1).clone()
            h = F.relu_(block(h)).add_(maps.mul_(2))
            h = h + torch.randn_like(h) + torch.zeros_like(h).add_(1)
        return self.head(h)


@expect("none")
class WeightedDepths(InjectedInput):
    """Every block reads a weighted sum of all features before it."""

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        features = [F.silu(self.stem(x))]
        for block in self.blocks:
            h = sum((n + 1) * feature for n, feature in enumerate(features))
            features.append(F.silu(block(h)))  # pyright: ignore
        return self.head(features[-1])


@expect("none")
class Inception(InjectedInput):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Branches() for _ in range(3))

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        h = self.stem(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


@expect("none")
class DenseByLine(nn.Module):
    """A dense block that is written out."""

    inputs = InjectedInput.inputs

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.out = conv(5, 4), conv(4, 4), conv(8, 4), conv(12, 3)

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        x = F.relu(self.a(x))
        x = torch.cat([x, F.relu(self.b(x))], 1)
        x = torch.cat([x, F.relu(self.c(x))], 1)
        return self.out(x)


@expect("refused")
class TwoUs(nn.Module):
    """A W: two different Us in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Levels(), Levels()

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        return Levels.inputs()

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        return self.second(self.first(x))


@expect("refused")
class GatedLevel(Levels):
    """One level is merged by a gate, the others are concatenated: their numbers depend on whether it counts."""

    def join(self, i: int, h: Tensor, skip: Tensor) -> Tensor:
        return torch.cat([h, skip], 1) if i != 2 else (h * skip.sigmoid()).repeat(1, 2, 1, 1)


@expect("refused")
class ChosenLevel(AddedLevels):
    def join(self, i: int, h: Tensor, skip: Tensor) -> Tensor:
        if i == 2:
            return torch.where(h > skip, h, skip)
        return h + skip
