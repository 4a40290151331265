"""Stability of training: sizes at the long skips, collapse, alarms, and the range of learning rates.

collapse     the one rule of collapse
alarms       the advice; what in readings means trouble
features     where features are read: long skips and the blocks that they join; what left first
guard        goes back to before a collapse, from within anyone's loop
monitor      readings during training, from within anyone's loop; where they go
callbacks    monitor and guard for accelerate's, Lightning's and transformers' loops
diagnosis    a model's long skips before training; a step whose numbers are not finite
range        the range of learning rates in which a network trains, with and without each fix
survival     its result: counts, the rate at which half of the runs survive, verdict and picture

The names stand in `__init__.pyi` and are loaded at first use: a report reads alarms and readings without torch.
"""

from ..lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)  # pyright: ignore[reportUnsupportedDunderAll]
