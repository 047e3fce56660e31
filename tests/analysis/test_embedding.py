"""t-SNE of features, and pictures of points."""

import numpy as np
import pytest

from fedjax_het.analysis import pictures
from fedjax_het.analysis.embedding import tsne


def test_clusters_stay_clusters_and_seeds_repeat():
  rng = np.random.default_rng(0)
  features = np.repeat([[0.0] * 6, [9.0] * 6], 10, axis=0)
  features += rng.normal(size=features.shape)
  place = tsne(features, seed=1)  # Perplexity 30 is too much for 20 points.
  assert place.shape == (20, 2) and np.isfinite(place).all()
  distance = np.linalg.norm(place[:, None] - place, axis=-1)
  np.fill_diagonal(distance, np.inf)
  assert all(distance.argmin(axis=1) // 10 == np.arange(20) // 10)
  np.testing.assert_array_equal(tsne(features, seed=1), place)


@pytest.mark.parametrize(
    'features, message',
    [
        (np.zeros((3, 2)), 'at least 4 points'),
        (np.zeros(9), 'at least 4 points'),
        (np.full((9, 2), np.nan), 'finite'),
        (np.ones((9, 2)), 'all features are equal'),
    ],
)
def test_what_cannot_be_embedded_is_refused(features, message):
  with pytest.raises(ValueError, match=message):
    tsne(features)


def test_points_are_drawn(tmp_path):
  place = np.arange(6.0).reshape(3, 2)
  panels = {
      'by client': {'a': {'x': place, 'y': place + 1}},
      'by class': {'a': {'class 1': place, 'class 2': place + 1}},
  }
  path = pictures.draw_points(panels, tmp_path / 'a.png')
  assert path.stat().st_size > 1000
  with pytest.raises(ValueError, match='no point'):
    pictures.draw_points({'by client': {}}, path)
