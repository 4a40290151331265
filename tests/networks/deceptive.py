# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportReturnType=false
# Submodules and lists of them are looked up by name, as in the networks that these stand for.
"""Networks whose merges are easily taken for long skips, or whose long skips are easily overlooked.

Each scales its own skips with `ks`, the coefficients outermost first: the reference that an attached scaling must meet.
`N` is their number. A network that may be refused by name says so by `must = False`.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

D = 8
"""The width everywhere, so that no shape gives a mistake away."""


class Net(nn.Module):
    N = 3
    must = True
    remembers = False

    def __init__(self) -> None:
        super().__init__()
        self.ks: list[float] | None = None

    def k(self, i: int, skip: Tensor) -> Tensor:
        """Skip i as it enters its merge."""
        return skip if self.ks is None else skip * self.ks[i - 1]

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        return (torch.randn(2, 12, 5),)


NETWORKS: list[type[Net]] = []


def network(cls: type[Net]) -> type[Net]:
    NETWORKS.append(cls)
    return cls


class Block(nn.Module):
    """Attention and MLP. `values` are those of the first block, which some language models mix into all later ones."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D, bias=bias), nn.Linear(D, D, bias=bias)
        self.mlp = nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))
        self.mix = nn.Parameter(torch.tensor([0.6, 0.4]))
        self.lambdas = nn.Parameter(torch.tensor([0.8, 0.3]))

    def attend(self, x: Tensor, values: Tensor | None = None) -> tuple[Tensor, Tensor]:
        q, k, v = self.qkv(self.norm1(x)).unsqueeze(1).chunk(3, -1)
        own = v
        if values is not None:
            v = self.mix[0] * v + self.mix[1] * values
        return x + self.out(F.scaled_dot_product_attention(q, k, v).squeeze(1)), own

    def forward(self, x: Tensor, x0: Tensor | None = None, values: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if x0 is not None:
            x = self.lambdas[0] * x + self.lambdas[1] * x0
        x, own = self.attend(x, values)
        return x + self.mlp(self.norm2(x)), own


class Tokens(Net):
    """Three blocks on either side of a middle one; each way to join a skip is one method."""

    middle = 1

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(5, D), nn.Linear(D, 5)
        self.blocks = nn.ModuleList(Block() for _ in range(2 * self.N + self.middle))
        self.fuse = nn.ModuleList(nn.Linear(2 * D, D) for _ in range(self.N))
        self.weights = nn.Parameter(torch.full((self.N,), 0.7))

    def block(self, n: int, x: Tensor) -> Tensor:
        return self.blocks[n](x)[0]

    def join(self, i: int, x: Tensor, skip: Tensor) -> Tensor:
        return self.fuse[i - 1](torch.cat([x, self.k(i, skip)], -1))

    def before(self, x: Tensor) -> Tensor:
        return self.embed(x)

    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.before(x), []
        for n in range(self.N):
            x = self.block(n, x)
            skips.append(x)
        for n in range(self.N, self.N + self.middle):
            x = self.block(n, x)
        for n in range(self.N + self.middle, len(self.blocks)):
            i = len(skips)
            x = self.block(n, self.join(i, x, skips.pop()))
        return self.head(x)


# One tensor, merged in many places.


class Embedded(Tokens):
    """Adds its embedding in every block."""

    def before(self, x: Tensor) -> Tensor:
        self.__dict__["x0"] = F.rms_norm(self.embed(x), (D,))
        return self.x0

    def block(self, n: int, x: Tensor) -> Tensor:
        return self.blocks[n](x, self.x0)[0]


@network
class EmbeddingInEveryBlock(Embedded):
    """A language model with additive U skips, learned weights and no block in the middle."""

    middle = 0

    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.before(x), []
        for n in range(self.N):
            x = self.block(n, x)
            skips.append(x)
        for n in range(self.N, 2 * self.N):
            i = len(skips)
            x = self.block(n, x + self.k(i, self.weights[i - 1] * skips.pop()))
        return self.head(x)


@network
class EmbeddingAndAdditions(Embedded):
    def join(self, i: int, x: Tensor, skip: Tensor) -> Tensor:
        return x + self.k(i, self.weights[i - 1] * skip)


@network
class EmbeddingConcatenated(Embedded):
    def __init__(self) -> None:
        super().__init__()
        self.shown = nn.ModuleList(nn.Linear(2 * D, D) for _ in range(7))

    def block(self, n: int, x: Tensor) -> Tensor:
        return self.blocks[n](self.shown[n](torch.cat([x, self.x0], -1)))[0]


@network
class ValueResiduals(Tokens):
    """Every block mixes the values of the first one into its own."""

    def block(self, n: int, x: Tensor) -> Tensor:
        x, own = self.blocks[n](x, values=None if n == 0 else self.first)
        if n == 0:
            self.__dict__["first"] = own
        return x


@network
class FeaturesReadAgain(Tokens):
    """The first encoder block's output is read in every decoder block next to its long skip."""

    must = False

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.ModuleList(nn.Linear(2 * D, D) for _ in range(7))

    def block(self, n: int, x: Tensor) -> Tensor:
        if n > self.N:
            x = self.again[n](torch.cat([x, self.kept], -1))
        x = self.blocks[n](x)[0]
        if n == 0:
            self.__dict__["kept"] = x
        return x


# A merge of a tensor with itself.


@network
class AroundNothing(Tokens):
    """As many blocks on either side and none in the middle: the innermost skip is merged with itself."""

    middle = 0


@network
class AroundNothingInBlocks(Tokens):
    """The same, where the decoder block takes the skip as an argument and has a norm over the concatenation."""

    middle = 0

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear, self.block = nn.LayerNorm(2 * D), nn.Linear(2 * D, D), Block()

        def forward(self, x: Tensor, skip: Tensor) -> Tensor:
            return self.block(self.linear(self.norm(torch.cat([x, skip], dim=-1))))[0]

    def __init__(self) -> None:
        super().__init__()
        self.dec = nn.ModuleList(self.Decoder() for _ in range(self.N))

    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.embed(x), []
        for n in range(self.N):
            x = self.block(n, x)
            skips.append(x)
        for dec in self.dec:
            i = len(skips)
            x = dec(x, self.k(i, skips.pop()))
        return self.head(x)


# Features of an earlier forward.


@network
class EarlierFeatures(Tokens):
    """From the second forward on, the middle skip is that of the forward before."""

    must = False
    remembers = True

    def join(self, i: int, x: Tensor, skip: Tensor) -> Tensor:
        if i == 2:
            before, self.__dict__["kept"] = self.__dict__.get("kept"), skip.detach()
            skip = skip if before is None else before
        return super().join(i, x, skip)


@network
class EarlierMiddle(Tokens):
    """The middle of the forward before is added to the middle, in a list that the module keeps."""

    must = False
    remembers = True

    def __init__(self) -> None:
        super().__init__()
        self.memory: list[Tensor] = []

    def block(self, n: int, x: Tensor) -> Tensor:
        if n == self.N:
            if self.memory:
                x = x + self.memory.pop()
            self.memory.append(x.detach())
        return super().block(n, x)


# What follows a merge.


class Mixer(nn.Module):
    """An MLP over the positions, (B, L, C)."""

    def __init__(self, length: int = 12) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(length, 16), nn.GELU(), nn.Linear(16, length))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x.transpose(1, 2)).transpose(1, 2)


