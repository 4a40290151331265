"""The images of a run: those to train on, and those held out."""

from collections.abc import Callable

from ..data import ImageData, load_data
from ..diffusion.latents import Autoencoder, encode_data
from ..errors import InvalidConfigError
from .config import TrainConfig


def load_images(config: TrainConfig, say: Callable[[str], None]) -> tuple[ImageData, ImageData | None]:
    data = load_data(config.data, size=config.images.size, channels=config.images.channels)
    if config.diffusion.condition == "class" and not data.classes:
        raise InvalidConfigError(
            f"condition 'class' needs labels, and {config.data!r} has none; put the images of each class in a folder "
            f"of its own, or train with condition 'none'"
        )
    if config.diffusion.condition == "text" and not data.has_captions:
        raise InvalidConfigError(
            f"condition 'text' needs captions, and {config.data!r} has none; put them beside the images, in "
            f"metadata.jsonl or in one .txt file per image, or train with condition 'none'"
        )
    say(data.describe())
    if config.images.autoencoder is not None:
        data = encode_data(data, Autoencoder(config.images.autoencoder), say)
    if config.images.held_out == 0:
        return data, None
    return data.split(config.images.held_out, config.seed)
