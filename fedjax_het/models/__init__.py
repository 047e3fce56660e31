"""Models as trunks of named blocks with heads, one file per family.

`MODELS` maps a name to a constructor, called as
`MODELS[name](input_shape, num_classes, **options)`; `create` does the same
and checks its arguments. A name with a colon, such as 'my_file:net', imports a
user's constructor, which may also return a linen module. In every model, the
block before the classifier outputs a vector (global mean, flattened features or
class token), so that s_out is [B, D].
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import typing
from typing import Any

import flax.linen as nn

from fedjax_het.kernels import libraries
from fedjax_het.kernels.matmul_dtype import MATMUL_DTYPES
from fedjax_het.models import adapt, by_path
from fedjax_het.models.blocks import Block, BlockModel, Head, Variables
from fedjax_het.models.fedhe_cnn import fedhe_cnn
from fedjax_het.models.fedin_v1 import fedin_v1
from fedjax_het.models.mlp import mlp
from fedjax_het.models.preresnet import preresnet20
from fedjax_het.models.resnet import mini_resnet, resnet, resnet14_mnist
from fedjax_het.models.simple_cnn import dropout_cnn, simple_cnn
from fedjax_het.models.text import text
from fedjax_het.models.vit import vit
from fedjax_het.names import check_name
from fedjax_het.options import (
  at_least,
  check_call,
  is_integer,
  keyword_options,
  one_of,
)

_with = functools.partial

MODELS: dict[str, Callable[..., BlockModel]] = {
    **{
        f'resnet{n}': _with(resnet, depth=n)
        for n in (10, 14, 18, 22, 26, 50, 101, 152)
    },
    **{f'fedin_{v}': _with(fedin_v1, variant=v) for v in 'abcde'},
    **{
        f'vit_s{n}': _with(vit, depth=n, variant='s') for n in range(8, 13)
    },
    'vit_t16': _with(vit, depth=12, variant='t'),
    'mini_vit4': _with(vit, depth=4, variant='mini'),
    **{f'fedhe_cnn{i}': _with(fedhe_cnn, variant=i) for i in range(10)},
    **{f'mini_resnet{n}': _with(mini_resnet, depth=n) for n in (6, 8, 10)},
    'preresnet20': preresnet20,
    'resnet14_mnist': resnet14_mnist,
    'simple_cnn': simple_cnn,
    'dropout_cnn': dropout_cnn,
    'mlp': mlp,
    'text': text,
}


def constructor(name: str) -> Callable[..., BlockModel]:
  """The constructor of a model.

  Args:
    name: A key of `MODELS`, or an import path, see `by_path.find`.

  Returns:
    The function.

  Raises:
    ValueError: If the name is unknown, or cannot be imported.
  """
  if by_path.is_path(name):
    return by_path.find(name)
  check_name('model', name, MODELS)
  return MODELS[name]


def model_options(name: str) -> dict[str, object]:
  """Options that a model accepts, with their defaults.

  Args:
    name: See `constructor`.

  Returns:
    {option: default}.

  Raises:
    ValueError: For an unknown name.
  """
  known = keyword_options(constructor(name))
  return {option: default for option, (_, default) in known.items()}


def _check_shape(name: str, shape: tuple[int, ...]) -> None:
  """Raises ValueError for a shape that a model cannot take."""
  # Constructors of image models annotate `input_shape` as three integers.
  build = constructor(name)
  hint = typing.get_type_hints(getattr(build, 'func', build)).get('input_shape')
  of_images = hint == tuple[int, int, int]
  wanted = 'positive integers'
  if of_images:
    wanted = '(height, width, channels), three positive integers'
  positive = all(is_integer(n) and n > 0 for n in shape)
  if not positive or (of_images and len(shape) != 3):
    hint = '; tables need dense nets, such as mlp' if len(shape) == 1 else ''
    raise ValueError(
        f'input_shape of model {name!r} must be {wanted}, got {shape}{hint}.'
    )


def create(
    name: str,
    input_shape: Sequence[int],
    num_classes: int,
    *,
    matmul_dtype: str = 'float32',
    conv_backend: str = 'xla',
    **options: Any,
) -> BlockModel:
  """Builds a model by name.

  Args:
    name: See `constructor`.
    input_shape: Shape of one example: (height, width, channels), or any rank
      for the models that flatten it (`mlp`, `text`).
    num_classes: C.
    matmul_dtype: 'bfloat16' rounds the operands of matrix products; sums and
      everything else stay float32. See `kernels.matmul_dtype`.
    conv_backend: 'onednn' uses oneDNN's convolutions on a CPU where they are
      faster; `kernels.onednn` lists the requirements.
    **options: Options listed by `model_options(name)`, such as `width`.

  Returns:
    A `BlockModel`.

  Raises:
    ValueError: For an unknown name, option or option value, an invalid input
      shape or number of classes, or a `conv_backend` that is not available.
  """
  build = constructor(name)
  check_call(f'Model {name!r}', build, options)
  shape = tuple(input_shape)
  _check_shape(name, shape)
  at_least(1, num_classes=num_classes)
  one_of('matmul_dtype', matmul_dtype, MATMUL_DTYPES)
  one_of('conv_backend', conv_backend, libraries.CONV_BACKENDS)
  libraries.check(conv_backend)
  model = build(shape, num_classes, **options)
  if isinstance(model, nn.Module):
    # Options can change shapes, so the names of the blocks include them.
    parts = [f'{option}{value}' for option, value in sorted(options.items())]
    parts.insert(0, by_path.title(name))
    model = BlockModel.from_module(
        model, shape, num_classes, name='_'.join(parts)
    )
  if not isinstance(model, BlockModel):
    raise ValueError(
        f'Model {name!r} must be a BlockModel or a flax.linen module, got '
        f'{type(model).__name__}.{adapt.how_to_wrap(model)}'
    )
  return dataclasses.replace(
      model, matmul_dtype=matmul_dtype, conv_backend=conv_backend
  )


__all__ = [
    'MODELS',
    'Block',
    'BlockModel',
    'Head',
    'Variables',
    'constructor',
    'create',
    'model_options',
]
