"""Our side: steps of our trainer, its parts, two processes, and networks scaled from outside."""

import atexit
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalelong.console import TrainingProgress
from scalelong.data import Batch, ImageData, MemoryData, load_data
from scalelong.models.presets import unet
from scalelong.runs.config import (
    DiffusionConfig,
    HardwareConfig,
    ImagesConfig,
    LoggingConfig,
    OptimizerConfig,
    Precision,
    TrainConfig,
)
from scalelong.runs.folder import RunFolder
from scalelong.runs.model import DataShape, RunData, build_model, uses_channels_last
from scalelong.runs.processes import make_accelerator
from scalelong.skips import find_skips, fold_, scale_skips_
from scalelong.stability import StabilityMonitor
from scalelong.training import loop
from scalelong.training.loop import Trainer

from ..contender import Contender, Worker
from ..profile import count_flops, profile_by_group
from ..settings import BenchmarkError
from . import TRAINER

# Our side: steps of our trainer, on random images that are in memory.

IMAGES = 512
"""Random images in memory, as CIFAR-10 would be."""
ENDLESS = 1_000_000


class TrainingStep:
    """All that `scalelong train` does in a step between two lines of its log."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def __call__(self) -> None:
        self.trainer.optimise(False)
        self.trainer.guard.bad_step()

    def flops(self) -> float:
        # torch counts in its own thread alone, so that one core takes the whole batch here.
        cores, self.trainer.cores = self.trainer.cores, None
        try:
            return count_flops(self)
        finally:
            self.trainer.cores = cores

    def profile(self) -> dict[str, float]:
        return profile_by_group(self.trainer, self)


def training_step(**arguments: Any) -> TrainingStep:
    trainer = make_trainer(configuration(**arguments), arguments["shape"])
    trainer.begin_at(0)
    return TrainingStep(trainer)


def configuration(
    *,
    model: str,
    options: dict[str, Any],
    shape: list[int],
    batch: int,
    scaling: str = "none",
    compiled: bool = False,
    schedule: Any = "vp",
    clip: float | None = None,
    workers: int = 0,
    precision: Precision = "no",
) -> TrainConfig:
    """The authors' settings for CIFAR-10, without trackers."""
    return TrainConfig(
        data="random images",
        model=model,
        model_options=options,
        scaling=scaling,
        steps=ENDLESS,
        batch_size=batch,
        images=ImagesConfig(size=shape[-1], channels=shape[0], flip=True, workers=workers),
        diffusion=DiffusionConfig(schedule=schedule),
        optimizer=OptimizerConfig(lr=2e-4, weight_decay=0.03, betas=(0.99, 0.999), warmup=2500, clip=clip),
        hardware=HardwareConfig(compile=compiled, cpu=True, precision=precision),
        logging=LoggingConfig(trackers=(), monitor_every=0),
    )


def make_trainer(config: TrainConfig, shape: list[int]) -> Trainer:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (IMAGES, *shape), dtype=torch.uint8, generator=generator)
    return trainer_on(config, MemoryData("random images", images))


