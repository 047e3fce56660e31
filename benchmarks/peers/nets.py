"""Networks of published programs, for the library and as lists of layers.

`fedavg_cnn` is PFLlib's and HtFLlib's `FedAvgCNN`. `layers_of` describes the
networks as lists from which programs without this library build them (see
`torch_nets` and `with_fedjax`). A layer is (kind, numbers), of the kinds

  conv, features, kernel   convolution without padding, ReLU
  pool                     2x2 max-pool
  dropout, probability
  dense, features          flatten, linear, ReLU
  head, classes            flatten, linear
  resnet, blocks, classes, width   FedIN's ResNet with the ImageNet stem
"""

from fedjax_het.models import BlockModel, layers
from fedjax_het.models.blocks import Block
from fedjax_het.models.resnet import NUM_BLOCKS
from fedjax_het.models.simple_cnn import ConvUnit, Hidden

FEDAVG_CNN = 'benchmarks.peers.nets:fedavg_cnn'
_CHANNELS = (32, 64, 512)
_LAYERS = {
    'dropout_cnn': (
        ('conv', 32, 3), ('conv', 64, 3), ('pool',), ('dropout', 0.25),
        ('dense', 128), ('dropout', 0.5),
    ),
    FEDAVG_CNN: (
        ('conv', _CHANNELS[0], 5), ('pool',), ('conv', _CHANNELS[1], 5),
        ('pool',), ('dense', _CHANNELS[2]),
    ),
    'simple_cnn': (
        ('conv', 6, 5), ('pool',), ('conv', 16, 5), ('pool',), ('dense', 120),
        ('dense', 84),
    ),
}  # fmt: skip


def fedavg_cnn(
    input_shape: tuple[int, int, int], num_classes: int, *, width: float = 1.0
) -> BlockModel:
  """Two 5x5 convolutions (32, 64) and a hidden layer (512).

  It has 878,538 parameters for 32x32x3 inputs and ten classes.

  Args:
    input_shape: (height, width, channels) of one example, at least 16x16.
    num_classes: C.
    width: Multiplies channels and hidden units.

  Returns:
    A `BlockModel`.
  """
  sizes = [layers.scale_channels(n, width) for n in _CHANNELS]
  blocks = (
      Block('conv1', ConvUnit(sizes[0])),
      Block('conv2', ConvUnit(sizes[1])),
      Block('hidden', Hidden(sizes[2])),
      Block(
          'head',
          layers.Linear(num_classes, kernel_init=layers.INITS['torch'].head),
      ),
  )
  return BlockModel('fedavg_cnn', blocks, input_shape, num_classes, (1, 3))


def layers_of(
    name: str, num_classes: int, width: float
) -> list[tuple[object, ...]]:
  """The layers of a network, see the module docstring.

  Args:
    name: A model of `tasks.WORKS`.
    num_classes: C.
    width: Multiplies channels and hidden units.

  Returns:
    The list, which JSON can hold.
  """
  if name not in _LAYERS:
    blocks = NUM_BLOCKS[int(name.removeprefix('resnet'))]
    return [('resnet', blocks, num_classes, width)]

  def scaled(kind, *numbers):
    if kind in ('conv', 'dense'):
      numbers = (layers.scale_channels(numbers[0], width), *numbers[1:])
    return kind, *numbers

  return [*(scaled(*layer) for layer in _LAYERS[name]), ('head', num_classes)]
