"""Noise on shared features, clipping, and the Gaussian mechanism."""

from fedjax_het.privacy.accounting import gaussian_epsilon, run_epsilon
from fedjax_het.privacy.features import add_feature_noise, clip_features
from fedjax_het.privacy.gaussian import (
    analytic_gaussian_sigma,
    gaussian_delta,
    gaussian_sigma,
)

__all__ = [
    'add_feature_noise',
    'analytic_gaussian_sigma',
    'clip_features',
    'gaussian_delta',
    'gaussian_epsilon',
    'gaussian_sigma',
    'run_epsilon',
]
