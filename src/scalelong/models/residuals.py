"""Table 3's baselines for diffusers' UNets: scale the residual branches of a network that is built already."""

from typing import Any

from torch import Tensor, nn

from ..errors import AlreadyScaledError, InvalidConfigError
from ..scaling.baselines import ResidualBranch, ResidualSpec, validate_residual

# The last layer of each residual branch in diffusers' blocks, by the class of the block.
_LAST_LAYERS = {
    "ResnetBlock2D": ("conv2",),
    "Attention": ("to_out.0",),
    "FeedForward": ("net.2",),
}


class _ScaleOutput:
    """A forward hook that scales what the layer returns."""

    def __call__(self, layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:  # noqa: ARG002
        return layer.residual_branch.scale(output)  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]


def scale_residuals_(model: nn.Module, spec: ResidualSpec) -> nn.Module:
    """Scale every residual branch of a diffusers UNet by τ or, for "rezero", by a learned scalar that starts at 0."""
    validate_residual(spec)
    layers = [
        block.get_submodule(name) for block in model.modules() for name in _LAST_LAYERS.get(type(block).__name__, ())
    ]
    if not layers:
        raise InvalidConfigError(
            f"{type(model).__name__} has none of the residual blocks that residual_scaling knows: "
            f"{', '.join(_LAST_LAYERS)}; for U-ViT pass residual_scaling= to its constructor"
        )
    if any(hasattr(layer, "residual_branch") for layer in layers):
        raise AlreadyScaledError("the residual branches of this model are scaled already")
    if spec == "none":
        return model
    for layer in layers:
        layer.residual_branch = ResidualBranch(spec)
        layer.register_forward_hook(_ScaleOutput())
    return model
