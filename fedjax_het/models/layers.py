"""Layers and initialisers shared by model families."""

from collections.abc import Callable
import math
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_het.kernels.conv import conv
from fedjax_het.kernels.matmul_dtype import matmul
from fedjax_het.kernels.random_bits import bernoulli
from fedjax_het.models.slices import Slices
from fedjax_het.options import one_of, positive


def _draw(sample, key, shape, dtype):
  # Draws a flat array: on a CPU, XLA takes three times as long to compile the
  # generator of a four-dimensional array, half a second each.
  return sample(key, (math.prod(shape),), dtype).reshape(shape)


def he_fan_out(key, shape, dtype=jnp.float32):
  """He normal, PyTorch's `kaiming_normal_(mode='fan_out')`."""
  fan_out = math.prod(shape) // shape[-2]
  scale = math.sqrt(2 / fan_out)
  return scale * _draw(jax.random.normal, key, shape, dtype)


def he_fan_in(key, shape, dtype=jnp.float32):
  """He normal, PyTorch's `kaiming_normal_()`."""
  fan_in = math.prod(shape[:-1])
  return math.sqrt(2 / fan_in) * _draw(jax.random.normal, key, shape, dtype)


def truncated_normal(scale: float) -> Callable[..., jax.Array]:
  """Normal of standard deviation `scale`, truncated at two deviations."""

  def sample(key, shape, dtype):
    return scale * jax.random.truncated_normal(key, -2, 2, shape, dtype)

  def init(key, shape, dtype=jnp.float32):
    return _draw(sample, key, shape, dtype)

  return init


def lecun_normal(key, shape, dtype=jnp.float32):
  """Truncated normal of variance 1 / fan-in, Keras' `lecun_normal`."""
  # A standard normal truncated at +-2 has standard deviation 0.8796.
  scale = 1 / math.sqrt(math.prod(shape[:-1])) / 0.87962566103423978
  return truncated_normal(scale)(key, shape, dtype)


def uniform_fan_in(fan_in: int) -> Callable[..., jax.Array]:
  """Uniform on +-1 / sqrt(fan_in), PyTorch's default for weight and bias."""
  bound = 1 / math.sqrt(fan_in)

  def init(key, shape, dtype=jnp.float32):
    return bound * (2 * _draw(jax.random.uniform, key, shape, dtype) - 1)

  return init


def torch_uniform(key, shape, dtype=jnp.float32):
  """Uniform on +-1 / sqrt(fan-in), PyTorch's default for kernels."""
  return uniform_fan_in(math.prod(shape[:-1]))(key, shape, dtype)


