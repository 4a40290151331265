"""A trained model for others: a folder that diffusers loads, or one safetensors file, each with a model card."""

from ..errors import (
    ExportError as ExportError,
)
from .card import (
    model_card as model_card,
    push_to_hub as push_to_hub,
    shipped_card as shipped_card,
)
from .exporter import (
    export_diffusers as export_diffusers,
    export_model as export_model,
    export_safetensors as export_safetensors,
)
