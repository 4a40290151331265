# ruff: noqa
# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""A UNet of diffusers whose long skips are multiplied by constants where they are merged. Needs diffusers alone."""

import diffusers
import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config


class ScaledUNet(ModelMixin, ConfigMixin):
    @register_to_config
    def __init__(self, sample_size, in_channels, kind, arguments, factors):
        """`factors`: (channels of the main path, its factor, the skip's factor) of each merge, in order of merging."""
        super().__init__()
        self.model = getattr(diffusers, kind).from_config(arguments)
        merges = [resnet for block in self.model.up_blocks for resnet in block.resnets]
        if len(merges) != len(factors):
            raise ValueError(f"{len(factors)} factors for {len(merges)} merges")
        for resnet, (channels, main, skip) in zip(merges, factors):
            resnet.register_forward_pre_hook(_Scale(channels, main, skip))

    def forward(self, sample, timestep, **conditions):
        return self.model(sample, timestep, **conditions)


class _Scale:
    """A merge is the concatenation that a block of the decoder is called with: the main path first, then the skip."""

    def __init__(self, channels, main, skip):
        self.channels, self.main, self.skip = channels, main, skip

    def __call__(self, resnet, inputs):
        merged, *rest = inputs
        main, skip = merged[:, : self.channels], merged[:, self.channels :]
        return torch.cat([main * self.main, skip * self.skip], dim=1), *rest
