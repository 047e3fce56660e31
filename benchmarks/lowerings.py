"""Times every way to compute each pass of every convolution of a net.

  python -m benchmarks.lowerings [--models=resnet18,...] [--quick]
    [--output=FILE]

The ways are those of `fedjax_het.kernels.conv`. The passes are the forward pass
and the gradients of the input and of the kernel. A pass is timed in a loop, as
in local training, on all threads. The ways take turns; the minimum time of each
counts. Layers of equal shape are timed once, and so are ways that compile to
the same program for a layer.

The first table has a row per layer and pass. The way that `choose_lowering`
picks is bold; its speed does not count operations on padding. The second table
has a row per net, summed over its layers: the chosen ways, the ways chosen with
`conv_backend='onednn'`, the fastest way of every row (a lower bound for any
choice), one way for all layers, the time of the operations at the speed of
large matrix products, and a whole local step with both choices, which includes
norms, pooling and the optimizer.

`benchmarks.lowering_wins` times the layers of all nets on one and two threads.
Let the machine be idle.
"""

import math
from typing import NamedTuple

import flax.linen as nn
import jax
from jax import lax
import jax.numpy as jnp

from benchmarks import common, flops, nets, programs
from fedjax_het.kernels import taps as taps_lib
from fedjax_het.kernels.conv import conv
from fedjax_het.kernels.libraries import CONV_BACKENDS, why_not
from fedjax_het.kernels.lowering import (
  Lowering,
  choose_lowering,
)
from fedjax_het.models import BlockModel, create

WAYS = {
    'forward': ('native', 'gemm', 'strips', 'cropped', 'onednn'),
    'd_input': ('native', 'gemm', 'cropped', 'onednn'),
    'd_weight': ('native', 'gemm', 'strips', 'cropped', 'rows', 'onednn'),
}
# A timed call repeats a pass for about this long; a slow pass runs once.
CALL_SECONDS = 0.05


class Layer(NamedTuple):
  """A convolution: images [H, W, I], kernel [h, w, I, O]."""

  images: tuple[int, int, int]
  kernel: tuple[int, int, int, int]
  strides: tuple[int, int]
  padding: object

  def __str__(self):
    size, stride = self.images[0], self.strides[0]
    height, width, num_in, num_out = self.kernel
    text = f'{size}x{self.images[1]}, {height}x{width}, {num_in} to {num_out}'
    return text + (f', stride {stride}' if stride > 1 else '')


def layers_of(model: BlockModel) -> dict[Layer, int]:
  """{convolution: how often it occurs} of a forward pass."""
  found: dict[Layer, int] = {}

  def record(call, args, kwargs, context):
    module = context.module
    if isinstance(module, nn.Conv) and context.method_name == '__call__':
      images = args[0].shape[1:]
      strides = module.strides or 1
      strides = (strides,) * 2 if isinstance(strides, int) else tuple(strides)
      kernel = (*module.kernel_size, images[2], module.features)
      padding = module.padding
      if not isinstance(padding, (str, int)):
        padding = tuple(map(tuple, padding))
      layer = Layer(images, kernel, strides, padding)
      found[layer] = found.get(layer, 0) + 1
    return call(*args, **kwargs)

  x = jax.ShapeDtypeStruct((1, *model.input_shape), jnp.float32)
  variables = model.abstract_variables  # Traces the model, too.
  with nn.intercept_methods(record):
    jax.eval_shape(model.apply, variables, x)
  return found


def chosen_lowering(
    layer: Layer, batch_size: int, conv_backend: str = 'xla'
) -> Lowering:
  """The lowering that `conv` chooses for a layer."""
  sizes = layer.images[:2]
  geometry = taps_lib.resolve_padding(
      layer.padding, sizes, layer.kernel[:2], layer.strides
  )
  _, geometry = taps_lib.busy_taps(geometry, sizes)
  num_features = math.prod(geometry.kernel) * layer.images[2]
  return choose_lowering(
      (batch_size, *geometry.out_sizes(sizes), num_features),
      layer.strides,
      channels=layer.kernel[2:],
      padding_share=taps_lib.padding_share(geometry, sizes),
      conv_backend=conv_backend,
  )