@network
class MixerAfterTheNorm(Tokens):
    """Concatenation, norm, an MLP over the positions, and only then a layer over the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(2 * D) for _ in range(self.N))
        self.mixers = nn.ModuleList(Mixer() for _ in range(self.N))

    def join(self, i: int, x: Tensor, skip: Tensor) -> Tensor:
        x = torch.cat([x, self.k(i, skip)], -1)
        return self.fuse[i - 1](x + self.mixers[i - 1](self.norms[i - 1](x)))


@network
class MixerAloneAfterTheNorm(MixerAfterTheNorm):
    """No shortcut around the mixer, so that it is the only reader of the merge."""

    def join(self, i: int, x: Tensor, skip: Tensor) -> Tensor:
        x = torch.cat([x, self.k(i, skip)], -1)
        return self.fuse[i - 1](self.mixers[i - 1](self.norms[i - 1](x)))


@network
class MixerAfterAnAddition(MixerAfterTheNorm):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(self.N))

    def join(self, i: int, x: Tensor, skip: Tensor) -> Tensor:
        x = x + self.k(i, skip)
        return x + self.mixers[i - 1](self.norms[i - 1](x))


# A middle that merges by itself.


@network
class CompressedMemory(Tokens):
    """The block in the middle attends to its tokens and to a shorter memory of them."""

    def __init__(self) -> None:
        super().__init__()
        self.compress = nn.Conv1d(D, D, 4, 4)
        self.query, self.pair, self.proj = nn.Linear(D, D), nn.Linear(D, 2 * D), nn.Linear(D, D)

    def block(self, n: int, x: Tensor) -> Tensor:
        if n != self.N:
            return super().block(n, x)
        memory = self.compress(x.transpose(1, 2)).transpose(1, 2)
        keys, values = self.pair(torch.cat([memory, x], dim=1)).chunk(2, -1)
        return x + self.proj(F.scaled_dot_product_attention(self.query(x), keys, values))


@network
class CompressedMemoryBack(CompressedMemory):
    """The memory is computed first, the tokens read it, and it is added back at their length."""

    must = False

    def block(self, n: int, x: Tensor) -> Tensor:
        if n != self.N:
            return Tokens.block(self, n, x)
        memory = self.compress(x.transpose(1, 2))
        memory = F.interpolate(self.proj(memory.transpose(1, 2)).transpose(1, 2), size=x.shape[1])
        return x + memory.transpose(1, 2)


class Levels(Net):
    """Three levels of a U of convolutions over (B, C, L)."""

    joined = 2 * D
    dims = 1

    def __init__(self) -> None:
        super().__init__()
        conv = (nn.Conv1d, nn.Conv2d)[self.dims - 1]
        transposed = (nn.ConvTranspose1d, nn.ConvTranspose2d)[self.dims - 1]
        self.stem, self.mid, self.head = conv(5, D, 3, 1, 1), conv(D, D, 3, 1, 1), conv(D, 5, 3, 1, 1)
        self.down = nn.ModuleList(conv(D, D, 3, 2, 1) for _ in range(3))
        self.up = nn.ModuleList(transposed(D, D, 2, 2) for _ in range(3))
        self.dec = nn.ModuleList(conv(self.joined, D, 3, 1, 1) for _ in range(3))

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        return (torch.randn(2, 5, 16),)

    def level(self, i: int, h: Tensor, *more: Tensor) -> Tensor:
        return h

    def middle(self, h: Tensor, *more: Tensor) -> Tensor:
        return F.silu(self.mid(h))

    def join(self, i: int, h: Tensor, skip: Tensor) -> Tensor:
        return torch.cat([h, self.k(i, skip)], 1)

    def encode(self, x: Tensor, *more: Tensor) -> tuple[Tensor, list[Tensor]]:
        h, skips = F.silu(self.stem(x)), []
        for n, down in enumerate(self.down):
            h = self.level(n, h, *more)
            skips.append(h)
            h = F.silu(down(h))
        return h, skips

    def decode(self, h: Tensor, skips: list[Tensor], *more: Tensor) -> Tensor:
        for n, (up, dec) in enumerate(zip(self.up, self.dec, strict=True)):
            i = len(skips)
            h = self.level(3 + n, F.silu(dec(self.join(i, up(h), skips.pop()))), *more)
        return self.head(h)

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        h, skips = self.encode(x, *more)
        return self.decode(self.middle(h, *more), skips, *more)


@network
class MemoryOfTheMiddle(Levels):
    """A transformer in the middle whose keys are its tokens and a strided memory of them, channels first."""

    def __init__(self) -> None:
        super().__init__()
        self.compress, self.query, self.pair = nn.Conv1d(D, D, 2, 2), nn.Conv1d(D, D, 1), nn.Conv1d(D, 2 * D, 1)

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        return (torch.randn(2, 5, 32),)

    def middle(self, h: Tensor, *more: Tensor) -> Tensor:
        h = F.silu(self.mid(h))
        keys, values = self.pair(torch.cat([self.compress(h), h], 2)).chunk(2, 1)
        weights = (self.query(h).transpose(1, 2) @ keys).softmax(-1)
        return h + (weights @ values.transpose(1, 2)).transpose(1, 2)


# Text.


class TextAttention(nn.Module):
    """Attention of (B, C, L) to itself and to a text (B, T, C), whose keys are concatenated to its own."""

    axis = 1

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, D)
        self.q, self.kv, self.text, self.out = (nn.Linear(D, n * D) for n in (1, 2, 2, 1))

    def forward(self, h: Tensor, text: Tensor) -> Tensor:
        x = self.norm(h).transpose(1, 2)
        (k, v), (kt, vt) = self.kv(x).chunk(2, -1), self.text(text).chunk(2, -1)
        keys, values = torch.cat([k, kt], dim=1), torch.cat([v, vt], dim=1)
        return h + self.out(F.scaled_dot_product_attention(self.q(x), keys, values)).transpose(1, 2)


@network
class TextInTheKeys(Levels):
    """The text has as many axes as the features."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.ModuleList(TextAttention() for _ in range(6))

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        return torch.randn(2, 5, 16), torch.randn(2, 7, D)

    def level(self, i: int, h: Tensor, *more: Tensor) -> Tensor:
        return self.attend[i](h, more[0])


