"""The checks of `scalelong lab theory`: each compares a statement with a measurement and returns rows of numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..attaching import scale_skips_, unscale_
from ..scaling import ConstantScaling, FixedScaling, NoScaling, UniformScaling
from .bounds import robustness_bound
from .kappa import PAPER_SECOND_MOMENT, expected_input_norm, quantile, sampled_statistics, second_moment
from .moments import check_features, check_gradients
from .network import GAINS, Equation3
from .sensitivity import jacobian_norm, noise_gain, skip_sensitivities

Row = dict[str, Any]

# N, m, l, κ
FEATURE_SETTINGS = ((4, 128, 2, 1.0), (4, 128, 2, 0.7), (4, 128, 2, 0.5), (3, 256, 3, 0.9), (8, 128, 1, 1.0))
GRADIENT_SETTINGS = ((4, 128, 2, 1.0), (4, 128, 2, 0.7), (3, 128, 1, 0.9))
COMPARED: Mapping[str, FixedScaling] = {"none": NoScaling(), "1/√2": UniformScaling(), "CS(0.7)": ConstantScaling(0.7)}


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
    """Lemma 3.2 and Figure 3 a, b: ‖x_t‖²/m and the mean and 97 % quantile of ‖ε‖²/‖x_t‖²."""
    rows = []
    for name, images in data.items():
        s = second_moment(images)
        sampled = sampled_statistics(images, schedule, draws)
        rows.append(
            {
                "data": name,
                "s": round(s, 3),
                "‖x_t‖²/m": round(float(sampled.norm.mean()), 4),
                "lemma": round(expected_input_norm(1, schedule, s), 4),
                "paper": round(expected_input_norm(1, schedule, PAPER_SECOND_MOMENT), 4),
                "ratio": round(float(sampled.ratio.mean()), 3),
                "q97": round(quantile(sampled.ratio), 3),
            }
        )
    return rows


def robustness_rows(sizes: Sequence[tuple[int, int]] = ((3, 1), (6, 2)), width: int = 64, seed: int = 0) -> list[Row]:
    """Theorem 3.4: both bounds, the measured Jacobian norm (largest of 8 places) and the gain of noise."""
    rows = []
    for count, layers in sizes:
        for name, method in COMPARED.items():
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
    for name, method in COMPARED.items():
        weights = skip_sensitivities(model, x, t, scaling=method)
        if not isinstance(method, NoScaling):
            scale_skips_(model, method, example_inputs=(x, t))
        row: Row = {"κ_i": name, "Jacobian": jacobian_norm(model, x, t)}
        row |= {f"gain σ={sigma:g}": noise_gain(model, x, t, sigma=sigma) for sigma in sigmas}
        rows.append(row | {f"w_{j}/w_1": weight / weights[0] for j, weight in enumerate(weights, start=1)})
        if not isinstance(method, NoScaling):
            unscale_(model)
    return rows
