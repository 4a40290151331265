"""A trained model for others: a folder that diffusers loads, or one safetensors file, each with a model card."""

from ..errors import (
    ExportError as ExportError,
)
from .card import (
    model_card as model_card,
    push_to_hub as push_to_hub,
)
from .exporter import (
    export_model as export_model,
    export_run as export_run,
)
