"""U-shaped networks in many coding styles, written for the tests in the shape of networks that people use.

Each is tiny, runs on CPU, and is deterministic in evaluation mode.
"""

import math
from collections.abc import Callable
from functools import reduce
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def conv(inside: int, outside: int, stride: int = 1, dims: int = 2) -> nn.Module:
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    return layer(inside, outside, 3, stride=stride, padding=1)


class DoubleConv(nn.Module):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(conv(inside, outside), nn.ReLU(inplace=True), conv(outside, outside), nn.ReLU(True))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class HandWritten(nn.Module):
    """Every level on its own line, the textbook U-Net."""

    def __init__(self, c: int = 4) -> None:
        super().__init__()
        self.e1, self.e2, self.e3 = DoubleConv(3, c), DoubleConv(c, 2 * c), DoubleConv(2 * c, 4 * c)
        self.mid = DoubleConv(4 * c, 8 * c)
        self.u3 = nn.ConvTranspose2d(8 * c, 4 * c, 2, 2)
        self.u2 = nn.ConvTranspose2d(4 * c, 2 * c, 2, 2)
        self.u1 = nn.ConvTranspose2d(2 * c, c, 2, 2)
        self.d3, self.d2, self.d1 = DoubleConv(8 * c, 4 * c), DoubleConv(4 * c, 2 * c), DoubleConv(2 * c, c)
        self.out = nn.Conv2d(c, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        e1 = self.e1(x)
        e2 = self.e2(F.max_pool2d(e1, 2))
        e3 = self.e3(F.max_pool2d(e2, 2))
        m = self.mid(F.max_pool2d(e3, 2))
        d3 = self.d3(torch.cat([self.u3(m), e3], dim=1))
        d2 = self.d2(torch.cat([e2, self.u2(d3)], dim=1))  # the skip first
        d1 = self.d1(torch.cat((self.u1(d2), e1), 1))
        return self.out(d1)


class ZipLoop(nn.Module):
    """A list of skips, reversed and zipped; the decoder block is called with the concatenation."""

    def __init__(self, widths: tuple[int, ...] = (4, 8, 12, 16)) -> None:
        super().__init__()
        self.stem = conv(3, widths[0])
        pairs = list(pairwise(widths))
        self.down = nn.ModuleList(conv(a, b, stride=2) for a, b in pairs)
        self.up = nn.ModuleList(DoubleConv(b + a, a) for a, b in reversed(pairs))
        self.head = conv(widths[0], 3)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.stem(x)]
        for layer in self.down:
            features.append(F.relu(layer(features[-1])))
        x = features.pop()
        for block, skip in zip(self.up, reversed(features), strict=True):
            x = F.interpolate(x, size=skip.shape[-2:], mode="nearest")
            x = block(torch.cat([x, skip], dim=1))
        return self.head(x)


class CatThenFunction(ZipLoop):
    """A plain function stands between the concatenation and the next module, in a loop."""

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        x = self.stem(x)
        for layer in self.down:
            skips.append(x)
            x = F.relu(layer(x))
        for block in self.up:
            skip = skips.pop()
            x = F.interpolate(x, scale_factor=2)
            x = F.silu(torch.cat([skip, x], dim=1))
            x = block(x)
        return self.head(x)


def merge_and_activate(x: Tensor, skip: Tensor) -> Tensor:
    return F.silu(torch.cat([x, skip], dim=1))


class FreeFunction(ZipLoop):
    """The merge, with an activation, stands in a function that belongs to no module."""

    def forward(self, x: Tensor) -> Tensor:
        features = [self.stem(x)]
        for layer in self.down:
            features.append(F.relu(layer(features[-1])))
        x = features.pop()
        for block in self.up:
            x = block(merge_and_activate(F.interpolate(x, scale_factor=2), features.pop()))
        return self.head(x)


class HelperMethod(ZipLoop):
    """The merge stands in a helper method that runs once for each level."""

    def join(self, x: Tensor, skip: Tensor) -> Tensor:
        return F.silu(torch.cat([F.interpolate(x, scale_factor=2), skip], dim=1))

    def forward(self, x: Tensor) -> Tensor:
        features = [self.stem(x)]
        for layer in self.down:
            features.append(F.relu(layer(features[-1])))
        x = features.pop()
        for block in self.up:
            x = block(self.join(x, features.pop()))
        return self.head(x)