def trainer_on(config: TrainConfig, data: ImageData) -> Trainer:
    folder = tempfile.mkdtemp(prefix="scalelong-bench-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    accelerator = make_accelerator(config, folder)
    return Trainer(
        config, RunFolder(folder), accelerator, RunData(config, data, data), TrainingProgress(config.steps, False)
    )


def inference_parts(*, folded: bool = False, **arguments: Any) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A network and its inputs; `folded` has its constants multiplied into the weights."""
    shape, config = arguments["shape"], configuration(**arguments)
    model = build_model(config, DataShape(*shape)).eval()
    if folded:
        from scalelong.skips import fold_

        fold_(model)
    x, t = torch.randn(config.batch_size, *shape), torch.full((config.batch_size,), 500.0)
    if uses_channels_last(config, model):
        model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        x = x.contiguous(memory_format=torch.channels_last)
    return model, (x, t)


def inference_step(**arguments: Any) -> Callable[[], object]:
    """A forward pass without gradients."""
    model, inputs = inference_parts(**arguments)

    def step() -> None:
        with torch.inference_mode():
            model(*inputs)

    return step


def matmul(size: int) -> Callable[[], object]:
    """A product of square matrices: what the machine can do at best."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    out = torch.empty(size, size)
    return lambda: torch.mm(a, b, out=out)


# Our trainer with a stopwatch at each of its parts beside the network.

LINES = 20
"""Lines of the log that are written to see what one costs."""


class WatchedStep(TrainingStep):
    """The seconds of each part, summed up over all steps since the last question."""

    def __init__(self, trainer: loop.Trainer) -> None:
        super().__init__(trainer)
        self.seconds: dict[str, float] = {}
        self.steps = 0
        state, guard = trainer.state, trainer.guard
        trainer.source = self._watched_source(trainer.source)
        trainer.examples = self._watched("data", trainer.examples)  # pyright: ignore[reportAttributeAccessIssue]
        state.prepared_optimizer.step = self._watched("optimiser", state.prepared_optimizer.step)
        state.prepared_optimizer.zero_grad = self._watched("optimiser", state.prepared_optimizer.zero_grad)
        loop.clip_gradient = self._watched("optimiser", loop.clip_gradient)  # in this process alone
        guard.protect = self._watched("optimiser", guard.protect)
        guard.bad_step = self._watched("optimiser", guard.bad_step)
        state.ema.update = self._watched("moving average", state.ema.update)
        trainer.window.add = self._watched("logging", trainer.window.add)

    def __call__(self) -> None:
        super().__call__()
        self.steps += 1

    def forget(self) -> None:
        self.seconds, self.steps = {}, 0

    def parts(self) -> dict[str, float]:
        """Seconds per step."""
        found = {name: value / self.steps for name, value in self.seconds.items()}
        return found | {"logging": found["logging"] + self._line() / self.trainer.config.logging.log_every}

    def _line(self) -> float:
        """Seconds that one line of the log takes."""
        trainer = self.trainer
        trainer.run.path.mkdir(parents=True, exist_ok=True)
        start = time.perf_counter()
        for _ in range(LINES):
            trainer.window.values[0] += 1
            trainer.watch.start(trainer.state.step - 1)
            trainer.recorder.record(trainer.state, trainer.window, trainer.watch, 0.0)
        return (time.perf_counter() - start) / LINES

    def _watched(self, part: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            start = time.perf_counter()
            try:
                return work(*arguments, **keywords)
            finally:
                self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start

        return call

    def _watched_source(self, source: Iterator[Batch]) -> Iterator[Batch]:
        following = self._watched("data", lambda: next(source))
        while True:
            yield following()


def watched_step(**arguments: Any) -> WatchedStep:
    trainer = make_trainer(configuration(**arguments), arguments["shape"])
    trainer.begin_at(0)
    return WatchedStep(trainer)


def monitor_of(trainer: loop.Trainer, every: int, shape: list[int]) -> StabilityMonitor:
    """A monitor that reads a probe batch as well, as `docs/stability.md` shows it."""
    probe = (torch.randn(4, *shape), torch.full((4,), 500.0))
    return StabilityMonitor(trainer.state.bare, every=every, probe_batch=probe)


def monitored_step(*, every: int, **arguments: Any) -> Callable[[], object]:
    """Steps with a stability monitor."""
    trainer = make_trainer(configuration(**arguments), arguments["shape"])
    trainer.begin_at(0)
    monitor = monitor_of(trainer, every, arguments["shape"])
    step = TrainingStep(trainer)

    def monitored() -> None:
        step()
        monitor.step(trainer.window.values[1])

    return monitored


# Training that reads its images from a source, to see how much it waits for them.


def load(source: str, limit: int, size: int, *, streamed: bool, cache: str = "none") -> ImageData:
    """`streamed` gives it one byte less memory than its pixels need, and `cache` a folder for what it decodes."""
    options: dict[str, Any] = {"memory_limit": 3 * limit * size**2 - 1, "image_cache": cache} if streamed else {}
    return load_data(source, limit=limit, size=size, channels=3, **options)


def training_step_on(
    *, source: str, limit: int, streamed: bool, workers: int, cache: str = "none", **arguments: Any
) -> TrainingStep:
    data = load(source, limit, arguments["shape"][-1], streamed=streamed, cache=cache)
    config = configuration(**arguments, workers=workers)
    trainer = trainer_on(config, data)
    trainer.begin_at(0)
    return TrainingStep(trainer)


# Networks of others whose long skips are found and scaled from outside.


class ConcatenatingUNet(nn.Module):
    """A UNet of the other kind: the concatenation is the argument of the decoder blocks, as in guided-diffusion."""

    def __init__(self, width: int = 64, levels: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(nn.Conv2d(width, width, 3, stride=2, padding=1) for _ in range(levels))
        self.up = nn.ModuleList(
            nn.Sequential(nn.Conv2d(2 * width, width, 3, padding=1), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1))
            for _ in range(levels)
        )
        self.head = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        skips = [self.stem(x)]
        for layer in self.down:
            skips.append(F.silu(layer(skips[-1])))
        x = skips.pop()
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2), skips.pop()], dim=1))
        return self.head(x)


def stable_diffusion() -> nn.Module:
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

    return UNet2DConditionModel(sample_size=64, cross_attention_dim=768, attention_head_dim=8)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "stable-diffusion-1.5": stable_diffusion,
    "unet/cifar10": lambda: unet("cifar10"),
    "unet/cifar10, narrow": lambda: unet("cifar10", block_out_channels=(32, 64, 64, 64), layers_per_block=1),
    "concatenating": ConcatenatingUNet,
}


class Planning:
    """One search for the long skips, on the meta device where nothing is computed."""

    def __init__(self, network: str) -> None:
        with torch.device("meta"):
            self.model = NETWORKS[network]()
            self.inputs = (torch.zeros(1, 3, 32, 32),) if network == "concatenating" else None

    def __call__(self) -> None:
        find_skips(self.model, self.inputs)

    def about(self) -> dict[str, Any]:
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        return {"parameters": parameters, "skips": len(find_skips(self.model, self.inputs))}


def make_network(
    network: str, scaling: str | None, batch: int, *, folded: bool = False
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A network that is scaled from outside, or as it is (None), and its inputs."""
    torch.manual_seed(0)
    model = NETWORKS[network]().eval()
    image = torch.randn(batch, 3, 32, 32)
    inputs = (image,) if network == "concatenating" else (image, torch.full((batch,), 500.0))
    if scaling is not None:
        scale_skips_(model, scaling, inputs)
    if folded and (kept := fold_(model).kept):
        raise BenchmarkError(f"the constants of {network} cannot be folded: {kept}")
    return model, inputs


# Two processes that each do their share of a step at the same time.


class Pair:
    """This process and a second one. Together they are one run of two processes (DDP), or two runs on their own."""

    def __init__(self, together: bool, **arguments: Any) -> None:
        places = [{}, {}]
        if together:
            arguments["batch"] *= 2
            places = _places()
        self.other = Worker(Contender("the second process", TRAINER, arguments, places[1]), threads=1)
        os.environ.update(places[0])  # what torchrun would have set
        self.step = training_step(**arguments)
        self.other.wait_until_built()

    def __call__(self) -> None:
        self.other.begin(1)
        self.step()
        self.other.end()


def _places() -> list[dict[str, str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in (0, 1)]
