"""κ after training, for a run: `scalelong.tune_skips` with its sampler, and the Fréchet distance as the score.

    found = tune_run(load_run("runs/x"), settings=SampleSettings(steps=10))
    found.save("tuned.json")                             # scalelong sample runs/x --tuned tuned.json

The search compares samples with one half of the real images and the test with the other half, so that what was found
fits neither the seeds nor the images of the test.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from ..attaching import BLOCKS, TunedSkips, host_of, tune_skips
from ..diffusion import SampleSettings, requests
from ..errors import InvalidConfigError
from ..evaluation import (
    Moments,
    default_device,
    evaluation_prompts,
    features_of,
    frechet_distance,
    reference_data,
    trusted_features,
)
from ..runs import Run, example_forward, require_constant


def tune_run(
    run: Run,
    *,
    settings: SampleSettings,
    n: int = 512,
    seed: int = 0,
    features: str = "auto",
    feature_weights: str | Path | None = None,
    batch_size: int = 64,
    device: torch.device | str | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> TunedSkips:
    """Search on the seeds from `seed` to `seed + n`, test on eight blocks of n/2 after them.

    device: where to sample and to score (default: the accelerator, if there is one).
    """
    require_constant(run.config.scaling)
    if n < 16:
        raise InvalidConfigError(f"a Fréchet distance needs images: `n` must be at least 16, got {n}")
    data = reference_data(run.config)
    extractor, reference = trusted_features(features, data, feature_weights, device)
    halves = [Moments.of(reference.features[part::2]) for part in (0, 1)]
    wanted = requests(n + BLOCKS * (n // 2), seed, evaluation_prompts(run.config, data, n)[0])
    maker, device = run.maker, device or default_device()

    def sampler(_: nn.Module, seeds: Sequence[int]) -> Tensor:
        part = [wanted[number - seed] for number in seeds]
        try:
            return maker.all(part, settings, batch_size=batch_size, device=device)
        except InvalidConfigError:  # images that are not finite
            return torch.empty(0)

    def against(real: Moments) -> Callable[[Tensor], float]:
        def score(images: Tensor) -> float:
            if not len(images):
                return float("inf")
            return frechet_distance(real, Moments.of(features_of(extractor, images)))

        return score

    example = None if host_of(run.model).is_native else example_forward(run.model, run.config, run.shape)
    found = tune_skips(
        run.model,
        sampler,
        against(halves[0]),
        example,
        seeds=range(seed, seed + n),
        test_score=against(halves[1]),
        progress=progress,
    )
    about = {
        "run": run.folder.name,
        "step": run.step,
        "weights": run.weights,
        "weights_sha256": run.weights_sha256,
        "settings": asdict(settings),
        "features": extractor.name,
        "data": data.name,
        "seed": seed,
    }
    return replace(found, about=about)
