"""PEFT on a scaled network: LoRA beside learned gates (modules_to_save), saving, loading, merging, folding.

python examples/integrations/peft_adapters.py FOLDER
"""

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model

import scalelong as sl

X, T = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([10.0, 500.0])


def make(scaling: str) -> Any:
    torch.manual_seed(0)
    return sl.scale_skips_(sl.UViT(image_size=8, patch_size=4, channels=1, dim=32, depth=4, heads=2), scaling).eval()


def train(model: Any, steps: int = 3) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(steps):
        model(X, T).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def difference(one: Any, other: Any) -> float:
    with torch.no_grad():
        return float((one(X, T) - other(X, T)).abs().max())


def main(folder: str | Path) -> dict[str, float]:
    folder, found = Path(folder), {}
    # 1. Learned gates: an adapter freezes them as all weights of its base, unless it is told to train and keep them.
    gates = {"r": 2, "target_modules": r".*(qkv|out|expand|reduce)$", "modules_to_save": ["skip_scaling"]}
    adapted = get_peft_model(make("ls"), LoraConfig(**gates))
    before = sl.coefficients(adapted, X, T)
    train(adapted)
    found["ls: gates moved by"] = max(abs(a - b) for a, b in zip(before, sl.coefficients(adapted, X, T), strict=True))
    adapted.eval().save_pretrained(str(folder / "ls"))
    base = sl.UViT(image_size=8, patch_size=4, channels=1, dim=32, depth=4, heads=2)
    torch.manual_seed(0)
    base.load_state_dict(sl.UViT(image_size=8, patch_size=4, channels=1, dim=32, depth=4, heads=2).state_dict())
    sl.load_scaling_(base, folder / "ls")  # the adapter's file holds the gates: scale the base before it is adapted
    found["ls: read back"] = difference(adapted, PeftModel.from_pretrained(base.eval(), folder / "ls"))
    merged = adapted.merge_and_unload()
    found["ls: merged"] = difference(merged, PeftModel.from_pretrained(base.eval(), folder / "ls"))
    found["ls: still scaled after the merge"] = float(sl.is_scaled(merged))
    # 2. Constants: nothing of them is trained, and after the merge they fold into the weights.
    adapted = get_peft_model(make("cs"), LoraConfig(r=2, target_modules="all-linear"))
    train(adapted)
    adapted.eval().save_pretrained(str(folder / "cs"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = PeftModel.from_pretrained(make("cs"), folder / "cs")
    found["cs: read back"] = difference(adapted, again)
    merged = adapted.merge_and_unload()
    sl.fold_(merged)
    found["cs: merged and folded"] = difference(merged, again)
    return found


if __name__ == "__main__":
    for name, value in main(sys.argv[1] if len(sys.argv) > 1 else "runs/integrations/peft").items():
        print(f"{name}: {value:.3g}")
