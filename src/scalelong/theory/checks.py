"""The checks of `scalelong theory`: each compares a statement with a measurement and returns rows of numbers."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..files import write_bytes
from ..optional import needs
from ..scaling.constant import ConstantScaling, FixedScaling, NoScaling, UniformScaling
from ..skips import scale_skips_, unscale_
from .bounds import robustness_bound
from .moments import (
    PAPER_SECOND_MOMENT,
    check_features,
    check_gradients,
    expected_input_norm,
    fast_statistics,
    sampled_statistics,
    second_moment,
)
from .network import GAINS, Equation3
from .sensitivity import jacobian_norm, noise_gain, skip_sensitivities

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Row = dict[str, Any]

# N, m, l, κ
FEATURE_SETTINGS = ((4, 128, 2, 1.0), (4, 128, 2, 0.7), (4, 128, 2, 0.5), (3, 256, 3, 0.9), (8, 128, 1, 1.0))
GRADIENT_SETTINGS = ((4, 128, 2, 1.0), (4, 128, 2, 0.7), (3, 128, 1, 0.9))
METHODS: Mapping[str, FixedScaling] = {"none": NoScaling(), "1/√2": UniformScaling(), "CS(0.7)": ConstantScaling(0.7)}
TAIL = 0.97


def feature_rows(seeds: int = 300) -> list[Row]:
    """Theorem 3.1: measured over exact theory for the H_i that fits worst, and R² of the paper's form."""
    rows = []
    for count, width, layers, kappa in FEATURE_SETTINGS:
        for initialisation in GAINS:
            table = check_features(
                ConstantScaling(kappa).curve(count),
                width=width,
                layers=layers,
                initialisation=initialisation,
                seeds=seeds,
            )
            column = {name: table[name].tolist() for name in table.columns}
            worst = max(column["ratio"], key=lambda ratio: abs(ratio - 1))
            rows.append(
                {
                    "N": count,
                    "m": width,
                    "l": layers,
                    "κ": kappa,
                    "init": initialisation,
                    "theory H_1": column["theory"][0],
                    "measured H_1": column["measured"][0],
                    "worst ratio": round(worst, 4),
                    "std. error": round(max(column["standard_error"]), 4),
                    "paper's R²": round(column["paper_r2"][0], 3),
                }
            )
    return rows


def gradient_rows(seeds: int = 300) -> list[Row]:
    """Theorem 3.3: smallest and largest ratio over all matrices, for independent residuals and at the true loss."""
    rows = []
    for count, width, layers, kappa in GRADIENT_SETTINGS:
        for initialisation in GAINS:
            row: Row = {"N": count, "m": width, "l": layers, "κ": kappa, "init": initialisation}
            for name, true_loss in (("independent", False), ("true loss", True)):
                table = check_gradients(
                    ConstantScaling(kappa).curve(count),
                    width=width,
                    layers=layers,
                    initialisation=initialisation,
                    seeds=seeds,
                    true_loss=true_loss,
                )
                row[name] = f"{min(table['ratio']):.2f} to {max(table['ratio']):.2f}"
            rows.append(row)
    return rows


def input_rows(data: Mapping[str, Tensor], schedule: Any = "ddpm", draws: int = 8) -> list[Row]:
    """Lemma 3.2 and Figure 3 a, b: ‖x_t‖²/m and the mean and 97 % quantile of ‖ε‖²/‖x_t‖², sampled and by formula."""
    rows = []
    for name, images in data.items():
        s = second_moment(images)
        sampled, fast = sampled_statistics(images, schedule, draws), fast_statistics(images, schedule)
        rows.append(
            {
                "data": name,
                "s": round(s, 3),
                "‖x_t‖²/m": round(float(sampled.norm.mean()), 4),
                "lemma": round(expected_input_norm(1, schedule, s), 4),
                "paper": round(expected_input_norm(1, schedule, PAPER_SECOND_MOMENT), 4),
                "ratio": round(float(sampled.ratio.mean()), 3),
                "formula": round(float(fast.ratio.mean()), 3),
                "q97": round(quantile(sampled.ratio, TAIL), 3),
                "formula q97": round(quantile(fast.ratio, TAIL), 3),
            }
        )
    return rows


def robustness_rows(sizes: Sequence[tuple[int, int]] = ((3, 1), (6, 2)), width: int = 64, seed: int = 0) -> list[Row]:
    """Theorem 3.4: both bounds beside the measured Jacobian norm (largest of 8 places) and the gain of noise."""
    rows = []
    for count, layers in sizes:
        for name, method in METHODS.items():
            network = Equation3.random(
                method.curve(count),
                width=width,
                layers=layers,
                generator=torch.Generator().manual_seed(seed),
                dtype=torch.float64,
            )
            x = torch.randn(8, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 1))
            bound, measured = robustness_bound(network), jacobian_norm(network, x)
            rows.append(
                {
                    "N": count,
                    "l": layers,
                    "κ_i": name,
                    "product bound": bound.product,
                    "recursion": bound.recursion,
                    "measured": measured,
                    "bound/measured": bound.product / measured,
                    "noise gain": noise_gain(network, x, sigma=0.1),
                }
            )
    return rows


def model_rows(model: nn.Module, x: Tensor, t: Tensor, sigmas: Sequence[float] = (0.05, 0.2)) -> list[Row]:
    """A real model under each method: Jacobian norm, gain of input noise (Figure 3 c), and w_j/w_1 of each skip."""
    rows = []
    for name, method in METHODS.items():
        weights = skip_sensitivities(model, x, t, scaling=method)
        if not isinstance(method, NoScaling):
            scale_skips_(model, method, example_inputs=(x, t))
        row: Row = {"κ_i": name, "Jacobian": jacobian_norm(model, x, t)}
        row |= {f"gain σ={sigma:g}": noise_gain(model, x, t, sigma=sigma) for sigma in sigmas}
        rows.append(row | {f"w_{j}/w_1": weight / weights[0] for j, weight in enumerate(weights, start=1)})
        if not isinstance(method, NoScaling):
            unscale_(model)
    return rows


def quantile(values: Tensor, share: float) -> float:
    """torch.quantile without its limit on the number of values."""
    return float(values.kthvalue(max(1, round(share * len(values)))).values)


# The figures of `scalelong theory`, drawn from the checks' numbers.


def new_figure(panels: int = 2) -> tuple["Figure", list[Any]]:
    """A figure without a window; `panels` axes side by side."""
    figure = needs("matplotlib.figure", "report", "drawing figures").Figure(
        figsize=(4.4 * panels, 3.2), dpi=90, layout="constrained"
    )
    return figure, [figure.add_subplot(1, panels, position + 1) for position in range(panels)]


def save(figure: "Figure", path: Path) -> Path:
    """Write a figure in one go, without the time of day, so that equal numbers give equal files."""
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix[1:], metadata={"Software": None})
    write_bytes(path, content.getvalue())
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
