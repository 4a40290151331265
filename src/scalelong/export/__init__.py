"""A trained run for others: a folder that diffusers loads, or one safetensors file, each with a model card."""

from ..errors import ExportError as ExportError
from .card import model_card as model_card
from .exporter import export_run as export_run
