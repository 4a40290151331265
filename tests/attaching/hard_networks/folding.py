"""Kind 7, folding: weights that are not used as they are, or not there alone."""

import torch
import torch.nn.functional as F
from torch import nn

from .base import C, Pyramid, WidePyramid, conv

# Networks are written here as people write them, also where a type checker would object.
# pyright: reportIncompatibleMethodOverride=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportIncompatibleVariableOverride=false, reportSelfClsParameterName=false


class Folded(WidePyramid):
    """Every decoder convolution is made by `layer`."""

    kind = "7"
    judge = "folding"

    def __init__(self):
        super().__init__()
        self.dec = nn.ModuleList(self.layer() for _ in range(3))

    def layer(self) -> nn.Module:
        return conv(2 * C, C)


class FoldedPlain(Folded):
    must = True


class ClampedConv(nn.Conv2d):
    def forward(self, x):
        return F.conv2d(x, self.weight.clamp(-0.2, 0.2), self.bias, padding=1)


class ClampedWeights(Folded):
    def layer(self):
        return ClampedConv(2 * C, C, 3, padding=1)


class ClampedInside(nn.Conv2d):
    """The same in the method that nn.Conv2d.forward calls."""

    def _conv_forward(self, input, weight, bias):  # noqa: A002
        return super()._conv_forward(input, weight.clamp(-0.2, 0.2), bias)


class ClampedInsideTheLayer(Folded):
    def layer(self):
        return ClampedInside(2 * C, C, 3, padding=1)


class WeightAsAProperty(nn.Conv2d):
    """The weight that the layer shows is computed."""

    def __getattr__(self, name):
        value = super().__getattr__(name)
        return torch.sin(value) if name == "weight" else value


class ComputedWeight(Folded):
    def layer(self):
        return WeightAsAProperty(2 * C, C, 3, padding=1)


class NormalisedConv(nn.Conv2d):
    """EDM2: the weights are brought to unit magnitude in each forward."""

    def forward(self, x):
        return self._conv_forward(x, F.normalize(self.weight, dim=(1, 2, 3)), self.bias)


class NormalisedWeights(Folded):
    def layer(self):
        return NormalisedConv(2 * C, C, 3, padding=1)


class WeightNorm(Folded):
    def layer(self):
        return nn.utils.parametrizations.weight_norm(conv(2 * C, C))


class SpectralNorm(Folded):
    def layer(self):
        return nn.utils.parametrizations.spectral_norm(conv(2 * C, C))


class StandardisedByHook(Folded):
    """A pre-hook writes the weight that the layer uses."""

    def layer(self):
        layer = conv(2 * C, C)
        layer.raw = nn.Parameter(layer.weight.detach().clone())
        del layer.weight
        layer.register_forward_pre_hook(self.standardise)
        self.standardise(layer, ())
        return layer

    @staticmethod
    def standardise(layer, _):
        raw = layer.raw
        layer.weight = (raw - raw.mean((1, 2, 3), keepdim=True)) / (raw.std((1, 2, 3), keepdim=True) + 1e-5)


class TiedWeights(Folded):
    """Two decoder levels share one weight, but not the layer."""

    def __init__(self):
        super().__init__()
        self.dec[1].weight = self.dec[0].weight


class TiedToTheEncoder(Pyramid):
    """An autoencoder's old trick: the decoder's layer has the encoder's weight."""

    kind = "7"
    judge = "folding"

    def __init__(self):
        super().__init__()
        for n in range(3):
            self.dec[n].weight = self.down[n].weight


class SharedLayer(Folded):
    """One layer at all levels."""

    def __init__(self):
        super().__init__()
        self.dec = nn.ModuleList([conv(2 * C, C)] * 3)


class WeightReadElsewhere(Folded):
    """The weight is a part of the result, as a penalty."""

    def forward(self, x):
        return super().forward(x), sum(dec.weight.square().mean() for dec in self.dec)


class WeightUsedByAFunction(Folded):
    """A second use of the weight, by a function."""

    def forward(self, x):
        h = super().forward(x)
        return h + F.conv2d(x, self.dec[0].weight[:3, C : C + 3], padding=1)


class ViewOfTheWeight(Folded):
    """The stem is a view of the weight that folding would change."""

    def encode(self, x):
        return super().encode(x + F.conv2d(x, self.dec[0].weight.detach()[:3, C : C + 3], padding=1))


class BehindAPower(Folded):
    """A square between merge and layer: the factor comes out squared."""

    def forward(self, x):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i = len(skips)
            h = F.silu(dec(torch.cat([up(h), self.k(i, skips.pop())], 1).square()))
        return self.head(h)


class FoldedAcrossPadding(Folded):
    """Padding with ones, which do not scale."""

    def layer(self):
        return nn.Conv2d(2 * C, C, 3)

    def join(self, i, h, skip):
        return F.pad(torch.cat([h, self.k(i, skip)], 1), (1, 1, 1, 1), value=1.0)