def pass_of(layer: Layer, kind: str, way: str):
  """A function of (x, w, dy) that computes one pass in one way."""
  ways = Lowering('gemm', 'gemm', 'gemm')._replace(**{kind: way})

  def forward(x, w):
    return conv(x, w, layer.strides, layer.padding, lowering=ways)

  if kind == 'forward':
    return lambda x, w, dy: forward(x, w)
  if kind == 'd_input':
    return lambda x, w, dy: jax.vjp(lambda x: forward(x, w), x)[1](dy)[0]
  return lambda x, w, dy: jax.vjp(lambda w: forward(x, w), w)[1](dy)[0]


def looped(fn, operands):
  """Returns a compiled `call(times)`, which runs `fn` that many times."""

  @jax.jit
  def run(times, operands):
    def body(_, carry):
      operands, _ = carry
      # An iteration depends on the previous one, so that XLA does not hoist the
      # computation out of the loop.
      return lax.optimization_barrier((operands, fn(*operands)))

    zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(fn, *operands))
    return lax.fori_loop(0, times, body, (operands, zeros))[1]

  def call(times):
    jax.block_until_ready(run(times, operands))

  call(1)
  return call


def measure(
    layer: Layer,
    batch_size: int,
    repetitions: int,
    slowest: float = math.inf,
) -> tuple[dict[str, dict[str, float]], int]:
  """Times each way of each pass of a layer.

  Args:
    layer: The layer.
    batch_size: Batch size.
    repetitions: Repetitions of each way.
    slowest: Ways that take more than this multiple of the fastest way's time in
      their first call are not repeated.

  Returns:
    {pass: {way: milliseconds}}, and the number of operations of a pass, which
    is the same for all three. Ways that are the same program have one time.
  """
  keys = jax.random.split(jax.random.key(0), 3)
  x = jax.random.normal(keys[0], (batch_size, *layer.images))
  w = jax.random.normal(keys[1], layer.kernel)
  y = jax.eval_shape(pass_of(layer, 'forward', 'gemm'), x, w, None)
  operands = x, w, jax.random.normal(keys[2], y.shape)
  found = {}
  for kind, ways in WAYS.items():
    calls, times, first, jaxprs, same_as = {}, {}, {}, {}, {}
    for way in ways:
      if why_not(way):
        continue
      fn = pass_of(layer, kind, way)
      same_as[way] = jaxprs.setdefault(
          str(jax.make_jaxpr(fn)(*operands)), way
      )
      if same_as[way] != way:
        continue
      call = looped(fn, operands)
      once = common.interleave({way: (lambda call=call: call(1), 1)}, 0.02)[way]
      first[way], times[way] = once, max(1, math.ceil(CALL_SECONDS / once))
      calls[way] = (lambda call=call, n=times[way]: call(n)), repetitions
    for way in [w for w in calls if first[w] > slowest * min(first.values())]:
      del calls[way]
      times[way] = 1
    seconds = first | common.interleave(calls, pause=0.02)
    found[kind] = {
        way: 1e3 * seconds[same] / times[same] for way, same in same_as.items()
    }
  forward = pass_of(layer, 'forward', 'native')
  return found, flops.product_flops(forward, *operands)


def libraries() -> tuple[str, ...]:
  """The `CONV_BACKENDS` that are available here."""
  return tuple(name for name in CONV_BACKENDS if not why_not(name))


