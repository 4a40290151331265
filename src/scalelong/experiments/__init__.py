"""Many runs: planned together, trained anywhere, compared.

plan              variants, plans, one run from its first step to its last, diagnosis of a recipe
sweeps            jobs of a sweep, and how far it is; `__main__` is the process that does one
engines           where jobs run: this machine, SLURM, Ray
records, results  one run as a record; many as tables and verdicts (no torch)
comparison        methods with equal seeds, also at several widths and rates
rates, demo       the range of learning rates of a recipe; the demonstration
tuning            κ after training

Names load at first use: a report needs no torch.
"""

from ..lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)  # pyright: ignore[reportUnsupportedDunderAll]
