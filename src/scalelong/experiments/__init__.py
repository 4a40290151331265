"""Many runs: planned together, trained anywhere, compared.

plan              variants, plans, one run from its first step to its last, diagnosis of a recipe
sweeps, worker    jobs of a sweep, how far it is, and the process that does a job
engines           where jobs run: this machine, SLURM, Ray
records, results  one run as a record; many as tables and verdicts (no torch)
comparison        methods with equal seeds, along depth, width, batch size or rate
rates, demo       the range of learning rates of a recipe; the demonstration
tuning            κ after training

Names load at first use: a report needs no torch.
"""

from ..lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)  # pyright: ignore[reportUnsupportedDunderAll]
