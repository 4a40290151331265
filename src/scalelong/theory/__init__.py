"""Why: the paper's theory on the network of Eq. (3), in a form that can be run and checked.

equation3    Eq. (3) and its theorems: features (3.1), gradients (3.3), robustness (3.4)
kappa        how large the input is (Lemma 3.2), and the range of κ of Section 4.1
sensitivity  Jacobians, noise gains and sensitivities to skips, of any model
"""

from ..noise import alpha_bars as alpha_bars
from .equation3 import (
    Equation3 as Equation3,
    RandomLinear as RandomLinear,
    RobustnessBound as RobustnessBound,
    check_features as check_features,
    check_gradients as check_gradients,
    counterexample as counterexample,
    expected_feature_norms as expected_feature_norms,
    expected_gradient_norms as expected_gradient_norms,
    feature_rows as feature_rows,
    gradient_rows as gradient_rows,
    lipschitz_bound as lipschitz_bound,
    random_block as random_block,
    robustness_bound as robustness_bound,
    robustness_rows as robustness_rows,
)
from .kappa import (
    InputStatistics as InputStatistics,
    KappaRange as KappaRange,
    NoisyBatch as NoisyBatch,
    expected_input_norm as expected_input_norm,
    input_rows as input_rows,
    kappa_for_sum as kappa_for_sum,
    kappa_range as kappa_range,
    noisy_batch as noisy_batch,
    sampled_statistics as sampled_statistics,
    second_moment as second_moment,
)
from .sensitivity import (
    jacobian_norm as jacobian_norm,
    model_rows as model_rows,
    noise_gain as noise_gain,
    skip_sensitivities as skip_sensitivities,
)
