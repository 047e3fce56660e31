"""LPIPS with weights from a file, against the authors' formula in PyTorch."""

import numpy as np
import pytest

from fedjax_het.analysis import lpips

RNG = np.random.default_rng(0)


@pytest.fixture(scope='module')
def weights(tmp_path_factory):
  arrays = {}
  for i, (name, shape, _, _) in enumerate(lpips._LAYERS):
    fan_in = np.prod(shape[1:])
    arrays[f'{name}.weight'] = RNG.normal(size=shape) * (2 / fan_in) ** 0.5
    arrays[f'{name}.bias'] = 0.1 * RNG.normal(size=shape[0])
    arrays[f'lin{i}.model.1.weight'] = RNG.uniform(size=(1, shape[0], 1, 1))
  arrays = {name: value.astype(np.float32) for name, value in arrays.items()}
  path = tmp_path_factory.mktemp('lpips') / 'lpips.npz'
  np.savez(path, **arrays, **{'classifier.1.weight': np.zeros(3)})
  return path, arrays


def reference(arrays, images, others):
  torch = pytest.importorskip('torch')
  F = torch.nn.functional
  w = {name: torch.from_numpy(value) for name, value in arrays.items()}

  def features(x):
    x = torch.from_numpy(x).float().permute(0, 3, 1, 2) * 2 - 1
    shift = torch.tensor([-0.030, -0.088, -0.188])[:, None, None]
    x = (x - shift) / torch.tensor([0.458, 0.448, 0.450])[:, None, None]
    out = []
    for i, (n, stride, padding) in enumerate(
        [(0, 4, 2), (3, 1, 2), (6, 1, 1), (8, 1, 1), (10, 1, 1)]
    ):
      if i in (1, 2):
        x = F.max_pool2d(x, 3, 2)
      x = F.relu(F.conv2d(
          x, w[f'features.{n}.weight'], w[f'features.{n}.bias'], stride, padding
      ))  # fmt: skip
      out.append(x / (x.pow(2).sum(1, keepdim=True).sqrt() + 1e-10))
    return out

  return sum(
      F.conv2d((a - b) ** 2, w[f'lin{i}.model.1.weight']).mean((1, 2, 3))
      for i, (a, b) in enumerate(zip(features(images), features(others)))
  ).numpy()


@pytest.mark.slow  # It imports PyTorch.
def test_the_distance_is_that_of_the_formula(weights):
  path, arrays = weights
  measure = lpips.read_lpips(path)
  images = RNG.uniform(size=(2, 33, 40, 3)).astype(np.float32)
  others = RNG.uniform(size=images.shape).astype(np.float32)
  found = measure(images, others)
  want = reference(arrays, images, others)
  np.testing.assert_allclose(found, want, rtol=1e-4)
  assert np.all(found > 0)
  np.testing.assert_array_equal(measure(images, images), 0)
  # Small grey images are enlarged and repeated in three channels.
  grey = measure(images[:, :8, :8, :1], others[:, :8, :8, :1])
  assert grey.shape == (2,) and np.all(grey > 0)


def test_other_files_and_images_are_refused(weights, tmp_path):
  path, arrays = weights
  with pytest.raises(ValueError, match='two equal batches'):
    lpips.read_lpips(path)(np.zeros((1, 32, 32, 2)), np.zeros((1, 32, 32, 2)))
  with pytest.raises(FileNotFoundError):
    lpips.read_lpips(tmp_path / 'missing.npz')
  other = tmp_path / 'other.npz'
  for contents, message in (
      ({}, "no array 'features.0.weight' of LPIPS"),
      ({**arrays, 'features.0.bias': np.zeros(3)}, 'must have the shape'),
  ):
    np.savez(other, **contents)
    with pytest.raises(ValueError, match=message):
      lpips.read_lpips(other)
  other.write_text('weights')
  with pytest.raises(ValueError, match=r'is no \.npz file'):
    lpips.read_lpips(other)


def test_inputs_are_those_of_the_authors():
  """Pixels in [-1, 1], then shifted and scaled by channel."""
  images = np.full((1, 64, 64, 3), 0.75, np.float32)
  found = np.asarray(lpips._as_input(images))
  want = (0.5 - np.array([-0.030, -0.088, -0.188])) / [0.458, 0.448, 0.450]
  np.testing.assert_allclose(found, np.broadcast_to(want, found.shape), 1e-5)