@network
class TextOfALevelInTheKeys(TextInTheKeys):
    """The text goes through a layer before each level, as in encoders that follow the U."""

    def __init__(self) -> None:
        super().__init__()
        self.deeper = nn.ModuleList(nn.Linear(D, D) for _ in range(6))

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        texts = [more[0]]
        for layer in self.deeper:
            texts.append(F.silu(layer(texts[-1])))
        self.__dict__["texts"] = texts
        return super().forward(x)

    def level(self, i: int, h: Tensor, *more: Tensor) -> Tensor:
        return self.attend[i](h, self.texts[i])


@network
class TextByHeads(TextInTheKeys):
    """Keys and values by heads, (B, H, L, C / H), the text first."""

    class Attention(TextAttention):
        def forward(self, h: Tensor, text: Tensor) -> Tensor:
            def heads(x: Tensor) -> Tensor:
                return x.unflatten(-1, (2, D // 2)).transpose(1, 2)

            x = self.norm(h).transpose(1, 2)
            (k, v), (kt, vt) = self.kv(x).chunk(2, -1), self.text(text).chunk(2, -1)
            keys, values = (torch.cat([heads(b), heads(a)], dim=2) for a, b in ((k, kt), (v, vt)))
            y = (heads(self.q(x)) @ keys.transpose(-1, -2)).softmax(-1) @ values
            return h + self.out(y.transpose(1, 2).flatten(2)).transpose(1, 2)

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.ModuleList(self.Attention() for _ in range(6))


# Layers on the skips themselves.


@network
class DeepAdapters(Tokens):
    """Every skip has more layers of its own than lie around the innermost one."""

    depth = 6

    def __init__(self) -> None:
        super().__init__()
        self.adapters = nn.ModuleList(
            nn.Sequential(*(nn.Linear(D, D) for _ in range(self.depth))) for _ in range(self.N)
        )
        self.small = nn.Linear(D, D)

    def block(self, n: int, x: Tensor) -> Tensor:
        return self.small(x) if n == self.N else super().block(n, x)

    def join(self, i: int, x: Tensor, skip: Tensor) -> Tensor:
        return super().join(i, x, self.adapters[i - 1](skip))


@network
class EqualAdapters(DeepAdapters):
    """As many layers on the innermost skip as around it."""

    depth = 1


@network
class DeepAdaptersAdded(DeepAdapters):
    def join(self, i: int, x: Tensor, skip: Tensor) -> Tensor:
        return x + self.k(i, self.adapters[i - 1](skip))


@network
class DeepAdapterInTheMiddle(DeepAdapters):
    """The second skip alone, with more layers than all that it goes around."""

    depth = 30

    def join(self, i: int, x: Tensor, skip: Tensor) -> Tensor:
        return x + self.k(i, self.adapters[i - 1](skip) if i == 2 else skip)


class AdaptersInLine(DeepAdapters):
    """Every merge is a line of its own."""

    depth = 30
    deep = 0

    def forward(self, x: Tensor) -> Tensor:
        s1 = self.block(0, self.embed(x))
        s2 = self.block(1, s1)
        s3 = self.block(2, s2)
        x = self.block(3, s3)
        a1, a2, a3 = (self.adapters[i](s) if i + 1 == self.deep else s for i, s in enumerate((s1, s2, s3)))
        x = self.block(4, x + self.k(3, a3))
        x = self.block(5, x + self.k(2, a2))
        return self.head(self.block(6, x + self.k(1, a1)))


@network
class AdapterInLine(AdaptersInLine):
    deep = 2


@network
class InnermostAdapterInLine(AdaptersInLine):
    """Which of the two paths is the skip, nothing tells."""

    deep = 3
    must = False


# Features that enter twice.


@network
class AddedAndConcatenated(Tokens):
    must = False

    def join(self, i: int, x: Tensor, skip: Tensor) -> Tensor:
        skip = self.k(i, skip)
        return self.fuse[i - 1](torch.cat([x + skip, skip], -1))


@network
class ScalesAndShifts(Tokens):
    """The skip multiplies the main path and is added to it."""

    must = False

    def join(self, i: int, x: Tensor, skip: Tensor) -> Tensor:
        scale, shift = self.blocks[i - 1].mlp, self.blocks[i].mlp
        return x * (1 + scale(self.k(i, skip))) + shift(self.k(i, skip))


@network
class GatedByBoth(Tokens):
    must = False

    def join(self, i: int, x: Tensor, skip: Tensor) -> Tensor:
        skip = self.k(i, skip)
        gate = self.fuse[i - 1](torch.cat([x, skip], -1)).sigmoid()
        return gate * x + (1 - gate) * skip


@network
class GateOfTheChannels(Levels):
    """MAnet: a number for each channel, from skip and main path, multiplies the main path. The skip is concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv1d(D, D, 1), nn.Conv1d(D, D, 1)

    def join(self, i: int, h: Tensor, skip: Tensor) -> Tensor:
        gate = self.a(h.mean(2, keepdim=True)) + self.b(skip.mean(2, keepdim=True))
        return torch.cat([h * gate.sigmoid(), self.k(i, skip)], 1)


@network
class ConcatenatedAndModulated(Levels):
    """Later in the level, the skip multiplies the features as well."""

    must = False

    def level(self, i: int, h: Tensor, *more: Tensor) -> Tensor:
        return h if i < 3 else h * (1 + self.mid(self.k(6 - i, self.features[0])))

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        self.__dict__["features"] = []
        return super().forward(x)

    def join(self, i: int, h: Tensor, skip: Tensor) -> Tensor:
        self.features.insert(0, skip)
        return super().join(i, h, skip)


# Additions that broadcast: refused, because the numbers of the others depend on them.


class Broadcast(Levels):
    must = False
    dims, joined, narrow = 2, D, 0

    def __init__(self) -> None:
        super().__init__()
        self.up[3 - self.narrow] = nn.ConvTranspose2d(D, 1, 2, 2)

    @staticmethod
    def inputs() -> tuple[Tensor, ...]:
        return (torch.randn(2, 5, 16, 16),)

    def join(self, i: int, h: Tensor, skip: Tensor) -> Tensor:
        return h + self.k(i, skip)


@network
class BroadcastOutermost(Broadcast):
    narrow = 1


@network
class BroadcastInTheMiddle(Broadcast):
    narrow = 2


@network
class BroadcastInnermost(Broadcast):
    narrow = 3


# Blocks in the text of the U.


@network
class BranchesInLine(Levels):
    """Parallel branches in the middle, on a line like those of the skips."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.fuse = nn.Conv1d(D, D, 1), nn.Conv1d(D, D, 3, 1, 1), nn.Conv1d(2 * D, D, 1)

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        s1 = F.silu(self.stem(x))
        s2 = F.silu(self.down[0](s1))
        s3 = F.silu(self.down[1](s2))
        h = F.silu(self.down[2](s3))
        h = self.fuse(torch.cat([self.a(h), self.b(F.relu(self.a(h)))], 1))
        h = F.silu(self.dec[0](torch.cat([self.up[0](h), self.k(3, s3)], 1)))
        h = F.silu(self.dec[1](torch.cat([self.up[1](h), self.k(2, s2)], 1)))
        h = F.silu(self.dec[2](torch.cat([self.up[2](h), self.k(1, s1)], 1)))
        return self.head(h)


@network
class ImageAtEveryLevel(Levels):
    """The image, at each size, enters the encoder again."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.enter = nn.Conv1d(5, D, 3, 1, 1), nn.Conv1d(2 * D, D, 3, 1, 1)

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        h, skips = F.silu(self.stem(x)), []
        for down in self.down:
            skips.append(h)
            x = F.avg_pool1d(x, 2)
            h = F.silu(self.enter(torch.cat([down(h), self.image(x)], 1)))
        return self.decode(self.middle(h), skips)


# Every level on a line of its own, and a middle at the resolution of the innermost skip.


class Twice(nn.Module):
    def __init__(self, inside: int, residual: bool) -> None:
        super().__init__()
        self.a, self.b, self.residual = nn.Conv1d(inside, D, 3, 1, 1), nn.Conv1d(D, D, 3, 1, 1), residual

    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(self.b(F.silu(self.a(x))))
        return h + x[:, :D] if self.residual else h


class Written(Net):
    N = 2
    width, residual = 2 * D, False

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head, self.up = nn.Conv1d(5, D, 3, 1, 1), nn.Conv1d(D, 5, 1), nn.ConvTranspose1d(D, D, 2, 2)
        self.e1, self.e2, self.mid = (Twice(D, self.residual) for _ in range(3))
        self.d2, self.d1 = (Twice(self.width, self.residual) for _ in range(2))

    inputs = staticmethod(Levels.inputs)

    def forward(self, x: Tensor) -> Tensor:
        s1 = self.e1(self.stem(x))
        s2 = self.e2(F.max_pool1d(s1, 2))
        x = self.mid(s2)
        x = self.d2(torch.cat([x, self.k(2, s2)], 1))
        x = self.d1(torch.cat([self.up(x), self.k(1, s1)], 1))
        return self.head(x)


network(Written)


@network
class WrittenWithResiduals(Written):
    residual = True


@network
class WrittenAdditions(Written):
    width = D

    def forward(self, x: Tensor) -> Tensor:
        s1 = self.e1(self.stem(x))
        s2 = self.e2(F.max_pool1d(s1, 2))
        x = self.mid(s2)
        x = self.d2(self.k(2, s2) + x)
        x = self.d1(self.up(x) + self.k(1, s1))
        return self.head(x)


@network
class WrittenBelow(WrittenAdditions):
    """A residual block between a pooling and an interpolation: a path without layers at the lower resolution."""

    residual = True

    def forward(self, x: Tensor) -> Tensor:
        s1 = self.e1(self.stem(x))
        s2 = self.e2(F.max_pool1d(s1, 2))
        x = self.mid(F.max_pool1d(s2, 2))
        x = self.d2(self.k(2, s2) + F.interpolate(x, scale_factor=2))
        x = self.d1(self.k(1, s1) + F.interpolate(x, scale_factor=2))
        return self.head(x)


@network
class UpsamplingResiduals(Levels):
    """The way up is a residual block with an interpolation on either side, as in BigGAN."""

    class Up(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv1d(D, D, 3, 1, 1), nn.Conv1d(D, D, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = F.silu(x)
            return self.b(F.interpolate(x, scale_factor=2)) + self.a(F.silu(F.interpolate(x, scale_factor=2)))

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(self.Up() for _ in range(3))


@network
class UpsamplingResidualsAdded(UpsamplingResiduals):
    joined = D

    def join(self, i: int, h: Tensor, skip: Tensor) -> Tensor:
        return h + self.k(i, skip)


@network
class DenseInTheMiddle(Written):
    """Two lines that look like a level of the U, but for what reads them: a dense block."""

    N = 1
    must = False

    def __init__(self) -> None:
        super().__init__()
        self.fuse = nn.Conv1d(2 * D, D, 1)

    def forward(self, x: Tensor) -> Tensor:
        s1 = self.e1(self.stem(x))
        h = self.e2(F.max_pool1d(s1, 2))
        more = self.mid(h)
        x = self.fuse(torch.cat([h, more], 1))
        x = self.d1(torch.cat([self.up(x), self.k(1, s1)], 1))
        return self.head(x)


@network
class Demucs(Net):
    """Additions of strided features, with no layer in the middle: the innermost is merged with itself."""

    N = 2

    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.ModuleList(nn.Conv1d(c, D, 4, 2, 1) for c in (5, D))
        self.dec = nn.ModuleList(nn.ConvTranspose1d(D, c, 4, 2, 1) for c in (D, 5))

    inputs = staticmethod(Levels.inputs)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for layer in self.enc:
            x = F.silu(layer(x))
            skips.append(x)
        for layer in self.dec:
            i = len(skips)
            x = F.silu(layer(x + self.k(i, skips.pop())))
        return x


# The same U several times in one forward.


class Runs(Levels):
    """The U is a method."""

    joined = D

    def once(self, x: Tensor) -> Tensor:
        h, skips = F.silu(self.stem(x)), []
        for down in self.down:
            skips.append(h)
            h = F.silu(down(h))
        h = self.middle(h)
        for up, dec in zip(self.up, self.dec, strict=True):
            i = len(skips)
            h = F.silu(dec(up(h) + self.k(i, skips.pop())))
        return self.head(h)


@network
class Flips(Runs):
    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        return (self.once(x) + self.once(x.flip(-1)).flip(-1)) / 2


@network
class Tiles(Runs):
    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        return torch.cat([self.once(tile) for tile in x.chunk(2, -1)], -1)


@network
class UnequalTiles(Runs):
    must = False

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        return torch.cat([self.once(x), self.once(x[..., :8])], -1)


@network
class Refined(Runs):
    """Each run reads the result of the one before."""

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for _ in range(3):
            y = y + self.once(x + y)
        return y


@network
class TiedLevels(Levels):
    """One set of layers for all levels, by recursion."""

    must = False

    def below(self, i: int, h: Tensor) -> Tensor:
        if i > self.N:
            return self.middle(h)
        h = F.silu(self.mid(h))
        return F.silu(self.dec[0](self.join(i, self.up[0](self.below(i + 1, self.down[0](h))), h)))

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        return self.head(self.below(1, self.stem(x)))


@network
class Vmapped(Runs):
    must = False

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        return torch.vmap(lambda one: self.once(one[None])[0])(x)


def build(cls: type[Net]) -> Any:
    torch.manual_seed(0)
    return cls().eval()
