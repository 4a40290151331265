"""Why: the paper's theory on the network of Eq. (3), in a form that can be run and checked."""

from .features import check_features, expected_feature_norms, fit_paper_form, paper_regressor, sample_feature_norms
from .gradients import check_gradients, expected_gradient_norms
from .inputs import (
    InputStatistics,
    NoisyBatch,
    expected_input_norm,
    fast_statistics,
    noisy_batch,
    sampled_statistics,
    second_moment,
)
from .jacobian import jacobian_norm, noise_gain
from .lipschitz import NoBoundError, lipschitz_bound
from .network import Equation3, random_block
from .robustness import (
    RobustnessBound,
    bound_from_constants,
    counterexample,
    literal_bound,
    robustness_bound,
)
from .schedules import SCHEDULES, alpha_bars
from .sensitivity import count_skips, skip_sensitivities
from .spectral import convolution_bound, gram_bound, linear_bound, spectral_norm

__all__ = [
    "SCHEDULES",
    "Equation3",
    "InputStatistics",
    "NoBoundError",
    "NoisyBatch",
    "RobustnessBound",
    "alpha_bars",
    "bound_from_constants",
    "check_features",
    "check_gradients",
    "convolution_bound",
    "count_skips",
    "counterexample",
    "expected_feature_norms",
    "expected_gradient_norms",
    "expected_input_norm",
    "fast_statistics",
    "fit_paper_form",
    "gram_bound",
    "jacobian_norm",
    "linear_bound",
    "lipschitz_bound",
    "literal_bound",
    "noise_gain",
    "noisy_batch",
    "paper_regressor",
    "random_block",
    "robustness_bound",
    "sample_feature_norms",
    "sampled_statistics",
    "second_moment",
    "skip_sensitivities",
    "spectral_norm",
]
