"""What is measured. A case is a function of the settings that makes a race, and its number of rounds."""

import atexit
import io
import os
import shutil
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from .harness import BenchmarkError, Race, Settings, Spread, Step, seconds_text

# Networks


@dataclass(frozen=True)
class UViTSize:
    image: int
    patch: int
    dim: int
    depth: int
    heads: int
    batch: int
    channels: int = 3

    @property
    def shape(self) -> list[int]:
        return [self.channels, self.image, self.image]

    def ours(self) -> dict[str, Any]:
        """Arguments of `training_step`."""
        options = {"patch_size": self.patch, "dim": self.dim, "depth": self.depth, "heads": self.heads}
        return {"model": "uvit", "options": options, "shape": self.shape, "batch": self.batch}

    def official(self) -> dict[str, Any]:
        """Arguments of the authors' constructor, and the batch."""
        sizes = {"img_size": self.image, "patch_size": self.patch, "in_chans": self.channels, "batch": self.batch}
        return {**sizes, "embed_dim": self.dim, "depth": self.depth, "num_heads": self.heads}

    def __str__(self) -> str:
        tokens = (self.image // self.patch) ** 2 + 1
        return f"U-ViT, dim {self.dim}, depth {self.depth}, {tokens} tokens, batch {self.batch}"


S2 = UViTSize(image=32, patch=2, dim=512, depth=12, heads=8, batch=8)
"""U-ViT-S/2 on CIFAR-10's shape."""
SMALL = UViTSize(image=16, patch=2, dim=128, depth=12, heads=4, batch=64)
DEMO = UViTSize(image=16, patch=4, dim=64, depth=24, heads=4, batch=8, channels=1)
"""The network that `scalelong demo` and the range explore with."""
DIGITS = UViTSize(image=8, patch=2, dim=96, depth=6, heads=4, batch=32, channels=1)
WIDE = {
    width: replace(SMALL, dim=width, heads=width // 32, batch=batch)
    for width, batch in ((64, 64), (128, 64), (256, 128))
} | {512: replace(S2, batch=64)}
"""Batches grow with the width, as in training: what Muon adds does not depend on the batch."""
TINY = UViTSize(image=8, patch=2, dim=32, depth=4, heads=2, batch=4)
"""For --quick."""


@dataclass(frozen=True)
class UNetSize:
    """diffusers' UNet2DModel of the preset unet/cifar10, perhaps narrower."""

    batch: int
    widths: tuple[int, ...] = (128, 256, 256, 256)
    layers: int = 2
    image: int = 32

    @property
    def options(self) -> dict[str, Any]:
        return {"block_out_channels": list(self.widths), "layers_per_block": self.layers}

    def ours(self) -> dict[str, Any]:
        shape = [3, self.image, self.image]
        return {"model": "unet/cifar10", "options": self.options, "shape": shape, "batch": self.batch}

    def __str__(self) -> str:
        return f"UNet2DModel of unet/cifar10, widths {', '.join(map(str, self.widths))}, batch {self.batch}"


CIFAR_UNET = UNetSize(batch=8)
SMALL_UNET = UNetSize(batch=8, widths=(32, 64, 64, 64), layers=1)
TINY_UNET = UNetSize(batch=2, widths=(32, 32, 32, 32), layers=1, image=16)


def quick(size: Any, settings: Settings) -> Any:
    return size if not settings.quick else TINY if isinstance(size, UViTSize) else TINY_UNET


# A step of our trainer: all that `scalelong train` does in a step between two lines of its log


def training_step(
    *,
    model: str,
    options: dict[str, Any],
    shape: list[int],
    batch: int,
    data: Any = None,
    workers: int = 0,
    precision: Any = "no",
    optimizer: str = "adamw",
    **changes: Any,
) -> Step:
    """The authors' settings for CIFAR-10, on random images in memory unless `data` says otherwise."""
    import torch

    from scalelong.config import HardwareConfig, ImagesConfig, LoggingConfig, OptimizerConfig, TrainConfig
    from scalelong.data import MemoryData
    from scalelong.runs.folder import RunFolder
    from scalelong.runs.model import RunData
    from scalelong.runs.processes import make_accelerator
    from scalelong.training.loop import Trainer
    from scalelong.training.recording import TrainingProgress

    config = TrainConfig(
        data="random images",
        model=model,
        model_options=options,
        steps=1_000_000,
        batch_size=batch,
        images=ImagesConfig(size=shape[-1], channels=shape[0], flip=True, workers=workers),
        optimizer=OptimizerConfig(optimizer=optimizer, lr=2e-4, weight_decay=0.03, betas=(0.99, 0.999), warmup=2500),
        hardware=HardwareConfig(cpu=True, precision=precision),
        logging=LoggingConfig(trackers=(), monitor_every=0),
        **changes,
    )
    if data is None:
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(0, 256, (512, *shape), dtype=torch.uint8, generator=generator)
        data = MemoryData("random images", images)
    folder = tempfile.mkdtemp(prefix="scalelong-bench-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    run_data, progress = RunData(config, data, data), TrainingProgress(config.steps, False)
    trainer = Trainer(config, RunFolder(folder), make_accelerator(config, folder), run_data, progress)
    trainer.begin_at(0)

    def step() -> None:
        done = trainer.step([next(trainer.source) for _ in trainer.parts])
        trainer.recorder.add(done.loss, done.grad_norm)
        trainer.monitor.add(trainer.state.step, done.by_level)
        trainer.bad_steps.first()

    return step


def in_both_precisions(name: str, make: Callable[..., Step]) -> dict[str, Callable[[], Step]]:
    return {name: make, f"{name}, bf16": partial(make, precision="bf16")}


# step: a training step against the authors' code and diffusers' script

TOLERANCE = 1e-4
"""Largest difference between the outputs of two networks that are compared, as a share of the largest output."""


def uvit_step(size: UViTSize, settings: Settings) -> Race:
    size = quick(size, settings)
    steps, notes = in_both_precisions("ours", partial(training_step, **size.ours())), []
    if settings.official is None:
        notes.append("The authors' code was not measured: give a checkout of it with --official PATH.")
    else:
        from .theirs import OfficialStep, difference

        given = {"path": str(settings.official), **size.official()}
        apart = difference(**given)
        if not apart <= TOLERANCE:
            raise BenchmarkError(f"the authors' network and ours differ by {apart:.1e} with the same weights")
        notes.append(f"With the same weights both networks' outputs differ by {apart:.0e} of the largest.")
        steps = {**in_both_precisions("authors", partial(OfficialStep, **given)), **steps}
    return Race(f"Training step, {size}", steps, size.batch, memory=True, notes=notes)


def unet_step(settings: Settings) -> Race:
    from scalelong.config import DiffusionConfig

    from .theirs import ScriptStep

    size: UNetSize = quick(CIFAR_UNET, settings)
    options = {**size.options, "sample_size": size.image}
    theirs = partial(ScriptStep, options=options, image=size.image, batch=size.batch)
    ours = partial(training_step, **size.ours(), diffusion=DiffusionConfig(schedule="ddpm"))
    steps = {**in_both_precisions("diffusers' script", theirs), **in_both_precisions("ours", ours)}
    return Race(f"Training step, {size}", steps, size.batch, memory=True)


# optimizer: Muon against AdamW, in a whole training step


def muon_step(size: UViTSize, settings: Settings) -> Race:
    size = quick(size, settings)
    steps = {name: partial(training_step, **size.ours(), optimizer=name) for name in ("adamw", "muon")}
    return Race(f"Training step by optimiser, {size}", steps, size.batch)


# overhead: what scaling the long skips costs in a training step

METHODS = {
    "none, again": "none",
    "uniform": "uniform",
    "CS": "cs",
    "LS (se, channel)": "ls:module=se,gate=channel",
    "LS (scalar)": "ls:module=scalar",
    "merge_norm": "merge_norm",
}
TOKEN_GATES = {"LS (se, token)": "ls:module=se,gate=token", "LS (ie, token)": "ls:module=ie,gate=token"}


def overhead(size: UViTSize | UNetSize, methods: dict[str, str], settings: Settings) -> Race:
    size = quick(size, settings)
    made = {"none": "none", **methods}
    steps = {name: partial(training_step, **size.ours(), scaling=method) for name, method in made.items()}
    notes = ["The second copy of none shows how far two equal networks are apart here."]
    return Race(f"Training step, {size}", steps, memory=True, notes=notes)


def overhead_attached(settings: Settings) -> Race:
    """HunyuanDiT with 8 blocks of a tenth of its width, in a plain loop."""
    import torch
    from diffusers.models.transformers.hunyuan_transformer_2d import HunyuanDiT2DModel

    from scalelong.attaching import scale_skips_

    width, batch = (16, 2) if settings.quick else (128, 8)
    heads = {"hidden_size": width, "num_attention_heads": width // 16, "attention_head_dim": 16}
    text = {"cross_attention_dim": 8, "cross_attention_dim_t5": 8, "text_len": 4, "text_len_t5": 4}
    sizes = {"sample_size": 16, "patch_size": 2, "in_channels": 4, "num_layers": 8, "pooled_projection_dim": 4}
    rest: dict[str, Any] = {**sizes, "use_style_cond_and_image_meta_size": False}
    words = {"encoder_hidden_states": torch.randn(batch, 4, 8), "text_embedding_mask": torch.ones(batch, 4)}
    inputs = {
        "hidden_states": torch.randn(batch, 4, 16, 16),
        "timestep": torch.full((batch,), 3.0),
        "image_rotary_emb": (torch.randn(64, 16), torch.randn(64, 16)),
        **words,
        **{f"{name}_t5": value for name, value in words.items()},
    }

    def make(scaling: str) -> Step:
        torch.manual_seed(0)
        model = HunyuanDiT2DModel(**heads, **text, **rest)
        if scaling != "none":
            scale_skips_(model, scaling, inputs)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def step() -> None:
            model(**inputs).sample.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    made = {"none": "none", **{name: METHODS[name] for name in ("none, again", "CS", "LS (se, channel)", "merge_norm")}}
    steps = {name: partial(make, method) for name, method in made.items()}
    notes = ["A LayerNorm follows these merges already, so that merge_norm attaches nothing."]
    return Race(f"Training step of HunyuanDiT2DModel, width {width}, batch {batch}", steps, memory=True, notes=notes)


# attach: finding long skips, and scaling networks of others from outside


def stable_diffusion() -> Any:
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

    return UNet2DConditionModel(sample_size=64, cross_attention_dim=768, attention_head_dim=8)


def sdxl() -> Any:
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

    per_level: dict[str, Any] = {"transformer_layers_per_block": [1, 2, 10], "attention_head_dim": [5, 10, 20]}
    return UNet2DConditionModel(
        **per_level,
        sample_size=128,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        block_out_channels=(320, 640, 1280),
        cross_attention_dim=2048,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=256,
        projection_class_embeddings_input_dim=2816,
    )


def deep_unet(layers: int) -> Any:
    from scalelong.models import unet

    return unet("cifar10", block_out_channels=(32, 64, 64, 64), layers_per_block=layers)


def finding(settings: Settings) -> dict[str, Any]:
    """Seconds of `find_skips` by the number of operations that ran meanwhile."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from scalelong.finding import find_skips

    class Counter(TorchDispatchMode):
        ran = 0

        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.ran += 1
            return op(*args, **(kwargs or {}))

    deep = (1, 2) if settings.quick else (1, 2, 4, 8, 16, 32)
    networks = {f"unet/cifar10, narrow, {n} layers in a block": partial(deep_unet, n) for n in deep}
    if not settings.quick:
        networks |= {"Stable Diffusion 1.5": stable_diffusion, "Stable Diffusion XL": sdxl}
    torch.set_num_threads(settings.threads)
    rows, seconds = [], {}
    for name, build in networks.items():
        with torch.device("meta"):
            model = build()
        with Counter() as counter:
            plan = find_skips(model)
        seconds[name] = times = []
        for _ in range(settings.rounds or (2 if settings.quick else 5)):
            began = time.process_time()
            find_skips(model)
            times.append(time.process_time() - began)
        each = Spread.of([value / counter.ran for value in times])
        rows.append([name, str(len(plan)), f"{counter.ran:,}", Spread.of(times).text(seconds_text)])
        rows[-1].append(each.text(seconds_text))
    title = "Finding the long skips of a network on the meta device (`find_skips`), processor time"
    columns = ["", "skips", "operations", "time", "time for an operation"]
    return {"title": title, "columns": columns, "rows": rows, "notes": [], "seconds": seconds}


def scaling_once(settings: Settings) -> dict[str, Any]:
    """Seconds of `scale_skips_` with its verification. Every round scales a network anew."""
    import torch

    from scalelong.attaching import scale_skips_

    torch.set_num_threads(settings.threads)
    seconds: dict[str, list[float]] = {}
    build = partial(deep_unet, 1) if settings.quick else stable_diffusion
    for method in ("cs:behind_norms=true", "ls"):  # these are not cancelled by the norms behind the merges
        seconds[method] = times = []
        for _ in range(settings.rounds or 2):
            model = build()
            began = time.process_time()
            scale_skips_(model, method)
            times.append(time.process_time() - began)
    rows = [[method, Spread.of(times).text(seconds_text)] for method, times in seconds.items()]
    name = "a narrow UNet" if settings.quick else "Stable Diffusion 1.5"
    title = f"Scaling {name} from outside (`scale_skips_`), found and verified, processor time"
    return {"title": title, "columns": ["", "time"], "rows": rows, "notes": [], "seconds": seconds}


# sampling: against diffusers' own pipeline, with the same network, scheduler and seeds


def sampling(network: str, sampler: str, steps: int, settings: Settings) -> Race:
    import torch
    from diffusers.pipelines.ddpm.pipeline_ddpm import DDPMPipeline
    from diffusers.schedulers.scheduling_ddim import DDIMScheduler
    from diffusers.schedulers.scheduling_dpmsolver_multistep import DPMSolverMultistepScheduler

    from scalelong.diffusion.sampling import SampleSettings, requests, scheduler
    from scalelong.runs.load import load_trained

    batch, steps = (8, 2) if settings.quick else (64, steps)
    run = load_trained(network)
    maker, wanted = run.maker, requests(batch, 0, run.default_prompts)
    condition = maker.conditions.from_prompts([request.prompt for request in wanted if request.prompt is not None])
    kind = {"dpm++": DPMSolverMultistepScheduler, "ddim": DDIMScheduler}[sampler]
    solver = kind.from_config(scheduler(maker.process, maker.prediction, sampler).config)

    class Network(torch.nn.Module):
        """What the pipeline asks for."""

        config = SimpleNamespace(in_channels=maker.shape[0], sample_size=maker.shape[1:])
        dtype, device = torch.float32, torch.device("cpu")

        def forward(self, x: Any, t: Any) -> SimpleNamespace:
            return SimpleNamespace(sample=maker.network(x, maker.process.network_time(t).expand(len(x)), condition))

    pipeline: Any = DDPMPipeline(unet=Network(), scheduler=solver)  # pyright: ignore[reportArgumentType]
    pipeline.set_progress_bar_config(disable=True)

    def theirs() -> Any:
        generators = [torch.Generator().manual_seed(request.seed) for request in wanted]
        found = pipeline(batch_size=batch, generator=generators, num_inference_steps=steps, output_type="pt").images
        return (found * 255).round().to(torch.uint8)

    def ours() -> Any:
        return maker.all(wanted, SampleSettings(sampler=sampler, steps=steps), batch_size=batch)

    apart = float((ours().float() - theirs().float()).abs().max())
    title = f"Sampling, {network}, {sampler}, {steps} steps, batch {batch}"
    notes = [f"The same images: the largest difference of a pixel is {apart:g} of 255."]
    return Race(title, {"diffusers' pipeline": lambda: theirs, "ours": lambda: ours}, batch, notes=notes)


# data: the same pictures from each source

STREAMED = UViTSize(image=64, patch=8, dim=64, depth=4, heads=2, batch=64)
"""Small, so that a step asks for many images a second."""


def write_sources(folder: Path, count: int, size: int) -> dict[str, str]:
    """From a name to what `load_data` takes. Smooth noise gives PNG and JPEG about as much to do as photographs."""
    import torch
    from PIL import Image

    coarse = torch.rand(count, 3, size // 8, size // 8, generator=torch.Generator().manual_seed(0))
    images = torch.nn.functional.interpolate(coarse, (size, size), mode="bicubic").clamp(0, 1).mul(255).byte()
    (folder / "png").mkdir()
    with zipfile.ZipFile(folder / "jpg.zip", "w") as archive:
        for number, image in enumerate(images.permute(0, 2, 3, 1).contiguous().numpy()):
            Image.fromarray(image).save(folder / "png" / f"{number:06}.png")
            buffer = io.BytesIO()
            Image.fromarray(image).save(buffer, "JPEG")
            archive.writestr(f"{number:06}.jpg", buffer.getvalue())
    return {"folder of png": str(folder / "png"), "zip of jpg": str(folder / "jpg.zip")}


def data_in_training(settings: Settings) -> Race:
    from scalelong.data import load_data

    size = quick(STREAMED, settings)
    count = 64 if settings.quick else 2048
    folder = tempfile.mkdtemp(prefix="scalelong-bench-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["SCALELONG_CACHE"] = f"{folder}/cache"
    sources = write_sources(Path(folder), count, size.image)

    def make(source: str, workers: int = 0, **options: Any) -> Step:
        return training_step(**size.ours(), data=load_data(sources[source], channels=3, **options), workers=workers)

    few = {"memory_limit": 3 * count * size.image**2 - 1}  # one byte less than the pixels need
    steps: dict[str, Callable[[], Step]] = {"in memory": partial(make, "folder of png")}
    for name in sources:
        steps[f"{name}, image cache"] = partial(make, name, image_cache="auto", **few)
        for workers in (0, 1):
            steps[f"{name}, decoded each time, {workers} worker(s)"] = partial(make, name, workers, **few)
    return Race(f"Training on {count} images, {size}", steps, size.batch)


# All of them


def time_to_quality(settings: Settings, **task: Any) -> dict[str, Any]:
    from .quality import Task, quality

    return quality(Task(**task), 5, settings)


@dataclass(frozen=True)
class Benchmark:
    purpose: str
    cases: dict[str, tuple[Callable[[Settings], Race | dict[str, Any]], int]]
    """From a name to the function that makes the race, or measures by itself, and its rounds."""


BENCHMARKS = {
    "step": Benchmark(
        "a training step against the authors' code and diffusers' script",
        {
            "small": (partial(uvit_step, SMALL), 25),
            "s2-batch8": (partial(uvit_step, S2), 7),
            "s2-batch32": (partial(uvit_step, replace(S2, batch=32)), 3),
            "unet": (unet_step, 9),
            "demo": (partial(uvit_step, DEMO), 50),
            "digits": (partial(uvit_step, DIGITS), 50),
        },
    ),
    "optimizer": Benchmark(
        "Muon against AdamW in a training step",
        {
            **{f"width-{width}": (partial(muon_step, WIDE[width]), 9) for width in WIDE},
            "demo": (partial(muon_step, DEMO), 30),
        },
    ),
    "overhead": Benchmark(
        "what scaling the long skips costs, in time and memory",
        {
            "uvit-small": (partial(overhead, replace(SMALL, batch=16), {**METHODS, **TOKEN_GATES}), 60),
            "uvit-s2": (partial(overhead, replace(S2, batch=2), METHODS), 15),
            "unet": (partial(overhead, SMALL_UNET, METHODS), 60),
            "hunyuan": (overhead_attached, 30),
        },
    ),
    "quality": Benchmark(
        "time until the others' final held-out loss, and what each part gives; rounds are seeds",
        {
            "width-64": (partial(time_to_quality, dim=64, patch=4), 5),
            "width-128": (partial(time_to_quality, dim=128), 5),
            "width-256": (partial(time_to_quality, dim=256), 5),
            "unet": (partial(time_to_quality, model="unet"), 5),
        },
    ),
    "sampling": Benchmark(
        "images per second against diffusers' own pipeline",
        {
            "digits": (partial(sampling, "digits-class", "dpm++", 25), 9),
            "fashion": (partial(sampling, "fashion-class", "ddim", 25), 9),
        },
    ),
    "data": Benchmark(
        "training steps by source: in memory, from the image cache, decoded each time",
        {"training": (data_in_training, 9)},
    ),
    "attach": Benchmark(
        "finding the long skips of any network, and scaling them from outside",
        {
            "finding": (finding, 5),
            "scaling": (scaling_once, 2),
        },
    ),
}
