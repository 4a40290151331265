"""Readings, alarms and sample grids in TensorBoard, wandb, trackio and MLflow: whichever are installed, all offline.

python examples/integrations/trackers.py FOLDER [tensorboard wandb trackio mlflow]
"""

import math
import os
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import scalelong as sl
from scalelong.stability import Alarm, StabilityMonitor, log_picture, send_alert

KNOWN = ("tensorboard", "wandb", "trackio", "mlflow")


def offline(folder: Path) -> None:
    """Everything stays in the folder. With an account, leave these out."""
    os.environ |= {"WANDB_MODE": "offline", "WANDB_DIR": str(folder), "WANDB_SILENT": "true"}
    os.environ |= {"TRACKIO_DIR": str(folder / "trackio"), "MLFLOW_TRACKING_URI": (folder / "mlflow").as_uri()}
    os.environ |= {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_ALLOW_FILE_STORE": "true"}
    for place in (folder, folder / "trackio"):
        place.mkdir(parents=True, exist_ok=True)


def opened(kind: str, folder: Path) -> tuple[Any, Any]:
    """A run of the tracker's own library, and what closes it."""
    if kind == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(folder / "tensorboard"))
        return writer, writer.close
    if kind == "wandb":
        import wandb  # pyright: ignore[reportMissingImports]

        run = wandb.init(project="mine", name="watched", id="watched", resume="allow")
        return run, run.finish
    if kind == "trackio":
        import trackio  # pyright: ignore[reportMissingImports]

        run = trackio.init(project="mine", name="watched", resume="allow")
        return run, trackio.finish
    import mlflow  # pyright: ignore[reportMissingImports]

    mlflow.set_experiment("mine")
    mlflow.start_run(run_name="watched")
    return mlflow, mlflow.end_run


def alert(run: Any, alarm: Alarm) -> None:
    send_alert(run, alarm.step, alarm.kind, str(alarm))


def tensorboard(run: Any, reading: dict[str, float], step: int) -> None:
    for name, value in reading.items():
        run.add_scalar(name, value, step)


def mlflow(run: Any, reading: dict[str, float], step: int) -> None:
    run.log_metrics({name: value for name, value in reading.items() if math.isfinite(value)}, step)


def main(folder: str | Path, kinds: tuple[str, ...] = KNOWN) -> dict[str, list[str]]:
    folder, found = Path(folder).resolve(), {}
    offline(folder)
    for kind in kinds:
        if find_spec(kind) is None:
            continue
        torch.manual_seed(0)
        run, close = opened(kind, folder)
        model = sl.UViT(image_size=8, patch_size=4, channels=1, dim=16, depth=4, heads=2)
        sl.scale_skips_(model, "cs")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        log = {"tensorboard": tensorboard, "mlflow": mlflow}.get(kind, lambda run, *values: run.log(*values))
        with StabilityMonitor(model, every=1, on_alarm=partial(alert, run)) as monitor:
            for step in range(4):
                x, t = torch.randn(4, 1, 8, 8), 999 * torch.rand(4)
                # The third batch is broken: the alarm arrives in the tracker as an alert.
                loss = (model(x, t) - x).square().mean() * (float("nan") if step == 2 else 1.0)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                reading = monitor.step(loss)
                if reading is not None:
                    log(run, reading, step)
        log_picture(run, 4, "samples", torch.randint(0, 256, (1, 16, 16), dtype=torch.uint8))
        close()
        found[kind] = [str(alarm) for alarm in monitor.alarms]
    return found


if __name__ == "__main__":
    place = sys.argv[1] if len(sys.argv) > 1 else "runs/integrations/trackers"
    for kind, alarms in main(place, tuple(sys.argv[2:]) or KNOWN).items():
        print(f"{kind}: {len(alarms)} alerts; the first: {alarms[0] if alarms else 'none'}")
