"""Block-by-block inference equals the whole forward pass."""

import jax
import numpy as np
import pytest

from fedjax_het.depthwise import blockwise_logits
from tests.depthwise.nets import scale, small_data, small_preresnet


@pytest.mark.parametrize('norm', ['batch_only', 'batch'])
def test_equals_the_whole_forward_pass_batch_by_batch(norm, tmp_path):
  model = small_preresnet(norm=norm)
  variables = jax.device_get(model.init(jax.random.key(0)))
  images = np.asarray(small_data((11,)).images)
  got = blockwise_logits(
      model, variables, images, scale, batch_size=4, folder=tmp_path
  )
  assert got.shape == (11, 3) and got.dtype == np.float32
  assert not list(tmp_path.iterdir())  # Spilled activations are deleted.
  whole = jax.jit(lambda x: model.apply(variables, scale(x))[0])
  for start in (0, 4, 8):
    place = np.arange(start, start + 4) % 11  # The last batch is padded.
    want = whole(images[place])[: 11 - start]
    np.testing.assert_allclose(
        got[start : start + 4], want, rtol=1e-4, atol=1e-5
    )


def test_at_most_two_blocks_lie_on_disk(tmp_path):
  model = small_preresnet()
  variables = model.init(jax.random.key(0))
  seen = []

  def spy(images):
    return scale(images)

  images = np.asarray(small_data((5,)).images)
  real = np.lib.format.open_memmap

  def counting(path, *args):
    seen.append(sorted(p.name for p in path.parent.iterdir()))
    return real(path, *args)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(np.lib.format, 'open_memmap', counting)
    blockwise_logits(model, variables, images, spy, folder=tmp_path)
  assert seen == [[], *([f'{i}.npy'] for i in range(5))]


def test_refuses_nothing_to_do():
  model = small_preresnet()
  variables = model.init(jax.random.key(0))
  for num, size in ((0, 4), (3, 0)):
    images = np.zeros((num, 8, 8, 1), np.uint8)
    with pytest.raises(ValueError, match='needs at least one image and'):
      blockwise_logits(model, variables, images, batch_size=size)
