# ruff: noqa
# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""U-ViT as a model of diffusers: needs scalelong (pip install scalelong)."""

from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.models.unets.unet_2d import UNet2DOutput
from scalelong.models import UViT


class UViTModel(ModelMixin, ConfigMixin):
    @register_to_config
    def __init__(self, sample_size, in_channels, arguments):
        """`arguments` are those of scalelong's UViT, the scaling of its long skips among them."""
        super().__init__()
        self.model = UViT(**arguments)

    def forward(self, sample, timestep, class_labels=None, encoder_hidden_states=None):
        return UNet2DOutput(sample=self.model(sample, timestep, y=class_labels, context=encoder_hidden_states))