class Additive(nn.Module):
    """Additions in a loop, as in SegResNet, NAFNet and LinkNet."""

    def __init__(self, c: int = 4, levels: int = 3) -> None:
        super().__init__()
        self.stem = conv(3, c)
        self.down = nn.ModuleList(conv(c * 2**i, c * 2 ** (i + 1), stride=2) for i in range(levels))
        self.up = nn.ModuleList(nn.ConvTranspose2d(c * 2 ** (i + 1), c * 2**i, 2, 2) for i in reversed(range(levels)))
        self.blocks = nn.ModuleList(conv(c * 2**i, c * 2**i) for i in reversed(range(levels)))
        self.head = conv(c, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        skips = []
        for down in self.down:
            skips.append(x)
            x = F.silu(down(x))
        for up, block in zip(self.up, self.blocks, strict=True):
            x = up(x) + skips.pop()
            x = F.silu(block(x))
        return self.head(x)


class Recursive(nn.Module):
    """pix2pix: each level contains the next, and concatenates its own input. Activations work in place."""

    def __init__(self, outside: int, inside: int, inner: nn.Module | None = None, outermost: bool = False) -> None:
        super().__init__()
        down = nn.Conv2d(3 if outermost else outside, inside, 4, 2, 1)
        up = nn.ConvTranspose2d(inside if inner is None else 2 * inside, 3 if outermost else outside, 4, 2, 1)
        layers = [down, up] if outermost else [nn.LeakyReLU(0.2, True), down, nn.ReLU(True), up]
        if inner is not None:
            layers.insert(1 if outermost else 2, inner)
        if outermost:
            layers.insert(2, nn.ReLU(True))
        self.model = nn.Sequential(*layers)
        self.outermost = outermost

    def forward(self, x: Tensor) -> Tensor:
        if self.outermost:
            return self.model(x)
        return torch.cat([x, self.model(x)], 1)


def pix2pix() -> nn.Module:
    net = Recursive(12, 16)
    net = Recursive(8, 12, net)
    net = Recursive(4, 8, net)
    return Recursive(3, 4, net, outermost=True)


class AttentionGate(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.g, self.x, self.psi = nn.Conv2d(c, c, 1), nn.Conv2d(c, c, 1), nn.Conv2d(c, 1, 1)

    def forward(self, g: Tensor, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.psi(F.relu(self.g(g) + self.x(x))))


class Attention(nn.Module):
    """Attention U-Net: the skip passes a gate that looks at the main path; the innermost level has none."""

    def __init__(self, c: int = 4) -> None:
        super().__init__()
        self.e1, self.e2, self.e3 = DoubleConv(3, c), DoubleConv(c, 2 * c), DoubleConv(2 * c, 4 * c)
        self.u2, self.u1 = nn.Conv2d(4 * c, 2 * c, 1), nn.Conv2d(2 * c, c, 1)
        self.a2, self.a1 = AttentionGate(2 * c), AttentionGate(c)
        self.d2, self.d1 = DoubleConv(4 * c, 2 * c), DoubleConv(2 * c, c)
        self.out = nn.Conv2d(c, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        e1 = self.e1(x)
        e2 = self.e2(F.avg_pool2d(e1, 2))
        e3 = self.e3(F.avg_pool2d(e2, 2))
        g2 = self.u2(F.interpolate(e3, scale_factor=2))
        d2 = self.d2(torch.cat([self.a2(g2, e2), g2], 1))
        g1 = self.u1(F.interpolate(d2, scale_factor=2))
        return self.out(self.d1(torch.cat([self.a1(g1, e1), g1], 1)))


class Cropped(nn.Module):
    """The original U-Net: valid convolutions, and the skip is cropped to the main path."""

    def __init__(self, c: int = 4) -> None:
        super().__init__()
        self.e1, self.e2, self.mid = nn.Conv2d(3, c, 3), nn.Conv2d(c, 2 * c, 3), nn.Conv2d(2 * c, 2 * c, 3)
        self.d2, self.d1 = nn.Conv2d(4 * c, c, 3), nn.Conv2d(2 * c, 3, 3)

    @staticmethod
    def crop(skip: Tensor, like: Tensor) -> Tensor:
        top, left = (skip.shape[2] - like.shape[2]) // 2, (skip.shape[3] - like.shape[3]) // 2
        return skip[:, :, top : top + like.shape[2], left : left + like.shape[3]]

    def forward(self, x: Tensor) -> Tensor:
        e1 = F.relu(self.e1(x))
        e2 = F.relu(self.e2(F.max_pool2d(e1, 2)))
        m = F.interpolate(F.relu(self.mid(F.max_pool2d(e2, 2))), scale_factor=2)
        d2 = F.interpolate(F.relu(self.d2(torch.cat([m, self.crop(e2, m)], 1))), scale_factor=2)
        return self.d1(torch.cat([d2, self.crop(e1, d2)], 1))


class UpBlock(nn.Module):
    """smp: the block takes the skip as a keyword and concatenates inside; it may be None."""

    def __init__(self, inside: int, skip: int, outside: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = conv(inside + skip, outside), conv(outside, outside)

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        x = F.interpolate(x, scale_factor=2.0, mode="nearest")
        if skip is not None:
            x = torch.cat([x, skip], dim=1)
        return F.relu(self.conv2(F.relu(self.conv1(x))))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([conv(3, 4, 2), conv(4, 8, 2), conv(8, 12, 2)])

    def forward(self, x: Tensor) -> list[Tensor]:
        features = [x]
        for stage in self.stages:
            features.append(F.relu(stage(features[-1])))
        return features


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([UpBlock(12, 8, 8), UpBlock(8, 4, 4), UpBlock(4, 0, 4)])

    def forward(self, *features: Tensor) -> Tensor:
        x, *skips = features[1:][::-1]
        for i, block in enumerate(self.blocks):
            x = block(x, skip=skips[i] if i < len(skips) else None)
        return x


class EncoderDecoder(nn.Module):
    """segmentation-models-pytorch: encoder, decoder and head as modules, features passed as *arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder, self.head = Encoder(), Decoder(), conv(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.decoder(*self.encoder(x)))


class PoppingDecoder(nn.Module):
    """A decoder level that pops its skips out of the caller's list."""

    def __init__(self, inside: int, skip: int, outside: int) -> None:
        super().__init__()
        self.conv = conv(inside + skip, outside)

    def forward(self, x: Tensor, skips: list[Tensor]) -> Tensor:
        skip = skips.pop()
        x = torch.cat([F.interpolate(x, size=skip.shape[2:]), skip], 1)
        return F.relu(self.conv(x))


class Popping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([conv(3, 4), conv(4, 8, 2), conv(8, 12, 2)])
        self.up = nn.ModuleList([PoppingDecoder(12, 8, 8), PoppingDecoder(8, 4, 4)])
        self.head = conv(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for layer in self.down:
            x = F.relu(layer(x))
            skips.append(x)
        skips.pop()
        for block in self.up:
            x = block(x, skips)
        return self.head(x)


class SharedDecoder(nn.Module):
    """One decoder block with the same weights at every level."""

    def __init__(self, c: int = 6) -> None:
        super().__init__()
        self.stem, self.down, self.head = conv(3, c), nn.ModuleList(conv(c, c, 2) for _ in range(3)), conv(c, 3)
        self.up = UpBlock(c, c, c)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        skips = []
        for down in self.down:
            skips.append(x)
            x = F.relu(down(x))
        while skips:
            x = self.up(x, skip=skips.pop())
        return self.head(x)


class ResBlock(nn.Module):
    """guided-diffusion: GroupNorm, SiLU, convolution, time embedding, and a 1x1 shortcut."""

    def __init__(self, inside: int, outside: int, time: int) -> None:
        super().__init__()
        self.in_layers = nn.Sequential(nn.GroupNorm(4, inside), nn.SiLU(), conv(inside, outside))
        self.emb = nn.Linear(time, outside)
        self.out_layers = nn.Sequential(nn.GroupNorm(4, outside), nn.SiLU(), nn.Dropout(0.1), conv(outside, outside))
        self.skip_connection = nn.Identity() if inside == outside else nn.Conv2d(inside, outside, 1)

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        h = self.in_layers(x)
        h = h + self.emb(F.silu(emb))[:, :, None, None]
        return self.skip_connection(x) + self.out_layers(h)


class TimestepSequential(nn.Sequential):
    def forward(self, x: Tensor, emb: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        for layer in self:
            x = layer(x, emb) if isinstance(layer, ResBlock) else layer(x)
        return x


class Upsample(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.conv = conv(c, c)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2, mode="nearest"))


class GuidedDiffusion(nn.Module):
    """openai/guided-diffusion: `h = module(torch.cat([h, hs.pop()], dim=1), emb)`."""

    def __init__(self, c: int = 8) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(c, 16), nn.SiLU(), nn.Linear(16, 16))
        self.input_blocks = nn.ModuleList(
            [
                TimestepSequential(conv(3, c)),
                TimestepSequential(ResBlock(c, c, 16)),
                TimestepSequential(conv(c, c, 2)),
                TimestepSequential(ResBlock(c, 2 * c, 16)),
            ]
        )
        self.middle = TimestepSequential(ResBlock(2 * c, 2 * c, 16))
        self.output_blocks = nn.ModuleList(
            [
                TimestepSequential(ResBlock(4 * c, 2 * c, 16)),
                TimestepSequential(ResBlock(3 * c, c, 16), Upsample(c)),
                TimestepSequential(ResBlock(2 * c, c, 16)),
                TimestepSequential(ResBlock(2 * c, c, 16)),
            ]
        )
        self.out = nn.Sequential(nn.GroupNorm(4, c), nn.SiLU(), conv(c, 3))
        self.c = c

    def forward(self, x: Tensor, timesteps: Tensor) -> Tensor:
        frequencies = torch.exp(-math.log(1e4) * torch.arange(self.c // 2) / (self.c // 2))
        angles = timesteps[:, None].float() * frequencies
        emb = self.time(torch.cat([angles.cos(), angles.sin()], dim=-1))
        hs, h = [], x
        for module in self.input_blocks:
            h = module(h, emb)
            hs.append(h)
        h = self.middle(h, emb)
        for module in self.output_blocks:
            h = module(torch.cat([h, hs.pop()], dim=1), emb)
        return self.out(h)


class Residual(nn.Module):
    def __init__(self, fn: nn.Module) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x) + x


class LinearAttention(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Conv2d(c, 3 * c, 1, bias=False), nn.Conv2d(c, c, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        q, k, v = (t.reshape(b, c, h * w) for t in self.qkv(x).chunk(3, dim=1))
        context = torch.einsum("bdn,ben->bde", k.softmax(-1), v)
        return self.out(torch.einsum("bde,bdn->ben", context, q.softmax(-2)).reshape(b, c, h, w))


class Lucidrains(nn.Module):
    """denoising-diffusion-pytorch: two skips a level, the stem joined at the end, residual attention."""

    def __init__(self, c: int = 8) -> None:
        super().__init__()
        self.init_conv = nn.Conv2d(6, c, 7, padding=3)
        self.downs = nn.ModuleList(
            nn.ModuleList([ResBlock(a, a, 16), ResBlock(a, a, 16), Residual(LinearAttention(a)), conv(a, b, s)])
            for a, b, s in ((c, c, 2), (c, 2 * c, 1))
        )
        self.mid = ResBlock(2 * c, 2 * c, 16)
        self.ups = nn.ModuleList(
            nn.ModuleList([ResBlock(a + b, b, 16), ResBlock(a + b, b, 16), Residual(LinearAttention(b)), up])
            for a, b, up in ((c, 2 * c, nn.Sequential(nn.Upsample(scale_factor=2), conv(2 * c, c))), (c, c, conv(c, c)))
        )
        self.time = nn.Sequential(nn.Linear(1, 16), nn.GELU(), nn.Linear(16, 16))
        self.final_res, self.final = ResBlock(2 * c, c, 16), nn.Conv2d(c, 3, 1)

    def forward(self, x: Tensor, time: Tensor, x_self_cond: Tensor | None = None) -> Tensor:
        x_self_cond = torch.zeros_like(x) if x_self_cond is None else x_self_cond
        x = self.init_conv(torch.cat((x_self_cond, x), dim=1))
        r = x.clone()
        t = self.time(time[:, None].float())
        h = []
        for block1, block2, attention, down in self.downs:  # pyright: ignore
            x = block1(x, t)
            h.append(x)
            x = attention(block2(x, t))
            h.append(x)
            x = down(x)
        x = self.mid(x, t)
        for block1, block2, attention, up in self.ups:  # pyright: ignore
            x = block1(torch.cat((x, h.pop()), dim=1), t)
            x = block2(torch.cat((x, h.pop()), dim=1), t)
            x = up(attention(x))
        return self.final(self.final_res(torch.cat((x, r), dim=1), t))


class Mlp(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(c), nn.Linear(c, 2 * c), nn.Linear(2 * c, c)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class ChannelsLast(nn.Module):
    """k-diffusion's HDiT: (B, H, W, C) throughout, pixel (un)shuffling by views, and merges by lerp."""

    def __init__(self, c: int = 8) -> None:
        super().__init__()
        self.patch_in, self.patch_out = nn.Linear(3, c), nn.Linear(c, 3)
        self.down = nn.ModuleList(
            nn.ModuleList([Mlp(c * 2**i), nn.Linear(4 * c * 2**i, c * 2 ** (i + 1))]) for i in (0, 1)
        )
        self.mid = Mlp(4 * c)
        self.split = nn.ModuleList(nn.Linear(c * 2 ** (i + 1), 4 * c * 2**i) for i in (1, 0))
        self.up = nn.ModuleList(Mlp(c * 2**i) for i in (1, 0))
        self.fac = nn.Parameter(torch.full((2,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_in(x.movedim(1, -1))
        skips = []
        for block, merge in self.down:  # pyright: ignore
            x = block(x)
            skips.append(x)
            b, h, w, c = x.shape
            x = merge(x.view(b, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h // 2, w // 2, 4 * c))
        x = self.mid(x)
        for i, (split, block) in enumerate(zip(self.split, self.up, strict=True)):
            skip = skips.pop()
            b, h, w, c = x.shape
            x = split(x).view(b, h, w, 2, 2, c // 2).permute(0, 1, 3, 2, 4, 5).reshape(b, 2 * h, 2 * w, c // 2)
            x = block(torch.lerp(skip, x, self.fac[i].to(x.dtype)))
        return self.patch_out(x).movedim(-1, 1)


class Tokens(nn.Module):
    """A U-shaped transformer on (B, L, C), the authors' U-ViT: `skip_linear(cat([x, skip], dim=-1))` in the block."""

    class Block(nn.Module):
        def __init__(self, c: int, skip: bool = False) -> None:
            super().__init__()
            self.norm, self.attention = nn.LayerNorm(c), nn.MultiheadAttention(c, 2, batch_first=True)
            self.mlp = Mlp(c)
            self.skip_linear = nn.Linear(2 * c, c) if skip else None

        def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
            if self.skip_linear is not None:
                x = self.skip_linear(torch.cat([x, skip], dim=-1))  # pyright: ignore
            h = self.norm(x)
            return self.mlp(x + self.attention(h, h, h, need_weights=False)[0])

    def __init__(self, c: int = 8, half: int = 3) -> None:
        super().__init__()
        self.embed, self.time, self.head = nn.Linear(3, c), nn.Linear(1, c), nn.Linear(c, 3)
        self.in_blocks = nn.ModuleList(self.Block(c) for _ in range(half))
        self.mid_block = self.Block(c)
        self.out_blocks = nn.ModuleList(self.Block(c, skip=True) for _ in range(half))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        x = torch.cat([self.time(t[:, None, None].float()), self.embed(x)], dim=1)
        skips = []
        for block in self.in_blocks:
            x = block(x)
            skips.append(x)
        x = self.mid_block(x)
        for block in self.out_blocks:
            x = block(x, skips.pop())
        return self.head(x[:, 1:])


class AdditiveTokens(Tokens):
    """A transformer with long additive skips and no change of resolution."""

    def __init__(self) -> None:
        super().__init__()
        self.out_blocks = nn.ModuleList(self.Block(8) for _ in range(3))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        x = self.embed(x) + self.time(t[:, None, None].float())
        skips = []
        for block in self.in_blocks:
            x = block(x)
            skips.append(x)
        x = self.mid_block(x)
        for block in self.out_blocks:
            x = x + skips.pop()
            x = block(x)
        return self.head(x)


class OneDimensional(nn.Module):
    """Wave-U-Net: (B, C, T), decimation by slicing, linear interpolation."""

    def __init__(self, c: int = 4) -> None:
        super().__init__()
        self.down = nn.ModuleList([conv(1, c, dims=1), conv(c, 2 * c, dims=1), conv(2 * c, 3 * c, dims=1)])
        self.mid = conv(3 * c, 3 * c, dims=1)
        self.up = nn.ModuleList([conv(6 * c, 2 * c, dims=1), conv(4 * c, c, dims=1), conv(2 * c, c, dims=1)])
        self.out = nn.Conv1d(c + 1, 1, 1)

    def forward(self, wave: Tensor) -> Tensor:
        x, skips = wave, []
        for layer in self.down:
            x = F.leaky_relu(layer(x), 0.1)
            skips.append(x)
            x = x[:, :, ::2]
        x = self.mid(x)
        for layer in self.up:
            x = F.interpolate(x, scale_factor=2, mode="linear", align_corners=False)
            x = F.leaky_relu(layer(torch.cat([x, skips.pop()], dim=1)), 0.1)
        return torch.tanh(self.out(torch.cat([x, wave], dim=1)))


class Video(nn.Module):
    """(B, F, C, H, W): spatial layers on frames folded into the batch, a temporal convolution, skips kept in 5D."""

    def __init__(self, c: int = 4) -> None:
        super().__init__()
        self.stem, self.down, self.mid = conv(3, c), conv(c, 2 * c, 2), conv(2 * c, 2 * c)
        self.down2, self.up2 = conv(2 * c, 2 * c, 2), conv(4 * c, 2 * c)
        self.temporal = nn.Conv1d(2 * c, 2 * c, 3, padding=1)
        self.up, self.head = conv(3 * c, c), conv(c, 3)

    def forward(self, video: Tensor) -> Tensor:
        b, f = video.shape[:2]

        def frames(x: Tensor) -> Tensor:
            return x.unflatten(0, (b, f))

        s1 = frames(F.relu(self.stem(video.flatten(0, 1))))
        s2 = frames(F.relu(self.down(s1.flatten(0, 1))))
        x = F.relu(self.mid(F.relu(self.down2(s2.flatten(0, 1)))))
        _, c, h, w = x.shape
        x = frames(x).permute(0, 3, 4, 2, 1).reshape(b * h * w, c, f)
        x = self.temporal(x).reshape(b, h, w, c, f).permute(0, 4, 3, 1, 2)
        x = frames(F.interpolate(x.flatten(0, 1), scale_factor=2))
        x = F.relu(self.up2(torch.cat([x, s2], dim=2).flatten(0, 1)))
        x = frames(F.interpolate(x, scale_factor=2))
        return frames(self.head(F.relu(self.up(torch.cat([s1, x], dim=2).flatten(0, 1)))))


class Hourglass(nn.Module):
    """One hourglass: additions, with a residual block on the side of each skip; recursive."""

    def __init__(self, depth: int, c: int) -> None:
        super().__init__()
        self.side, self.low1 = Residual(conv(c, c)), Residual(conv(c, c))
        self.inner = Hourglass(depth - 1, c) if depth > 1 else Residual(conv(c, c))
        self.low3 = Residual(conv(c, c))

    def forward(self, x: Tensor) -> Tensor:
        side = self.side(x)
        low = self.low3(self.inner(self.low1(F.max_pool2d(x, 2))))
        return side + F.interpolate(low, scale_factor=2)


class HourglassNet(nn.Module):
    def __init__(self, stacks: int = 1, c: int = 6) -> None:
        super().__init__()
        self.stem, self.head = conv(3, c), conv(c, 3)
        self.stacks = nn.ModuleList(Hourglass(3, c) for _ in range(stacks))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        for hourglass in self.stacks:
            x = F.relu(hourglass(x))
        return self.head(x)


class Guided(nn.Module):
    """A wrapper that runs the same network twice in one forward, with and without its condition."""

    def __init__(self) -> None:
        super().__init__()
        self.net = ZipLoop()

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.net(x) - self.net(torch.zeros_like(x) + 0.1 * x)


class Concat(nn.Module):
    def forward(self, *tensors: Tensor) -> Tensor:
        return torch.cat(tensors, 1)


class Mixed(nn.Module):
    """Concatenation at the outer and inner level, an addition between them."""

    def __init__(self, c: int = 4) -> None:
        super().__init__()
        self.e = nn.ModuleList([conv(3, c), conv(c, c, 2), conv(c, c, 2), conv(c, c, 2)])
        self.d3, self.d2, self.d1, self.head = conv(2 * c, c), conv(c, c), conv(2 * c, c), conv(c, 3)

    def forward(self, x: Tensor) -> Tensor:
        s1 = F.relu(self.e[0](x))
        s2 = F.relu(self.e[1](s1))
        s3 = F.relu(self.e[2](s2))
        x = F.relu(self.e[3](s3))
        x = F.relu(self.d3(torch.cat([F.interpolate(x, scale_factor=2), s3], 1)))
        x = F.relu(self.d2(F.interpolate(x, scale_factor=2) + s2))
        x = F.relu(self.d1(torch.cat([F.interpolate(x, scale_factor=2), s1], 1)))
        return self.head(x)


class NestedFunction(nn.Module):
    """The merge stands in a function inside the forward."""

    def __init__(self, c: int = 4) -> None:
        super().__init__()
        self.down = nn.ModuleList([conv(3, c), conv(c, c, 2), conv(c, c, 2)])
        self.up = nn.ModuleList([conv(c, c), conv(c, 3)])

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for layer in self.down:
            x = F.silu(layer(x))
            skips.append(x)
        skips.pop()

        def climb(x: Tensor, layer: nn.Module) -> Tensor:
            return F.silu(layer(F.interpolate(x, scale_factor=2) + skips.pop()))

        for layer in self.up:
            x = climb(x, layer)
        return x


class Functional(nn.Module):
    """Folds over lists of layers, with lambdas."""

    def __init__(self, c: int = 4) -> None:
        super().__init__()
        self.down = nn.ModuleList([conv(3, c), conv(c, c, 2), conv(c, c, 2), conv(c, c, 2)])
        self.up = nn.ModuleList([conv(2 * c, c), conv(2 * c, c), conv(2 * c, 3)])

    def forward(self, x: Tensor) -> Tensor:
        features = reduce(lambda made, layer: [*made, F.silu(layer(made[-1]))], self.down, [x])[1:]
        return reduce(
            lambda y, pair: pair[0](F.silu(torch.cat([F.interpolate(y, scale_factor=2), pair[1]], 1))),
            zip(self.up, features[-2::-1], strict=True),
            features[-1],
        )


class OneConcat(nn.Module):
    """One module without weights does all merges, and one does all activations."""

    def __init__(self, c: int = 4) -> None:
        super().__init__()
        self.concat, self.act = Concat(), nn.SiLU()
        self.down = nn.ModuleList([conv(3, c), conv(c, c, 2), conv(c, c, 2)])
        self.up = nn.ModuleList([conv(2 * c, c), conv(2 * c, 3)])

    def forward(self, x: Tensor) -> Tensor:
        a = self.act(self.down[0](x))
        b = self.act(self.down[1](a))
        x = F.interpolate(self.act(self.down[2](b)), scale_factor=2)
        x = F.interpolate(self.up[0](self.act(self.concat(x, b))), scale_factor=2)
        return self.up[1](self.act(self.concat(x, a)))


class Stored:
    """fastai's hook: keeps what a layer returned."""

    def __init__(self, layer: nn.Module) -> None:
        layer.register_forward_hook(self.keep)

    def keep(self, module: nn.Module, args: object, output: Tensor) -> None:
        self.value = output


class StoredBlock(nn.Module):
    def __init__(self, inside: int, skip: int, outside: int, stored: Stored) -> None:
        super().__init__()
        self.stored, self.bn = stored, nn.BatchNorm2d(skip)
        self.conv = conv(inside + skip, outside)

    def forward(self, x: Tensor) -> Tensor:
        x = F.interpolate(x, scale_factor=2)
        return self.conv(F.relu(torch.cat([x, self.bn(self.stored.value)], dim=1)))


class FastAI(nn.Module):
    """fastai's DynamicUnet: the decoder blocks look into hooks on the encoder, and normalise what they find."""

    def __init__(self, c: int = 4) -> None:
        super().__init__()
        encoder = nn.Sequential(conv(3, c), nn.ReLU(), conv(c, 2 * c, 2), nn.ReLU(), conv(2 * c, 2 * c, 2), nn.ReLU())
        first, second = Stored(encoder[1]), Stored(encoder[3])
        self.layers = nn.Sequential(
            encoder, StoredBlock(2 * c, 2 * c, c, second), StoredBlock(c, c, c, first), conv(c, 2)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Lateral(nn.Module):
    def __init__(self, c: int, skip: int) -> None:
        super().__init__()
        self.skip_conv = nn.Conv2d(skip, c, 1)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=2) + self.skip_conv(skip)


class Pyramid(nn.Module):
    """A feature pyramid: lateral convolutions, additions, and an output at every level."""

    def __init__(self, c: int = 6) -> None:
        super().__init__()
        self.down = nn.ModuleList([conv(3, 4, 2), conv(4, 8, 2), conv(8, 8, 2)])
        self.top, self.lateral2, self.lateral1 = nn.Conv2d(8, c, 1), Lateral(c, 8), Lateral(c, 4)
        self.heads = nn.ModuleList(conv(c, 2) for _ in range(3))

    def forward(self, x: Tensor) -> list[Tensor]:
        features = []
        for layer in self.down:
            x = F.relu(layer(x))
            features.append(x)
        p3 = self.top(features[2])
        p2 = self.lateral2(p3, features[1])
        p1 = self.lateral1(p2, features[0])
        return [head(p) for head, p in zip(self.heads, (p1, p2, p3), strict=True)]


class Shallow(nn.Module):
    """A single level."""

    def __init__(self, c: int = 4) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = conv(3, c), conv(c, c, 2), conv(c, c), conv(2 * c, 3)

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.a(x))
        return self.d(torch.cat([F.interpolate(self.c(F.relu(self.b(a))), scale_factor=2), a], 1))


# Ambiguous ----------------------------------------------------------------------------------------------------------


class UNetPlusPlus(nn.Module):
    def __init__(self, c: int = 4) -> None:
        super().__init__()
        self.x00, self.x10, self.x20 = conv(3, c), conv(c, c, 2), conv(c, c, 2)
        self.x01, self.x11, self.x02 = conv(2 * c, c), conv(2 * c, c), conv(3 * c, c)
        self.head = conv(c, 3)

    def forward(self, x: Tensor) -> Tensor:
        def up(t: Tensor) -> Tensor:
            return F.interpolate(t, scale_factor=2)

        x00 = F.relu(self.x00(x))
        x10 = F.relu(self.x10(x00))
        x01 = F.relu(self.x01(torch.cat([x00, up(x10)], 1)))
        x20 = F.relu(self.x20(x10))
        x11 = F.relu(self.x11(torch.cat([x10, up(x20)], 1)))
        x02 = F.relu(self.x02(torch.cat([x00, x01, up(x11)], 1)))
        return self.head(x02)


class UNet3Plus(nn.Module):
    def __init__(self, c: int = 4) -> None:
        super().__init__()
        self.e = nn.ModuleList([conv(3, c), conv(c, c, 2), conv(c, c, 2)])
        self.side = nn.ModuleList(conv(c, c) for _ in range(6))
        self.d1, self.d0, self.head = conv(3 * c, c), conv(3 * c, c), conv(c, 3)

    def forward(self, x: Tensor) -> Tensor:
        e0 = F.relu(self.e[0](x))
        e1 = F.relu(self.e[1](e0))
        e2 = F.relu(self.e[2](e1))
        down, same, up = (
            self.side[0](F.max_pool2d(e0, 2)),
            self.side[1](e1),
            self.side[2](F.interpolate(e2, scale_factor=2)),
        )
        d1 = F.relu(self.d1(torch.cat([down, same, up], 1)))
        same, near = self.side[3](e0), self.side[4](F.interpolate(d1, scale_factor=2))
        far = self.side[5](F.interpolate(e2, scale_factor=4))
        return self.head(F.relu(self.d0(torch.cat([same, near, far], 1))))


class TwoDecoders(nn.Module):
    """One encoder, two decoders: each feature is a skip twice."""

    def __init__(self, c: int = 4) -> None:
        super().__init__()
        self.down = nn.ModuleList([conv(3, c), conv(c, c, 2), conv(c, c, 2)])
        self.decoders = nn.ModuleList(nn.ModuleList([conv(2 * c, c), conv(2 * c, 3)]) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        a = F.relu(self.down[0](x))
        b = F.relu(self.down[1](a))
        x = F.interpolate(F.relu(self.down[2](b)), scale_factor=2)
        results = []
        for inner, outer in self.decoders:  # pyright: ignore
            y = F.interpolate(F.relu(inner(torch.cat([x, b], 1))), scale_factor=2)
            results.append(outer(torch.cat([y, a], 1)))
        return tuple(results)


# With norms after the merges ----------------------------------------------------------------------------------------


class RMSNorm(nn.Module):
    """As many write it by hand."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class NormedMerges(nn.Module):
    """A norm over each concatenation, then a linear layer, as Skip-DiT has it; or GroupNorm and a convolution.

    The last `plain` merges have no norm. `kappas`, innermost first, multiply the skip's channels after the norm.
    """

    def __init__(
        self, norm: Callable[[int], nn.Module] = nn.LayerNorm, axis: int = -1, width: int = 8, plain: int = 0
    ) -> None:
        super().__init__()
        self.axis, self.width = axis, width

        def layer(inputs: int) -> nn.Module:
            return nn.Conv1d(inputs, width, 1) if axis == 1 else nn.Linear(inputs, width)

        self.encoder = nn.ModuleList(layer(width) for _ in range(3))
        self.middle = layer(width)
        self.norms = nn.ModuleList(norm(2 * width) for _ in range(3 - plain))
        self.norms.extend(nn.Identity() for _ in range(plain))
        self.merges = nn.ModuleList(layer(2 * width) for _ in range(3))

    def forward(self, x: Tensor, kappas: tuple[float, ...] | None = None) -> Tensor:
        skips = []
        for block in self.encoder:
            x = x + torch.tanh(block(x))
            skips.append(x)
        x = torch.tanh(self.middle(x))
        for i, (norm, merge) in enumerate(zip(self.norms, self.merges, strict=True)):
            merged = norm(torch.cat([x, skips.pop()], dim=self.axis))
            if kappas is not None:
                main, skip = merged.split(self.width, self.axis)
                merged = torch.cat([main, skip * kappas[i]], self.axis)
            x = torch.tanh(merge(merged))
        return x
