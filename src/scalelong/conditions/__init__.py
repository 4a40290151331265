"""What a network is told beside the noisy image: nothing, a class, or a text."""

from .base import ConditionError, Conditions, Unconditional
from .labels import ClassCondition
from .pretrained import PretrainedTextEncoder
from .text import TextCondition, TextEncoder, cache_captions
from .words import WordEncoder

__all__ = [
    "ClassCondition",
    "ConditionError",
    "Conditions",
    "PretrainedTextEncoder",
    "TextCondition",
    "TextEncoder",
    "Unconditional",
    "WordEncoder",
    "cache_captions",
]
