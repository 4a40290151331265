"""A segmentation task of the kind of MONAI's tutorials (spheres in volumes, UNet, Dice) with the monitor and the range.

python examples/integrations/monai_segmentation.py FOLDER
"""

import sys
from pathlib import Path
from typing import Any

import torch
from monai.bundle.config_parser import ConfigParser
from monai.data.dataloader import DataLoader
from monai.data.dataset import CacheDataset
from monai.data.meta_tensor import MetaTensor
from monai.data.synthetic import create_test_image_3d
from monai.inferers.utils import sliding_window_inference
from monai.losses.dice import DiceCELoss
from monai.metrics.meandice import DiceMetric
from monai.networks.nets.unet import UNet
from monai.transforms.post.array import AsDiscrete
from monai.utils.misc import set_determinism

import scalelong as sl
from scalelong.stability import StabilityMonitor

SIZE = 16


def make_unet() -> UNet:
    torch.manual_seed(0)
    return UNet(spatial_dims=3, in_channels=1, out_channels=2, channels=(4, 8, 16), strides=(2, 2), num_res_units=0)


def volumes(count: int) -> list[dict[str, Any]]:
    """Synthetic volumes as MetaTensors, which is what MONAI's loaders give."""
    set_determinism(0)
    made = [create_test_image_3d(SIZE, SIZE, SIZE, 3, rad_max=5, rad_min=3, num_seg_classes=1) for _ in range(count)]
    return [
        {"image": MetaTensor(image[None]).float(), "label": MetaTensor(label[None]).float()} for image, label in made
    ]


def train(network: Any, steps: int, lr: float, path: Path | None = None) -> tuple[float, Any]:
    loader = DataLoader(CacheDataset(volumes(4), progress=False), batch_size=2)
    loss_of, optimizer = DiceCELoss(to_onehot_y=True, softmax=True), torch.optim.Adam(network.parameters(), lr=lr)
    batches = list(loader)
    with StabilityMonitor(network, every=2, probe_batch=(batches[0]["image"],), path=path) as monitor:
        for step in range(steps):
            batch = batches[step % len(batches)]
            loss = loss_of(network(batch["image"]), batch["label"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss)
    metric: Any
    shape: Any
    metric, shape = DiceMetric(include_background=False), AsDiscrete(argmax=True, to_onehot=2)
    with torch.no_grad():
        for item in volumes(6)[4:]:
            drawn = sliding_window_inference(item["image"][None], (SIZE,) * 3, 1, network)
            metric([shape(drawn[0])], [AsDiscrete(to_onehot=2)(item["label"])])
    return float(metric.aggregate()), monitor


BUNDLE = {
    "network_def": {
        "_target_": "UNet",
        "spatial_dims": 3,
        "in_channels": 1,
        "out_channels": 2,
        "channels": [4, 8, 16],
        "strides": [2, 2],
    },
    "example": {"_target_": "torch.zeros", "size": [1, 1, SIZE, SIZE, SIZE]},
    # Whatever uses the network refers to "@network", which is the scaled one.
    "network": {
        "_target_": "scalelong.scale_skips_",
        "model": "@network_def",
        "config": "cs:0.7",
        "example_inputs": "$(@example,)",
    },
}


def main(folder: str | Path) -> dict[str, Any]:
    folder, found = Path(folder), {}
    inputs = (volumes(1)[0]["image"][None],)  # a MetaTensor: it is followed as a plain tensor is
    found["long skips"] = len(sl.find_skips(make_unet(), inputs))
    for scaling in ("none", "cs", "ls"):
        network = sl.scale_skips_(make_unet(), scaling, inputs)
        dice, monitor = train(network, 6, 1e-2, folder / f"stability-{scaling}.jsonl")
        found[f"Dice after 6 steps, {scaling}"] = round(dice, 3)
        found[f"readings, {scaling}"] = len(monitor.history)
    # Which learning rates does this network survive, with and without scaling? Ask before believing that it helps.
    items, loss_of = volumes(4), DiceCELoss(to_onehot_y=True, softmax=True)

    def step(model: Any, _: int, generator: torch.Generator) -> torch.Tensor:
        item = items[int(torch.randint(4, (1,), generator=generator))]
        return loss_of(model(item["image"][None]), item["label"][None])

    found["range"] = sl.rate_range(
        lambda _: make_unet(),
        step,
        rates=(1e-2, 10.0),
        methods=("none", "cs"),
        seeds=2,  # 8 or more to know anything
        steps=30,  # some hundreds
        example_inputs=inputs,
        jobs=1,
    )
    parser = ConfigParser(BUNDLE)
    found["bundle is scaled"] = float(sl.is_scaled(parser.get_parsed_content("network")))
    # torch.jit.script and bundles' ckpt_export read no hooks: fold first.
    network = sl.scale_skips_(make_unet(), "cs", inputs).eval()
    expected = network(inputs[0])
    sl.fold_(network)
    scripted = torch.jit.script(network)
    found["folded and scripted, difference"] = float((scripted(inputs[0].as_tensor()) - expected).abs().max())
    return found


if __name__ == "__main__":
    for name, value in main(sys.argv[1] if len(sys.argv) > 1 else "runs/integrations/monai").items():
        print(f"{name}: {value}")
