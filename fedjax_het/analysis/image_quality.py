"""Quality of reconstructed images: PSNR and SSIM.

References:
  Wang, Bovik, Sheikh, Simoncelli, `Image Quality Assessment: From Error
  Visibility to Structural Similarity <https://doi.org/10.1109/TIP.2003.819861>`_,
  IEEE Transactions on Image Processing 13(4), 2004.
"""

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

# Wang et al.: side and deviation of the window, K_1 and K_2.
_SIDE, _SIGMA, _K1, _K2 = 11, 1.5, 0.01, 0.03


def psnr(images, others) -> np.ndarray:
  """Peak signal-to-noise ratio of each image.

  Args:
    images: [N, H, W, C] in [0, 1].
    others: The images to compare with, of the same shape.

  Returns:
    [N] float64, -10 log10 of the mean squared error, in dB; infinite for equal
    images.

  Raises:
    ValueError: If the shapes are wrong.
  """
  images, others = _pair(images, others)
  error = np.mean((images - others) ** 2, axis=(1, 2, 3))
  with np.errstate(divide='ignore'):
    return -10 * np.log10(error)


def ssim(images, others) -> np.ndarray:
  """Structural similarity of each image.

  The window is Gaussian, 11 pixels wide with a standard deviation of 1.5, and
  always lies inside the image, as in the authors' program. In a smaller image
  the window has the largest odd side that fits.

  Args:
    images: [N, H, W, C] in [0, 1].
    others: The images to compare with, of the same shape.

  Returns:
    [N] float64 in [-1, 1], the mean over positions and channels; 1 for equal
    images.

  Raises:
    ValueError: If the shapes are wrong.
  """
  x, y = _pair(images, others)
  shortest = min(x.shape[1:3])
  window = _window(min(_SIDE, shortest - 1 + shortest % 2))

  def local_mean(values):
    return _correlate(values, window)

  mean_x, mean_y = local_mean(x), local_mean(y)
  var_x = local_mean(x * x) - mean_x**2
  var_y = local_mean(y * y) - mean_y**2
  cov = local_mean(x * y) - mean_x * mean_y
  c1, c2 = _K1**2, _K2**2  # The range L of the pixels is 1.
  # Eq. 13: (2 mu_x mu_y + C_1) (2 sigma_xy + C_2)
  #   / ((mu_x^2 + mu_y^2 + C_1) (sigma_x^2 + sigma_y^2 + C_2)).
  similarity = (2 * mean_x * mean_y + c1) * (2 * cov + c2)
  similarity /= (mean_x**2 + mean_y**2 + c1) * (var_x + var_y + c2)
  return similarity.mean(axis=(1, 2, 3))


def _window(side):
  """[side] Gaussian weights with sum 1."""
  offset = np.arange(side) - side // 2
  weights = np.exp(-(offset**2) / (2 * _SIGMA**2))
  return weights / weights.sum()


def _correlate(images, window):
  """Applies the window along both image axes, without padding."""
  for axis in (1, 2):
    images = sliding_window_view(images, len(window), axis=axis) @ window
  return images


def _pair(images, others):
  images = np.asarray(images, np.float64)
  others = np.asarray(others, np.float64)
  if images.ndim != 4 or not images.size or images.shape != others.shape:
    raise ValueError(
        'Images must be two equal batches [N, H, W, C], got shapes '
        f'{images.shape} and {others.shape}.'
    )
  return images, others
