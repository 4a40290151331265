"""Why: the paper's theory on the network of Eq. (3), in a form that can be run and checked.

network      Eq. (3), and its random blocks
moments      how large inputs, features and gradients are (Theorem 3.1, Lemma 3.2, Theorem 3.3)
bounds       spectral norms, Lipschitz constants, robustness (Theorem 3.4)
sensitivity  Jacobians, noise gains and sensitivities to skips, of any model
checks       statements against measurements: the rows and figures of `scalelong theory`
"""

from ..noise import SCHEDULES, alpha_bars
from .bounds import (
    NoBoundError,
    RobustnessBound,
    bound_from_constants,
    convolution_bound,
    counterexample,
    gram_bound,
    linear_bound,
    lipschitz_bound,
    literal_bound,
    robustness_bound,
    spectral_norm,
)
from .moments import (
    InputStatistics,
    NoisyBatch,
    check_features,
    check_gradients,
    expected_feature_norms,
    expected_gradient_norms,
    expected_input_norm,
    fast_statistics,
    fit_paper_form,
    noisy_batch,
    paper_regressor,
    sample_feature_norms,
    sampled_statistics,
    second_moment,
)
from .network import Equation3, random_block
from .sensitivity import count_skips, jacobian_norm, noise_gain, skip_sensitivities
