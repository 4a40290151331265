"""Studies behind the documentation: the paper's figures and tables, κ, starts, recipes. Outside of the wheel.

    scalelong reproduce ...            reproduce/  the figures and tables of the paper
    python -m research.recipe ...      recipe      evidence for the recipe, from comparisons
    python -m research.kappa ...       kappa       which κ is best, and which estimator finds it
    python -m research.starts ...      starts      how networks start, and where trained ones err

`pages` writes Markdown. Runs are read by `scalelong.experiments.results`. Run from the root of a checkout.
"""