def local_steps(name: str, repetitions: int) -> tuple[dict[str, float], float]:
  """Milliseconds of a local step by backend, and the peak operations/s."""
  steps = {c: nets.local_epoch(name, conv_backend=c) for c in libraries()}
  for step in steps.values():
    step.call()
  multiply, num = programs.matrix_product()
  calls = {c: (step.call, repetitions) for c, step in steps.items()}
  seconds = common.interleave({'product': (multiply, repetitions), **calls})
  peak = num / seconds.pop('product')
  return {c: 1e3 * s / nets.STEPS for c, s in seconds.items()}, peak


def summary(rows, steps: dict[str, float], peak: float) -> dict[str, float]:
  """Milliseconds for all layers of a net.

  Args:
    rows: Rows of `measure_net`.
    steps: Milliseconds of a local step by backend.
    peak: Operations per second of large matrix products.

  Returns:
    The columns of the second table.
  """

  def total(pick):
    return sum(row['count'] * row['milliseconds'][pick(row)] for row in rows)

  sums = {
      'chosen': total(lambda row: row['chosen']),
      'chosen, oneDNN': total(lambda row: row['chosen_onednn']),
      'fastest': total(
          lambda row: min(row['milliseconds'], key=row['milliseconds'].get)
      ),
  }
  for way in ('native', 'gemm'):
    sums[f'{way} alone'] = total(lambda row, way=way: way)
  operations = sum(row['count'] * row['operations'] for row in rows)
  sums['at the peak'] = 1e3 * operations / peak
  names = {'xla': 'local step', 'onednn': 'local step, oneDNN'}
  return sums | {names[c]: step for c, step in steps.items()}


def measure_net(name: str, repetitions: int) -> list[dict[str, object]]:
  """One row per layer and pass of a net of `nets.NETS`."""
  batch_size, rows = nets.NETS[name][0], []
  for layer, count in layers_of(create(name, nets.INPUT_SHAPE, 10)).items():
    chosen = chosen_lowering(layer, batch_size)._asdict()
    own = chosen_lowering(layer, batch_size, libraries()[-1])._asdict()
    found, operations = measure(layer, batch_size, repetitions)
    for kind, milliseconds in found.items():
      way, other = (
          ways[kind] if ways[kind] in milliseconds else 'native'
          for ways in (chosen, own)
      )
      rows.append({
          'net': name,
          'layer': str(layer),
          'count': count,
          'pass': kind,
          'chosen': way,
          'chosen_onednn': other,
          'milliseconds': milliseconds,
          'operations': operations,
      })
    print(f'{name}, {layer}: done', flush=True)
  return rows


def report(rows) -> str:
  """The table of passes."""
  ways = tuple(dict.fromkeys(way for some in WAYS.values() for way in some))

  def cell(row, way):
    milliseconds = row['milliseconds'].get(way)
    if milliseconds is None:
      return ''
    text = f'{milliseconds:.3g}'
    return f'**{text}**' if way == row['chosen'] else text

  return common.markdown(
      ['net', 'layer', 'times', 'pass', *(f'{w}, ms' for w in ways), 'GFLOP/s'],
      [
          [row['net'], row['layer'], row['count'], row['pass']]
          + [cell(row, way) for way in ways]
          + [row['operations'] / row['milliseconds'][row['chosen']] / 1e6]
          for row in rows
      ],
  )


def main() -> None:
  args, names = nets.parse_args(__doc__.splitlines()[0])
  # The compilation cache does not support oneDNN's convolutions.
  jax.config.update('jax_compilation_cache_dir', None)
  repetitions = 2 if args.quick else 4
  rows, sums = [], {}
  for name in names:
    found = measure_net(name, repetitions)
    sums[name] = summary(found, *local_steps(name, repetitions))
    rows += found
  print(report(rows) + '\n')
  header = ['all layers, ms', *next(iter(sums.values()))]
  print(common.markdown(header, [[n, *s.values()] for n, s in sums.items()]))
  suffix = '_quick' if args.quick else ''
  common.write(
      args.output or common.RESULTS / f'lowerings{suffix}.json',
      {'rows': rows, 'milliseconds': sums},
  )


if __name__ == '__main__':
  main()
