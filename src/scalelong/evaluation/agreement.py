"""Does a conditional model draw what it was asked for?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..data import ImageData
from .bootstrap import Score, share_score
from .features.classifier import train_classifier
from .shapes_rule import shows_colour_and_shape


def agreement(
    images: Tensor, wishes: Sequence[str | None], data: ImageData, condition: str, say: Callable[[str], None] = print
) -> Score | None:
    """The share of images that show what was asked for; None where nothing here can tell.

    Classes are told by a classifier that was trained on real images alone, drawn shapes by a rule.
    """
    if condition == "class" and data.classes is not None and len(data.classes) > 1:
        asked = torch.tensor([data.classes.index(str(wish)) for wish in wishes])
        return share_score(train_classifier(data, say=say).classify(images) == asked)
    if condition == "text" and data.name == "shapes" and data.channels == 3:
        return share_score(shows_colour_and_shape(images, [str(wish) for wish in wishes]))
    return None
