"""The benchmark's two forms differ only in the dtype of products."""

import optax
import pytest

from benchmarks import matmul_dtype, nets


@pytest.mark.slow
def test_forms_differ_in_their_products(monkeypatch):
  monkeypatch.setitem(nets.NETS, 'mini_resnet6', (4, optax.sgd))
  monkeypatch.setattr(nets, 'INPUT_SHAPE', (8, 8, 1))
  images, library = {}, nets.programs.library

  def recording(task, backend, num_images):
    (group,) = task.federation.groups
    images[group.model.matmul_dtype] = num_images
    return library(task, backend, num_images)

  monkeypatch.setattr(nets.programs, 'library', recording)
  row = matmul_dtype.measure_net('mini_resnet6', 2, 1)
  assert images == {'float32': 8, 'bfloat16': 8}
  times = row['float32, ms'] / row['bfloat16, ms']
  assert abs(row['times as fast'] / times - 1) < 1e-6
