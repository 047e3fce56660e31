"""Embedding of features in two dimensions by t-SNE.

References:
  van der Maaten and Hinton, `Visualizing Data using t-SNE
  <https://www.jmlr.org/papers/v9/vandermaaten08a.html>`_, JMLR 9, 2008.
"""

import numpy as np

from fedjax_het.options import positive


def tsne(features, *, perplexity: float = 30.0, seed: int = 0) -> np.ndarray:
  """Embeds features in the plane, initialised by their principal components.

  Args:
    features: [n, d] with n >= 4.
    perplexity: Effective number of neighbours of a point, clipped to (n - 1) /
      3, as the method's paper advises.
    seed: Seed of the optimisation.

  Returns:
    [n, 2] float32. Axes, sizes of clusters and distances between them have no
    meaning.

  Raises:
    ValueError: If the shape is wrong, a feature is not finite, all points are
      equal, or the perplexity is not above 0.
  """
  from sklearn.manifold import TSNE

  positive(perplexity=perplexity)
  features = np.asarray(features, np.float32)
  if features.ndim != 2 or len(features) < 4:
    raise ValueError(
        't-SNE needs features [n, d] of at least 4 points, got shape '
        f'{features.shape}.'
    )
  if not np.isfinite(features).all():
    raise ValueError('t-SNE needs finite features; some are NaN or infinite.')
  if np.all(features == features[0]):  # scikit-learn would end the process.
    raise ValueError('t-SNE needs points that differ; all features are equal.')
  perplexity = min(perplexity, (len(features) - 1) / 3)
  init = 'pca' if features.shape[1] > 1 else 'random'
  embed = TSNE(perplexity=perplexity, init=init, random_state=seed)
  return embed.fit_transform(features)
