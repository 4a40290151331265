"""Plans, scalings and state dicts that version 0.2 has written are read, and give the same function.

`old/` was made at commit 47c1161: `plan.json` by `find_skips`, `scaling.safetensors` by `save_scaling`;
`state.safetensors` is the state dict of the scaled model, with its output for IMAGE. The plan names lines of this
file: the lines of `OldNetwork` must stay where they are.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

import scalelong as sl

OLD = Path(__file__).parent / "old"
IMAGE = torch.linspace(-1, 1, 2 * 2 * 64).view(2, 2, 8, 8)


class OldNetwork(nn.Module):
    """A concatenation that a hook scales, and an addition that has to be rewritten."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down, self.mid = nn.Conv2d(2, 4, 3, 1, 1), nn.Conv2d(4, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, 1, 1)
        self.up, self.head = nn.Conv2d(4, 4, 3, 1, 1), nn.Conv2d(8, 2, 3, 1, 1)

    def forward(self, x):
        outer = self.stem(x)
        inner = F.relu(self.down(outer))
        h = F.relu(self.mid(F.avg_pool2d(inner, 2)))
        h = F.relu(self.up(F.interpolate(h, scale_factor=2) + inner))
        return self.head(torch.cat([F.interpolate(h, scale_factor=2), outer], 1))


def old_state() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    state = load_file(OLD / "state.safetensors")
    return state, state.pop("output")


def test_an_old_plan_scales_a_model():
    plan = sl.SkipPlan.load(OLD / "plan.json")
    state, output = old_state()
    model = sl.scale_skips_(OldNetwork().eval(), "ls", (IMAGE,), plan=plan)
    model.load_state_dict(state)
    with torch.no_grad():
        assert torch.equal(model(IMAGE), output)
    assert sl.SkipPlan.from_dict(plan.to_dict()) == plan
    new = sl.find_skips(model, (IMAGE,))  # which also knows where a norm over the concatenation would stand
    assert [(skip.site, skip.merge, skip.places.skip, skip.places.main) for skip in plan.skips] == [
        (skip.site, skip.merge, skip.places.skip, skip.places.main) for skip in new.skips
    ]


def test_an_old_scaling_is_loaded_from_its_file_and_from_a_state_dict():
    state, output = old_state()
    for source in (OLD / "scaling.safetensors", state):
        model = sl.load_scaling_(OldNetwork().eval(), source)
        model.load_state_dict(state)
        with torch.no_grad():
            assert torch.equal(model(IMAGE), output)
        assert set(model.state_dict()) == set(state)
        sl.verify(model, (IMAGE,))
