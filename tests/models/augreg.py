"""Files of a narrow ViT in the layout of the AugReg checkpoints."""

import numpy as np

DIM, HEADS, PATCH = 64, 1, 4


def augreg(depth=3, channels=3, patches=4, seed=0):
  """Leaves of a ViT with one head, by their published names."""
  rng = np.random.default_rng(seed)
  leaves = {
      'cls': (1, 1, DIM),
      'embedding/kernel': (PATCH, PATCH, channels, DIM),
      'embedding/bias': (DIM,),
      'Transformer/posembed_input/pos_embedding': (1, 1 + patches, DIM),
      'Transformer/encoder_norm/scale': (DIM,),
      'Transformer/encoder_norm/bias': (DIM,),
      'head/kernel': (DIM, 1000),
      'head/bias': (1000,),
  }
  for i in range(depth):
    block = f'Transformer/encoderblock_{i}'
    attention = f'{block}/MultiHeadDotProductAttention_1'
    leaves |= {
        f'{block}/LayerNorm_0/scale': (DIM,),
        f'{block}/LayerNorm_0/bias': (DIM,),
        f'{block}/LayerNorm_2/scale': (DIM,),
        f'{block}/LayerNorm_2/bias': (DIM,),
        f'{block}/MlpBlock_3/Dense_0/kernel': (DIM, 4 * DIM),
        f'{block}/MlpBlock_3/Dense_0/bias': (4 * DIM,),
        f'{block}/MlpBlock_3/Dense_1/kernel': (4 * DIM, DIM),
        f'{block}/MlpBlock_3/Dense_1/bias': (DIM,),
        f'{attention}/out/kernel': (HEADS, DIM // HEADS, DIM),
        f'{attention}/out/bias': (DIM,),
    }
    for name in ('query', 'key', 'value'):
      leaves[f'{attention}/{name}/kernel'] = (DIM, HEADS, DIM // HEADS)
      leaves[f'{attention}/{name}/bias'] = (HEADS, DIM // HEADS)
  return {
      name: (0.2 * rng.normal(size=shape)).astype(np.float32)
      for name, shape in leaves.items()
  }


def save(path, **kwargs):
  leaves = augreg(**kwargs)
  np.savez(path, **leaves)
  return leaves
