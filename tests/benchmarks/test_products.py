"""The benchmark's two forms differ in their products alone."""

from benchmarks import lowerings, products


def test_forms_differ_in_their_products(monkeypatch):
  monkeypatch.setitem(products.NETS, 'mini_resnet6', (4, lowerings.optax.sgd))
  monkeypatch.setattr(products, 'INPUT_SHAPE', (8, 8, 1))
  texts, library = {}, products.programs.library

  def recording(task, backend, num_images):
    (group,) = task.federation.groups
    texts[group.model.products] = num_images
    return library(task, backend, num_images)

  monkeypatch.setattr(products.programs, 'library', recording)
  row = products.measure_net('mini_resnet6', 2, 1)
  assert texts == {'float32': 8, 'bfloat16': 8}
  times = row['float32, ms'] / row['bfloat16, ms']
  assert abs(row['times as fast'] / times - 1) < 1e-6
