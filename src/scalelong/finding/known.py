"""Public models whose forward leaves a choice: which of their merges are long skips, and where that is written."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Choice:
    """What `include` and `exclude` are for a class of models that would be ambiguous without."""

    include: str | None
    exclude: str | None
    why: str
    source: str


KNOWN = {
    "UNetControlNetXSModel": Choice(
        "up_blocks.*",
        "add",
        "the adapter and the base network exchange features at every level; the base network's decoder has the skips",
        "diffusers, models/controlnets/controlnet_xs.py",
    ),
    "MDTv2": Choice(
        "en_outblocks.*",
        None,
        "the blocks of the decoder all read the embedding next to the U of the encoder",
        "github.com/sail-sg/MDT, masked_diffusion/models.py",
    ),
}
"""By the name of the class. Skip-DiT and HunyuanDiT leave no choice: their counts follow from their forward."""
