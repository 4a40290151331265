"""Why: the paper's theory on the network of Eq. (3), in a form that can be run and checked.

network      Eq. (3), and its random blocks
moments      how large features and gradients are (Theorem 3.1, Theorem 3.3)
bounds       robustness (Theorem 3.4)
kappa        how large the input is (Lemma 3.2), and the range of κ of Section 4.1
sensitivity  Jacobians, noise gains and sensitivities to skips, of any model
checks       statements against measurements: the rows of `scalelong lab theory`
"""

from ..noise import (
    alpha_bars as alpha_bars,
)
from .bounds import (
    NoBoundError as NoBoundError,
    RobustnessBound as RobustnessBound,
    bound_from_constants as bound_from_constants,
    counterexample as counterexample,
    lipschitz_bound as lipschitz_bound,
    robustness_bound as robustness_bound,
)
from .kappa import (
    InputStatistics as InputStatistics,
    KappaRange as KappaRange,
    NoisyBatch as NoisyBatch,
    expected_input_norm as expected_input_norm,
    kappa_for_sum as kappa_for_sum,
    kappa_range as kappa_range,
    noisy_batch as noisy_batch,
    sampled_statistics as sampled_statistics,
    second_moment as second_moment,
)
from .moments import (
    check_features as check_features,
    check_gradients as check_gradients,
    expected_feature_norms as expected_feature_norms,
    expected_gradient_norms as expected_gradient_norms,
    fit_paper_form as fit_paper_form,
)
from .network import (
    Equation3 as Equation3,
    random_block as random_block,
)
from .sensitivity import (
    jacobian_norm as jacobian_norm,
    noise_gain as noise_gain,
    skip_sensitivities as skip_sensitivities,
)
