"""What happens in training: sizes at the long skips, oscillation, alarms, and pages that explain them.

features     where features are read: long skips and the blocks that they join
monitor      readings during training, from within anyone's loop; as rows and as a figure
alarms       what in readings means trouble; oscillation scores
advice       the one thing to do about training that breaks
trackers     where readings go: JSON lines and trackers
collapse     a loss that collapses and stays finite: the rule, and what left first
guard        goes back to before a collapse, from within anyone's loop
callbacks    monitor and guard for accelerate's, Lightning's and transformers' loops
diagnosis    one page about a model's long skips, before training
nonfinite    where the numbers of a step stopped being finite
range        the range of learning rates in which a network trains, with and without each fix
many         runs side by side in processes
survival     who survived: counts, the rate at which half of the runs do, verdict and picture

The names stand in `__init__.pyi` and are loaded at first use: a report reads alarms and readings without torch.
"""

from ..lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)  # pyright: ignore[reportUnsupportedDunderAll]
