"""A trained model for others: a folder that diffusers loads, or one safetensors file, each with a model card."""

from ..errors import ExportError
from .card import model_card, push_to_hub
from .diffusers_folder import export_diffusers, export_safetensors

__all__ = ["ExportError", "export_diffusers", "export_safetensors", "model_card", "push_to_hub"]
