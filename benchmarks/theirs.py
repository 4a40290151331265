"""The other side: the authors' code from a checkout of it, and the step of diffusers' example script."""

import ast
import importlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from scalelong.models import UNET_PRESETS

from .harness import OfficialCheckoutError

# The authors' side: their network, loss, optimiser and average, imported from a checkout of their code.
#
# Nothing of theirs is copied here. Their `utils.py` and `sde.py` import packages that a training step does not need
# (torchvision, absl), so the definitions that it does need are taken out of these files one by one.

LIBRARY = "official_uvit_libs"
FILES = ("libs/uvit.py", "libs/timm.py", "sde.py", "utils.py")


def checkout(path: str | Path) -> Path:
    root = Path(path)
    missing = [name for name in FILES if not (root / name).is_file()]
    if missing:
        raise OfficialCheckoutError(
            f"{root} is not a checkout of the authors' code: it has no {', '.join(missing)}. Clone "
            f"github.com/sail-sg/ScaleLong or github.com/baofff/U-ViT and give that folder to --official"
        )
    return root


def make_accelerator(precision: str) -> Any:
    """An accelerator with a state of its own: accelerate has one precision in a process, here several take turns."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._shared_state = {}  # pyright: ignore[reportAttributeAccessIssue]
    return Accelerator(cpu=True, mixed_precision=precision)


class OfficialStep:
    """One `train_step` of their train.py, with the settings of their CIFAR-10 configuration."""

    def __init__(self, path: str, batch: int, precision: str = "no", **size: Any) -> None:
        root = checkout(path)
        sde = definitions(root / "sde.py", ("stp", "mos", "duplicate", "SDE", "VPSDE", "ScoreModel", "LSimple"))
        utils = definitions(root / "utils.py", ("get_optimizer", "get_lr_scheduler", "customized_lr_scheduler", "ema"))
        network = network_class(root)
        self.accelerator = make_accelerator(precision)
        model, average = network(**size), network(**size)
        average.eval()
        utils.ema(average, model, 0)
        optimizer = utils.get_optimizer(
            list(model.parameters()), "adamw", lr=2e-4, weight_decay=0.03, betas=(0.99, 0.999)
        )
        self.scheduler = utils.get_lr_scheduler(optimizer, "customized", warmup_steps=2500)
        self.model, self.average, self.optimizer = self.accelerator.prepare(model, average, optimizer)
        self.score_model = sde.ScoreModel(self.model, pred="noise_pred", sde=sde.VPSDE())
        self.loss, self.ema = sde.LSimple, utils.ema
        self.images = torch.rand(batch, size["in_chans"], size["img_size"], size["img_size"]) * 2 - 1

    def __call__(self) -> None:
        self.model.train()
        self.optimizer.zero_grad()
        loss = self.loss(self.score_model, self.images, pred="noise_pred")
        self.accelerator.gather(loss.detach()).mean()  # pyright: ignore[reportAttributeAccessIssue]
        self.accelerator.backward(loss.mean())
        self.optimizer.step()
        self.scheduler.step()
        self.ema(self.average, self.model, 0.9999)
        self.model.eval()


def difference(path: str, batch: int, **size: Any) -> float:
    """The largest difference between the outputs of their network and ours with the same weights, as a share."""
    from scalelong.models import UViT

    theirs = network_class(checkout(path))(**size).eval()
    ours = UViT.from_official(theirs.state_dict(), **size).eval()
    x = torch.randn(min(batch, 4), size["in_chans"], size["img_size"], size["img_size"])
    t = torch.linspace(0, 999, len(x))
    with torch.no_grad():
        expected, found = theirs(x, t), ours(x, t)
    return float((found - expected).abs().max() / expected.abs().max())


def network_class(root: Path) -> Any:
    """Their UViT. It needs einops, as their README says."""
    folder = root / "libs"
    specification = importlib.util.spec_from_loader(LIBRARY, loader=None, is_package=True)
    assert specification is not None
    package = importlib.util.module_from_spec(specification)
    package.__path__ = [str(folder)]
    sys.modules[LIBRARY] = package
    with _naming_packages(folder / "uvit.py"):
        return importlib.import_module(f"{LIBRARY}.uvit").UViT


def definitions(file: Path, names: Iterable[str]) -> Any:
    """Functions and classes of a file, with those of its imports that they use, and nothing else of it."""
    tree = ast.parse(file.read_text(encoding="utf-8"), str(file))
    wanted = [
        node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in set(names)
    ]
    absent = set(names) - {node.name for node in wanted}
    if absent:
        raise OfficialCheckoutError(f"{file} has no {', '.join(sorted(absent))}; is it the authors' code?")
    used = {node.id for definition in wanted for node in ast.walk(definition) if isinstance(node, ast.Name)}
    imports = [
        node
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        and any((alias.asname or alias.name.partition(".")[0]) in used for alias in node.names)
    ]
    namespace: dict[str, Any] = {"__name__": f"official_{file.stem}"}
    with _naming_packages(file):
        exec(compile(ast.Module([*imports, *wanted], type_ignores=[]), str(file), "exec"), namespace)
    return SimpleNamespace(**{name: namespace[name] for name in names})


@contextmanager
def _naming_packages(file: Path) -> Iterator[None]:
    """An import that fails says which file needs which package."""
    try:
        yield
    except ImportError as error:
        package = error.name or str(error)
        raise OfficialCheckoutError(
            f"the authors' {file} needs the package {package!r}, which is not installed: pip install {package}"
        ) from error


# The step of diffusers' examples/unconditional_image_generation/train_unconditional.py, with --use_ema.
#
# The script is not part of the package, so its step is rewritten here from the same calls, with its default arguments.
# Decoding of images, progress bar and trackers are left out.

TRAINING_STEPS = 100_000


class ScriptStep:
    def __init__(self, options: dict[str, Any], image: int, batch: int, precision: str = "no") -> None:
        # Here, so that the authors' step above does not load what it does not use.
        from diffusers.models.unets.unet_2d import UNet2DModel
        from diffusers.optimization import get_scheduler
        from diffusers.schedulers.scheduling_ddpm import DDPMScheduler
        from diffusers.training_utils import EMAModel

        self.accelerator = make_accelerator(precision)
        model = UNet2DModel(**{**UNET_PRESETS["cifar10"].arguments, **options})
        self.ema = EMAModel(
            model.parameters(),
            decay=0.9999,
            use_ema_warmup=True,
            inv_gamma=1.0,
            power=0.75,
            model_cls=UNet2DModel,
            model_config=model.config,
        )
        self.schedule = DDPMScheduler(num_train_timesteps=1000, beta_schedule="linear", prediction_type="epsilon")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.95, 0.999), weight_decay=1e-6, eps=1e-8)
        rates = get_scheduler("cosine", optimizer, num_warmup_steps=500, num_training_steps=TRAINING_STEPS)
        self.model, self.optimizer, self.rates = self.accelerator.prepare(model, optimizer, rates)
        self.ema.to(self.accelerator.device)
        self.images = torch.rand(batch, 3, image, image) * 2 - 1
        self.model.train()

    def __call__(self) -> None:
        noise = torch.randn(self.images.shape)
        times = torch.randint(0, 1000, (len(self.images),)).long()
        noisy = self.schedule.add_noise(self.images, noise, times)  # pyright: ignore[reportArgumentType]
        with self.accelerator.accumulate(self.model):
            loss = F.mse_loss(self.model(noisy, times).sample.float(), noise.float())
            self.accelerator.backward(loss)
            if self.accelerator.sync_gradients:
                self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.rates.step()
            self.optimizer.zero_grad()
        if self.accelerator.sync_gradients:
            self.ema.step(self.model.parameters())
        loss.detach().item()
