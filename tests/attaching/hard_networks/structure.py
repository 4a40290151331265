"""Kind 3, phantom or missing skips: what counts as a layer, what lies in the bottleneck, what is seen in part."""

import torch
import torch.nn.functional as F
from torch import nn

from .base import C, Pyramid, Tokens, WidePyramid, conv

# Networks are written here as people write them, also where a type checker would object.
# pyright: reportIncompatibleMethodOverride=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportIncompatibleVariableOverride=false, reportSelfClsParameterName=false


class GruBottleneck(Pyramid):
    kind = "3"
    must = True

    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(C, C, batch_first=True)

    def encode(self, x):
        h, skips = F.silu(self.stem(x)), []
        for down in self.down:
            h = F.silu(down(h))
            skips.append(h)
        return self.gru(h.flatten(2).mT)[0].mT.reshape(h.shape), skips

    def forward(self, x):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i = len(skips)
            h = F.silu(up(dec(h + self.k(i, skips.pop()))))
        return self.head(h)


class LstmBothWays(GruBottleneck):
    """Demucs and its kin: only a bidirectional LSTM lies between innermost encoder and decoder."""

    def __init__(self):
        super().__init__()
        self.gru = nn.LSTM(C, C // 2, bidirectional=True, batch_first=True)


class FourierBottleneck(GruBottleneck):
    """FNO: the only layer between innermost encoder and decoder is a learned filter in Fourier space."""

    must = False

    def __init__(self):
        super().__init__()
        self.filter = nn.Parameter(torch.randn(C, C, 2, 2, 2))

    def encode(self, x):
        h, skips = super().encode(x)
        h = torch.fft.rfft2(skips[-1])
        h = torch.einsum("bchw,cdhw->bdhw", h, torch.view_as_complex(self.filter))
        return torch.fft.irfft2(h), skips


class ScanBottleneck(GruBottleneck):
    """A state-space scan, written as a loop over positions."""

    must = False

    def __init__(self):
        super().__init__()
        self.decay, self.gain = nn.Parameter(torch.rand(C)), nn.Parameter(torch.randn(C))

    def encode(self, x):
        h = super().encode(x)
        tokens, state, seen = h[1][-1].flatten(2), 0.0, []
        for t in range(tokens.shape[-1]):
            state = self.decay.sigmoid() * state + self.gain * tokens[..., t]
            seen.append(state)
        return torch.stack(seen, -1).reshape(h[1][-1].shape), h[1]


class EinsumBottleneck(GruBottleneck):
    must = False

    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter(torch.randn(C, C))

    def encode(self, x):
        skips = super().encode(x)[1]
        return torch.einsum("bchw,cd->bdhw", skips[-1], self.mix).tanh(), skips


class LastMergeOutsideTheLoop(Tokens):
    """Additions between blocks full of residuals; the outermost on a line of its own."""

    kind = "3"
    N = 4

    def forward(self, x):
        x, skips = self.embed(x), []
        for block in self.enc:
            x = block(x)
            skips.append(x)
        x = self.mid(x)
        for block in self.dec[:-1]:
            i = len(skips)
            x = block(x + self.k(i, skips.pop()))
        x = self.dec[-1](x + self.k(1, skips.pop()))
        return self.head(x)


class WrittenOut(Tokens):
    """The same network without a loop."""

    kind = "3"
    must = True
    N = 3

    def forward(self, x):
        x1 = self.enc[0](self.embed(x))
        x2 = self.enc[1](x1)
        x3 = self.enc[2](x2)
        x = self.mid(x3)
        x = self.dec[0](x + self.k(3, x3))
        x = self.dec[1](x + self.k(2, x2))
        x = self.dec[2](x + self.k(1, x1))
        return self.head(x)


class ResidualTrunk(Pyramid):
    """Two long additions around six residual blocks, all by the same operator."""

    kind = "3"
    N = 2

    def __init__(self):
        super().__init__()
        self.trunk = nn.ModuleList(nn.Sequential(conv(C, C), nn.SiLU(), conv(C, C)) for _ in range(6))

    def forward(self, x):
        a = F.silu(self.stem(x))
        b = h = F.silu(self.down[0](a))
        for block in self.trunk:
            h = h + block(h)
        h = F.silu(self.dec[0](self.mid(h) + self.k(2, b)))
        return self.head(F.silu(self.dec[1](self.up[0](h) + self.k(1, a))))


class ResidualBody(Pyramid):
    """DRUNet: every merge on a line of its own, and the innermost goes around a single residual block."""

    kind = "3"

    def body(self, h):
        return h + self.mid(F.relu(self.dec[0](h)))

    def forward(self, x):
        x1 = self.stem(x)
        x2 = F.relu(self.down[0](x1))
        x3 = F.relu(self.down[1](x2))
        x = self.body(x3)
        x = self.up[0](x + self.k(3, x3))
        x = self.up[1](F.relu(self.dec[1](x + self.k(2, x2))))
        return self.head(F.relu(self.dec[2](x + self.k(1, x1))))


class ResidualBlocks(ResidualBody):
    """The same around three residual blocks, as it is by default."""

    must = False  # refused as ambiguous, with all candidates

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(conv(C, C), nn.ReLU(), conv(C, C)) for _ in range(3))

    def body(self, h):
        for block in self.blocks:
            h = h + block(h)
        return h


