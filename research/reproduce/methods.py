"""The methods that the paper compares, under the names that our pages call them by."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Method:
    """A row of a table: a scaling of the long skips, or other options of the network."""

    label: str
    scaling: str = "none"
    model_options: dict[str, Any] = field(default_factory=dict)


NONE = Method("none")
UNIFORM = Method("1/√2", "uniform")
CS = Method("CS(0.7)", "cs:0.7")
# The paper's LS begins where its authors' code begins, at about 0.5 for every skip; ours begins on the curve of CS.
LS = Method("LS", "ls:start=paper")
LS_FROM_CS = Method("LS from CS", "ls")
REVERSED = Method("CS(0.7) reversed", "cs:kappa=0.7,reverse=true")

PAPER = (NONE, UNIFORM, CS, LS)
"""The rows that almost every figure and table of the paper has."""

CORE = (*PAPER, LS_FROM_CS)

KAPPAS = (Method("CS(0.5)", "cs:0.5"), Method("CS(0.9)", "cs:0.9"))
"""Towards the ends of the range that Section 4.1 suggests, beside CS(0.7)."""

LS_RATIOS = tuple(Method(f"LS, ratio {ratio}", f"ls:start=paper,ratio={ratio}") for ratio in (4, 8))
LS_ACTIVATIONS = tuple(Method(f"LS, {name}", f"ls:start=paper,activation={name.lower()}") for name in ("ELU", "Mish"))
LS_SCALAR = Method("LS, scalars", "ls:start=paper,module=scalar")
LS_IE = Method("LS, IE", "ls:start=paper,module=ie")
LS_PER_SKIP = Method("LS, per skip", "ls:start=paper,shared=false")

STABLE = tuple(Method(f"stable τ = {tau}", model_options={"residual_scaling": tau}) for tau in (0.1, 0.3))
REZERO = Method("ReZero", model_options={"residual_scaling": "rezero"})
