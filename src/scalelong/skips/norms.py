"""How much of a constant κ survives the normalisation right behind a merge."""

from dataclasses import dataclass

from torch import nn

from .candidates import Candidate
from .reach import COPIES
from .trace import Trace


@dataclass(frozen=True)
class Cancellation:
    norm: str = ""
    share: float = 0.0
    """Of the skip's channels: those whose statistics contain the skip alone, so that dividing by them removes κ."""
    bypass: bool = False


def cancellation(trace: Trace, candidate: Candidate) -> Cancellation:
    merge = candidate.merge
    if merge.kind != "cat" or merge.axis != 1:
        return Cancellation()
    start = sum(shape[1] for shape in merge.shapes[: candidate.operand])
    stop = start + merge.shapes[candidate.operand][1]
    front, name, share, bypass = [merge.node], "", 0.0, False
    while front:
        node = front.pop()
        for user in trace.users[node]:
            step = trace.nodes[user]
            module = step.call.module if step.call is not None else None
            if step.name == "native_group_norm":
                groups = [option for option in step.options if isinstance(option, int)][3]
                name, share = f"GroupNorm({groups})", _whole_groups(start, stop, step.shape[1] // groups)
            elif isinstance(module, nn.modules.instancenorm._InstanceNorm):
                name, share = "InstanceNorm", 1.0
            elif isinstance(module, nn.modules.batchnorm._BatchNorm):
                name, share = "BatchNorm, in training", 1.0
            elif step.name in COPIES:
                front.append(user)
            else:
                bypass = True
    return Cancellation(name, share, bypass and bool(name))


def _whole_groups(start: int, stop: int, size: int) -> float:
    """The share of channels start..stop that lie in groups wholly inside."""
    first, last = -(-start // size), stop // size
    return max(last - first, 0) * size / (stop - start)
