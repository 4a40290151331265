"""From a configuration to the conditions of its network."""

from collections.abc import Callable, Sequence

from ..diffusion.conditions import (
    ClassCondition,
    Conditions,
    PretrainedTextEncoder,
    TextCondition,
    TextEncoder,
    Unconditional,
    WordEncoder,
    cache_captions,
)
from ..errors import InvalidConfigError
from .config import TextConfig, TrainConfig


def make_conditions(
    config: TrainConfig,
    classes: Sequence[str] | None,
    captions: Sequence[str] | None = None,
    vocabulary: Sequence[str] | None = None,
    say: Callable[[str], None] = print,
) -> Conditions:
    """The captions to be trained on are encoded here, once; for sampling, the vocabulary is what they had."""
    guided = config.diffusion.condition_dropout > 0
    if config.diffusion.condition == "class":
        if not classes:
            raise InvalidConfigError(
                f"condition 'class' needs labels, and {config.data!r} has none; put the images of each class in a "
                f"folder of its own, or train with condition 'none'"
            )
        return ClassCondition(classes, guided)
    if config.diffusion.condition == "text":
        encoder = make_encoder(config.text, vocabulary)
        # Words need no cache: they are hashed faster than read from a disk.
        if captions is not None and not isinstance(encoder, WordEncoder):
            encoder = cache_captions(encoder, captions, say)
        return TextCondition(encoder, guided)
    return Unconditional()


def make_encoder(config: TextConfig, vocabulary: Sequence[str] | None = None) -> TextEncoder:
    if config.text_encoder == "words":
        return WordEncoder(config.text_length, config.text_dim, vocabulary)
    return PretrainedTextEncoder(config.text_encoder, config.text_length, config.text_dim)
