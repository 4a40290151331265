"""The figures of `scalelong theory`, drawn from the checks' numbers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import MissingDependencyError
from ..scaling.constant import ConstantScaling
from .checks import METHODS
from .features import check_features
from .gradients import check_gradients
from .inputs import expected_input_norm, sampled_statistics, second_moment
from .jacobian import jacobian_norm, noise_gain
from .network import GAINS, Equation3
from .robustness import robustness_bound

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(panels: int = 2) -> tuple["Figure", list[Any]]:
    """A figure without a window; `panels` axes side by side."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("matplotlib", "report", "drawing figures") from error
    figure = Figure(figsize=(4.4 * panels, 3.2), dpi=90, layout="constrained")
    return figure, [figure.add_subplot(1, panels, position + 1) for position in range(panels)]


def save(figure: "Figure", path: Path) -> Path:
    """Write a figure in one go, without the time of day, so that equal numbers give equal files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    figure.savefig(temporary, format=path.suffix[1:], metadata={"Software": None})
    temporary.replace(path)
    return path


def draw_features(count: int = 6, kappas: Sequence[float] = (1.0, 0.7, 0.5), seeds: int = 100) -> "Figure":
    """Theorem 3.1: E‖H_i‖²/‖x‖² of each block, exact (lines), measured (dots), and the paper's best fit (dashes)."""
    figure, axes = new_figure()
    for axis, initialisation in zip(axes, GAINS, strict=True):
        for kappa in kappas:
            curve = ConstantScaling(kappa).curve(count)
            table = check_features(curve, width=96, layers=2, initialisation=initialisation, seeds=seeds)
            line = axis.plot(table["i"], table["theory"], label=f"κ = {kappa:g}")[0]
            axis.plot(table["i"], table["measured"], "o", color=line.get_color())
            axis.plot(table["i"], table["paper"], "--", color=line.get_color(), alpha=0.6)
        axis.set(title=f"{initialisation} (g = {GAINS[initialisation]:g})", xlabel="i", yscale="log")
    axes[0].set_ylabel("E‖H_i‖² / ‖x‖²")
    axes[0].legend(title="line: exact\ndots: measured\ndashes: paper's form", fontsize=7, title_fontsize=7)
    return figure


def draw_inputs(data: Mapping[str, Tensor], schedule: Any = "ddpm") -> "Figure":
    """Figure 3 a and b: the distributions of ‖x_t‖²/m (Lemma 3.2 dashed) and of ‖ε‖²/‖x_t‖²."""
    figure, (norms, ratios) = new_figure()
    for name, images in data.items():
        sampled = sampled_statistics(images, schedule)
        _, _, bars = norms.hist(sampled.norm.tolist(), bins=60, density=True, alpha=0.5, label=name)
        color = bars[0].get_facecolor()
        norms.axvline(expected_input_norm(1, schedule, second_moment(images)), linestyle="--", color=color[:3])
        ratios.hist(sampled.ratio.clamp(max=6).tolist(), bins=60, density=True, alpha=0.5, label=name)
    norms.set(xlabel="‖x_t‖² / m", ylabel="density")
    ratios.set(xlabel="‖ε‖² / ‖x_t‖²", yscale="log")
    norms.legend(fontsize=7)
    return figure


def draw_gradients(count: int = 4, seeds: int = 100) -> "Figure":
    """Theorem 3.3: measured over theory for every matrix, for independent residuals and at the true loss."""
    figure, axes = new_figure()
    for axis, initialisation in zip(axes, GAINS, strict=True):
        for name, true_loss in (("independent residual", False), ("true loss", True)):
            table = check_gradients([1.0] * count, initialisation=initialisation, seeds=seeds, true_loss=true_loss)
            axis.plot(range(len(table)), table["ratio"], "o-", markersize=3, label=name)
            firsts = [place for place, matrix in enumerate(table["matrix"]) if matrix == 1]
        axis.set_xticks(firsts, [table["block"][place] for place in firsts], fontsize=7)
        axis.axhline(1, color="gray", linewidth=0.8)
        axis.set(title=f"{initialisation}, N = {count}, κ = 1", yscale="log")
    axes[0].set_ylabel("E‖∇W‖², measured / theory")
    axes[0].legend(fontsize=7)
    return figure


def draw_robustness(count: int = 6, layers: int = 2, width: int = 64) -> "Figure":
    """Theorem 3.4: the bound and the measured Jacobian norm of the same networks against κ, both relative to κ = 1."""
    figure, axes = new_figure()
    kappas = [0.1 * step for step in range(1, 11)]
    x = torch.randn(4, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for axis, initialisation in zip(axes, GAINS, strict=True):
        bounds, norms = [], []
        for kappa in kappas:
            generator = torch.Generator().manual_seed(1)
            network = Equation3.random(
                ConstantScaling(kappa).curve(count),
                width=width,
                layers=layers,
                initialisation=initialisation,
                generator=generator,
                dtype=torch.float64,
            )
            bounds.append(robustness_bound(network).product)
            norms.append(jacobian_norm(network, x))
        for label, values in (("Theorem 3.4, corrected", bounds), ("measured Jacobian norm", norms)):
            axis.plot(kappas, [value / values[-1] for value in values], "o-", markersize=3, label=label)
        title = f"{initialisation}, N = {count}, l = {layers}: bound / measured = {bounds[-1] / norms[-1]:.0e}"
        axis.set_title(title, fontsize=8)
        axis.set(xlabel="κ of CS", ylim=(0, None))
    axes[0].set_ylabel("relative to κ = 1")
    axes[0].legend(fontsize=7)
    return figure


def draw_noise(model: nn.Module, x: Tensor, t: Tensor) -> "Figure":
    """Figure 3 c, in gains: how much of the noise on its input a model passes on, under each method."""
    from ..skips import scale_skips_, unscale_

    figure, (axis,) = new_figure(1)
    sigmas = [0.01, 0.03, 0.1, 0.3, 1.0]
    for name, method in METHODS.items():
        if name != "none":
            scale_skips_(model, method, example_inputs=(x, t))
        gains = [noise_gain(model, x, t, sigma=sigma) for sigma in sigmas]
        axis.plot(sigmas, gains, "o-", markersize=3, label=name)
        if name != "none":
            unscale_(model)
    axis.set(xlabel="σ of the extra noise", ylabel="‖change of output‖ / ‖noise‖", xscale="log")
    axis.legend(fontsize=7)
    return figure
