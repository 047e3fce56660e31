"""Maps stored features to a model's inputs, depending on their type.

  uint8     pixels: `Normalise`, scaled by 255 and standardised per channel
  floats    `Standardise`, per channel or column
  bool      0 and 1 as float32
  integers  unchanged, such as token ids
"""

from collections.abc import Callable
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.data import arrays
from fedjax_het.data.federated import Normalise, check_scale, unchanged

# Number of examples whose statistics are computed at once.
_CHUNK = 2048


@dataclasses.dataclass(frozen=True)
class Standardise:
  """Maps float features to zero mean and unit variance on their last axis.

  Attributes:
    mean: Mean of each channel or column of the training features.
    std: Their standard deviations, above 0.
    augment: `(key, features) -> features`, applied when a key is given; None
      for no augmentation.
    augment_after: Like `augment`, for standardised features, with the same key.

  Raises:
    ValueError: If a number is out of its range.
  """

  mean: tuple[float, ...]
  std: tuple[float, ...]
  augment: Callable[..., jax.Array] | None = None
  augment_after: Callable[..., jax.Array] | None = None

  def __post_init__(self):
    check_scale(self.mean, self.std)

  def __call__(
      self, features: jax.Array, key: jax.Array | None = None
  ) -> jax.Array:
    """[B, ..., C] -> float32, augmented if there is a key."""
    if self.augment is not None and key is not None:
      features = self.augment(key, features)
    last = (1,) * (features.ndim - 1) + (-1,)
    mean, std = (
        np.asarray(values, np.float32).reshape(last)
        for values in (self.mean, self.std)
    )
    x = (features.astype(jnp.float32) - mean) / std
    if self.augment_after is not None and key is not None:
      x = self.augment_after(key, x)
    return x


def as_floats(features, key=None):
  """Bools as 0 and 1, float32."""
  del key
  return features.astype(jnp.float32)


def statistics(
    features: np.ndarray,
) -> tuple[tuple[float, ...], tuple[float, ...]]:
  """Mean and standard deviation of each channel or column.

  Args:
    features: [N, ..., C], or [N].

  Returns:
    C means and C standard deviations; uint8 features are first scaled to
    [0, 1]. The deviation of a constant column is 1. ((), ()) for integers and
    bools, which are not standardised.
  """
  channels = features.shape[-1] if features.ndim > 1 else 1
  if features.dtype == np.uint8:
    return _of_pixels(features, channels)
  if not jnp.issubdtype(features.dtype, np.floating):
    return (), ()
  rows = features.reshape(-1, channels)
  mean = _column_mean(rows, lambda part: part)
  variance = _column_mean(rows, lambda part: (part - mean) ** 2)
  std = np.sqrt(variance)
  # Rounding gives a constant column a deviation of about 1e-8 times its mean.
  std = np.where(std > 1e-7 * np.abs(mean), std, 1.0)
  return tuple(mean.tolist()), tuple(std.tolist())


def _column_mean(rows: np.ndarray, fn: Callable) -> np.ndarray:
  """Mean of `fn` over the rows, per column, in float64 and in chunks."""
  total = np.zeros(rows.shape[1])
  for start in range(0, len(rows), _CHUNK):
    part = rows[start : start + _CHUNK].astype(np.float64)
    total += fn(part).sum(axis=0)
  return total / len(rows)


def _of_pixels(images: np.ndarray, channels: int):
  """Per-channel mean and standard deviation in [0, 1], from histograms."""
  counts = np.zeros((channels, 256), np.int64)
  for start in range(0, len(images), _CHUNK):
    pixels = images[start : start + _CHUNK].reshape(-1, channels)
    for c in range(channels):
      counts[c] += np.bincount(pixels[:, c], minlength=256)
  values = np.arange(256) / 255
  share = counts / counts.sum(axis=1, keepdims=True)
  mean = share @ values
  variance = (share * (values - mean[:, None]) ** 2).sum(axis=1)
  std = np.sqrt(np.where(variance > 0, variance, 1.0))
  return tuple(mean.tolist()), tuple(std.tolist())


def make_preprocess(
    features: np.ndarray | jax.Array,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
    augment: Callable[..., jax.Array] | None = None,
    augment_after: Callable[..., jax.Array] | None = None,
) -> Callable[..., jax.Array]:
  """The function that maps stored features to inputs, for `federate`.

  Args:
    features: [N, ...], the training features.
    mean: Their `statistics`; None to compute both.
    std: See `mean`.
    augment: Augmentation of uint8 or float features as they are stored, see
      `Standardise`.
    augment_after: Augmentation of standardised features.

  Returns:
    `(features, key or None) -> inputs`; see the module docstring.

  Raises:
    ValueError: If there is no example, features are not numbers, a mean is not
      finite, or a deviation is not above 0.
  """
  features = np.asarray(features)
  arrays.check_numbers(features, 'features')
  if not features.size:
    raise ValueError(f'features are empty, of shape {features.shape}.')
  if mean is None or std is None:
    mean, std = statistics(features)
  if features.dtype == np.uint8:
    return Normalise(mean, std, augment, augment_after)
  if jnp.issubdtype(features.dtype, np.floating):
    return Standardise(mean, std, augment, augment_after)
  return as_floats if features.dtype == np.bool_ else unchanged