def glorot_uniform(key, shape, dtype=jnp.float32):
  """Uniform of variance 2 / (fan-in + fan-out), Keras' default."""
  fan_in, fan_out = (math.prod(shape) // n for n in (shape[-1], shape[-2]))
  return uniform_fan_in((fan_in + fan_out) / 6)(key, shape, dtype)


def _zeros(fan_in: int) -> Callable[..., jax.Array]:
  del fan_in
  return nn.initializers.zeros


class Init(NamedTuple):
  """Initialisers of a model's layers; norm scales start at 1, biases at 0.

  Attributes:
    kernel: Initialiser of the kernels of hidden layers, shape [..., I, O].
    bias: Maps a hidden layer's fan-in to the initialiser of its bias.
    head: Initialiser of the classifier's kernel, whose bias starts at zero;
      None for PyTorch's default for kernel and bias.
  """

  kernel: Callable[..., jax.Array]
  bias: Callable[[int], Callable[..., jax.Array]] = _zeros
  head: Callable[..., jax.Array] | None = None


# The choices of `init`, an option of every model family.
INITS = {
    # PyTorch's default: kernels and biases uniform on +-1 / sqrt(fan-in).
    'torch': Init(torch_uniform, uniform_fan_in),
    # torchvision's ResNets: He normal by fan-out, the classifier as 'torch'.
    'he_fan_out': Init(he_fan_out),
    'he_fan_in': Init(he_fan_in),
    # Keras: `lecun_normal` and its default, `glorot_uniform`, in all layers.
    'lecun': Init(lecun_normal, head=lecun_normal),
    'glorot': Init(glorot_uniform, head=glorot_uniform),
    # Vision transformers: normal of deviation 0.02, truncated at two of these.
    'truncated': Init(truncated_normal(0.02), head=truncated_normal(0.02)),
}


def check_init(init: str) -> None:
  """Raises ValueError for an `init` that is not in `INITS`."""
  one_of('init', init, INITS)


def scale_channels(channels: int, width: float) -> int:
  """The floor of `channels * width`, at least 1.

  The product is first rounded at 1e-6, so that a width such as 0.29, which
  floating point stores a little too small, does not lose a channel.

  Args:
    channels: Channels of the model of width 1.
    width: Any positive number.

  Returns:
    A positive int.

  Raises:
    ValueError: If the width is not a positive finite number.
  """
  positive(width=width)
  return max(1, math.floor(round(channels * width, 6)))


def conv_layer(
    features: int,
    kernel: int,
    name: str,
    *,
    inputs: int,
    init: str,
    stride: int = 1,
    padding: int | None = None,
    use_bias: bool = False,
) -> nn.Conv:
  """A square convolution with padding counted as in PyTorch.

  Args:
    features: Output channels.
    kernel: Height and width of the kernel.
    name: Name of the submodule.
    inputs: Input channels, for the fan-in of the bias.
    init: How kernel and bias are drawn, a key of `INITS`.
    stride: Stride in both directions.
    padding: Zeros added on each side; None means kernel // 2. Note that
      'SAME' would pad less before than after where the stride is 2.
    use_bias: Whether there is a bias.

  Returns:
    A linen module, [B, H, W, I] -> [B, H', W', O].
  """
  pad = kernel // 2 if padding is None else padding
  scheme = INITS[init]
  return nn.Conv(
      features,
      (kernel, kernel),
      strides=(stride, stride),
      padding=((pad, pad), (pad, pad)),
      use_bias=use_bias,
      kernel_init=scheme.kernel,
      bias_init=scheme.bias(kernel**2 * inputs),
      conv_general_dilated=conv,
      name=name,
  )


def subsample_and_pad(x: jax.Array, features: int, stride: int) -> jax.Array:
  """The parameter-free shortcut ('A' of He et al., 2016).

  Args:
    x: [B, H, W, C].
    features: Output channels, at least C. The new ones are zero, half of them
      before and half after the old ones.
    stride: Every stride-th row and column is kept.

  Returns:
    [B, ceil(H / stride), ceil(W / stride), features].
  """
  extra = features - x.shape[3]
  pad = ((0, 0), (0, 0), (0, 0), (extra // 2, extra - extra // 2))
  return jnp.pad(x[:, ::stride, ::stride], pad)


class SubsampleAndPad(nn.Module):
  """`subsample_and_pad` as a module without parameters, like any shortcut."""

  features: int
  stride: int

  def __call__(self, x):
    """[B, H, W, C] -> [B, ceil(H / stride), ceil(W / stride), features]."""
    return subsample_and_pad(x, self.features, self.stride)


class Scaler(nn.Module):
  """The identity; marks where a method may scale a block's output.

  A norm directly after a convolution cancels a factor on the convolution's
  output. If the norm's output is added to other convolutions' outputs, the
  factor must follow the norm instead, see `intercept.scaled_outputs`.
  """

  def __call__(self, x):
    """Returns `x`."""
    return x


class Dropout(nn.Dropout):
  """`nn.Dropout` with the same masks, drawn faster on CPUs (`random_bits`).

  Attributes:
    rate: Dropout rate, at least 0 and below 1.
    deterministic: Whether to return the input; must be given, as there is no
      argument for it. The other attributes of `nn.Dropout` are not used.
  """

  @nn.compact
  def __call__(self, x):
    """[...] floating -> same shape; scaled by 1 / (1 - rate) where kept."""
    if self.deterministic or not self.rate:
      return x
    keep = 1.0 - self.rate
    mask = bernoulli(self.make_rng('dropout'), keep, x.shape)
    return jnp.where(mask, x / keep, jnp.zeros_like(x))


class Linear(nn.Module):
  """Linear layer [B, D] -> [B, features], initialised as PyTorch does.

  Attributes:
    features: Size of the output.
    use_bias: Whether there is a bias.
    kernel_init: None means uniform on +-1 / sqrt(D), for the bias too; the
      bias starts at zero with any other initialiser.
  """

  slices = Slices((), dict(kernel=('x', '*'), bias=('x', '*')))

  features: int
  use_bias: bool = True
  kernel_init: Callable[..., jax.Array] | None = None

  @nn.compact
  def __call__(self, x, train=False, mask=None):
    """Returns x @ kernel + bias; `train` and `mask` change nothing."""
    del train, mask
    uniform = uniform_fan_in(x.shape[-1])
    shape = (x.shape[-1], self.features)
    kernel = self.param('kernel', self.kernel_init or uniform, shape)
    y = matmul(x, kernel)
    if self.use_bias:
      bias_init = nn.initializers.zeros if self.kernel_init else uniform
      y += self.param('bias', bias_init, (self.features,))[None]
    return y


def hidden_linear(features: int, name: str, init: str) -> Linear:
  """A hidden `Linear` layer, drawn by a key of `INITS`."""
  # `Linear` itself draws kernel and bias as 'torch' does.
  kernel_init = None if init == 'torch' else INITS[init].kernel
  return Linear(features, kernel_init=kernel_init, name=name)


class GlobalPool(nn.Module):
  """Mean over all positions, [B, H, W, C] -> [B, C]."""

  slices = Slices()

  def __call__(self, x, train=False, mask=None):
    """Returns the mean; `train` and `mask` change nothing."""
    del train, mask
    return jnp.mean(x, axis=(1, 2))


class Flatten(nn.Module):
  """Flattens each example, [B, ...] -> [B, D]."""

  slices = Slices(flattens=True)

  def __call__(self, x, train=False, mask=None):
    """Returns the reshaped input; `train` and `mask` change nothing."""
    del train, mask
    return x.reshape((x.shape[0], -1))
