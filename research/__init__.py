"""Studies behind the documentation: the paper's figures and tables, κ, starts, recipes. Outside of the wheel.

Run from the root of a checkout: `scalelong reproduce ...`, `python -m research.recipe ...`, and so on.
"""