class SmallUInTheMiddle(Pyramid):
    """Pyramid attention: the bottleneck is a small U of its own. The long skips are gated by the main path."""

    kind = "3"

    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList(conv(C, C, 2) for _ in range(3))
        self.side, self.gate = nn.ModuleList(conv(C, C) for _ in range(2)), nn.ModuleList(conv(C, C) for _ in range(3))

    def attend(self, h):
        a = F.silu(self.inner[0](h))
        b = F.silu(self.inner[1](a))
        c = F.interpolate(F.silu(self.inner[2](b)), size=b.shape[2:])
        b = F.interpolate(self.side[0](b) + c, size=a.shape[2:])
        return h * F.interpolate(self.side[1](a) + b, size=h.shape[2:])

    def forward(self, x):
        h, skips = self.encode(x)
        h = self.attend(h)
        for up, dec, gate in zip(self.up, self.dec, self.gate, strict=True):
            i, weight = len(skips), gate(h).mean((2, 3), keepdim=True).sigmoid()
            h = F.silu(dec(up(h) + self.k(i, skips.pop() * weight)))
        return self.head(h)

    @staticmethod
    def inputs():
        return (torch.randn(2, 3, 64, 64),)


class StartsFromZeros(Pyramid):
    """The decoder starts from zeros: what the innermost merge adds to them is the main path, and no skip."""

    kind = "3"
    N = 2

    def forward(self, x):
        h, skips = self.encode(x)
        h, i = torch.zeros_like(h), 3
        skips = [*skips[:2], self.mid(skips[2])]
        for n in range(3):
            skip = skips.pop()
            h = F.interpolate(h, size=skip.shape[2:])
            h = F.silu(self.dec[n](h + (skip if i == 3 else self.k(i, skip))))
            i -= 1
        return self.head(h)


class MemoryTokens(Tokens):
    """Learned keys and values beside those of the tokens, in the middle."""

    kind = "3"

    def __init__(self):
        super().__init__()
        self.memory, self.kv, self.out = nn.Parameter(torch.randn(1, 3, 8)), nn.Linear(8, 16), nn.Linear(8, 8)
        self.squeeze = nn.Conv1d(8, 8, 2, 2)

    def forward(self, x):
        x, skips = self.embed(x), []
        for block in self.enc:
            x = block(x)
            skips.append(x)
        x = self.attend(self.mid(x))
        for fuse, block in zip(self.fuse, self.dec, strict=True):
            i = len(skips)
            x = block(fuse(torch.cat([x, self.k(i, skips.pop())], -1)))
        return self.head(x)

    def attend(self, x):
        small = self.squeeze(x.mT).mT
        k, v = self.kv(torch.cat([x, small, self.memory.expand(len(x), -1, -1)], 1)).chunk(2, -1)
        return x + self.out((x @ k.mT).softmax(-1) @ v)


class TextContext(WidePyramid):
    """Keys and values of a text, with those of the image in front of them."""

    kind = "3"
    must = True

    def __init__(self):
        super().__init__()
        self.text, self.q, self.kv, self.out = (nn.Linear(*s) for s in ((4, C), (C, C), (C, 2 * C), (C, C)))

    def forward(self, x, text):
        h, skips = self.encode(x)
        text = self.text(text)
        for up, dec in zip(self.up, self.dec, strict=True):
            tokens, i = h.flatten(2).mT, len(skips)
            k, v = self.kv(torch.cat([tokens, text], 1)).chunk(2, -1)
            h = h + self.out((self.q(tokens) @ k.mT).softmax(-1) @ v).mT.reshape(h.shape)
            h = F.silu(dec(torch.cat([up(h), self.k(i, skips.pop())], 1)))
        return self.head(h)

    @staticmethod
    def inputs():
        return torch.randn(2, 3, 16, 16), torch.randn(2, 5, 4)


class ContextKeys(TextContext):
    """Imagen: keys and values of time and text join those of the image, in encoder and decoder."""

    def __init__(self):
        super().__init__()
        self.context = nn.Linear(C, 2 * C)

    def attend(self, h, text):
        tokens = h.flatten(2).mT
        k, v = self.kv(tokens).chunk(2, -1)
        context_k, context_v = self.context(text).chunk(2, -1)
        k, v = torch.cat((context_k, k), -2), torch.cat((context_v, v), -2)
        return h + self.out((self.q(tokens) @ k.mT).softmax(-1) @ v).mT.reshape(h.shape)

    def forward(self, x, text):
        h, skips, text = F.silu(self.stem(x)), [], F.layer_norm(self.text(text), (C,))
        for n, down in enumerate(self.down):
            skips.append(h)
            h = F.silu(down(self.attend(h, text) if n == 2 else h))
        h = F.silu(self.mid(h))
        for n, (up, dec) in enumerate(zip(self.up, self.dec, strict=True)):
            i = len(skips)
            h = F.silu(dec(torch.cat([up(h), self.k(i, skips.pop())], 1)))
            h = self.attend(h, text) if n == 0 else h
        return self.head(h)


class AtrousBottleneck(WidePyramid):
    """ASPP: parallel branches of the bottleneck are concatenated."""

    kind = "3"
    must = True

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Conv2d(C, C, 3, padding=d, dilation=d) for d in (1, 2, 3))
        self.fuse = nn.Conv2d(4 * C, C, 1)

    def encode(self, x):
        h, skips = super().encode(x)
        pooled = h.mean((2, 3), keepdim=True).expand_as(h)
        return self.fuse(torch.cat([*(F.relu(b(h)) for b in self.branches), pooled], 1)), skips


class DenseBottleneck(WidePyramid):
    kind = "3"
    must = True

    def __init__(self):
        super().__init__()
        self.dense = nn.ModuleList(conv(C * (n + 1), C) for n in range(4))

    def encode(self, x):
        h, skips = super().encode(x)
        features = [h]
        for layer in self.dense:
            features.append(F.relu(layer(torch.cat(features, 1))))
        return features[-1], skips


class RecursiveAdd(nn.Module):
    """Each level holds the next and adds its own input, as one line that runs at every depth."""

    def __init__(self, k, i, inner):
        super().__init__()
        self.down, self.up, self.inner, self.k, self.i = conv(C, C, 2), nn.ConvTranspose2d(C, C, 2, 2), inner, k, i

    def forward(self, x):
        return self.up(F.silu(self.inner(F.silu(self.down(x))))) + self.k(self.i, x)


class Recursion(Pyramid):
    kind = "3"

    def __init__(self):
        super().__init__()
        inner = self.mid
        for i in (3, 2, 1):
            inner = RecursiveAdd(self.k, i, inner)
        self.levels = inner

    def forward(self, x):
        return self.head(F.silu(self.levels(F.silu(self.stem(x)))))


class SliceInTheMiddle(WidePyramid):
    """The middle level fills a buffer, the others concatenate."""

    kind = "3"

    def join(self, i, h, skip):
        if i != 2:
            return torch.cat([h, self.k(i, skip)], 1)
        joined = h.new_empty(len(h), 2 * C, *h.shape[2:])
        joined[:, :C], joined[:, C:] = h, self.k(i, skip)
        return joined


class StackInTheMiddle(Pyramid):
    kind = "3"

    def forward(self, x):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i, h = len(skips), up(h)
            h = F.silu(dec(torch.stack([h, self.k(i, skips.pop())]).sum(0) if i == 2 else h + self.k(i, skips.pop())))
        return self.head(h)


class MaximumInTheMiddle(Pyramid):
    """No sum, but a merge all the same: the plan must say so, or stop."""

    kind = "3"

    def forward(self, x):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i, h = len(skips), up(h)
            h = F.silu(dec(torch.maximum(h, self.k(i, skips.pop())) if i == 2 else h + self.k(i, skips.pop())))
        return self.head(h)


class ProductInTheMiddle(WidePyramid):
    kind = "3"

    def join(self, i, h, skip):
        return (h * self.k(i, skip)).repeat(1, 2, 1, 1) if i == 2 else torch.cat([h, self.k(i, skip)], 1)


class AttentionInTheMiddle(WidePyramid):
    """The middle skip is read by cross-attention."""

    kind = "3"

    def join(self, i, h, skip):
        if i != 2:
            return torch.cat([h, self.k(i, skip)], 1)
        q, k = h.flatten(2).mT, self.k(i, skip).flatten(2).mT
        return ((q @ k.mT).softmax(-1) @ k).mT.reshape(h.shape).repeat(1, 2, 1, 1)


class DotInTheMiddle(Pyramid):
    """The middle level joins by a weighted matrix product over two features."""

    kind = "3"

    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.tensor([[0.6], [0.4]]))

    def join(self, i, h, skip):
        if i == 2:
            return (torch.stack([h, self.k(i, skip)], -1) @ self.weights).squeeze(-1)
        return h + self.k(i, skip)
