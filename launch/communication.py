"""Prints FedHe's Tables III and IV: numbers that a client and server exchange.

  python -m launch.communication
  python -m launch.communication --num_public=5000

Counted from the methods' messages, in both directions and with all classes
present, without training. The paper counts the upload alone, FedAvg on model 9
with 20 outputs, and FedMD's public images with its logits.
"""

from collections.abc import Sequence
import math
from typing import NamedTuple

from absl import flags

from . import terminal

# (title, shape of an image, the paper's FedAvg and reduced rate of FedMD).
TABLES = (
    ('Table III, MNIST', (28, 28, 1), 324_672, '97.6%'),
    ('Table IV, CIFAR-10', (32, 32, 3), 326_976, '90.6%'),
)
NUM_CLASSES = 10
_NUM_CLIENTS = 10
_MOST_PUBLIC = 10**6  # Larger than any data set here.
_NUM_BYTES = 4  # All messages are float32.


class Row(NamedTuple):
  """Numbers a visit; `paper` and `paper_rate` are what it prints."""

  method: str
  down: int
  up: int
  paper: str = '-'
  paper_rate: str = '-'


def exchanged(
    name: str, image_shape, num_outputs: int, num_public: int = 0
) -> tuple[int, int]:
  """Numbers (down, up) of one visit of a method on model 9, by shapes alone.

  Args:
    name: A key of `ALGORITHMS`.
    image_shape: (height, width, channels).
    num_outputs: Outputs of the model.
    num_public: Examples of the public set, all of which a round takes.

  Returns:
    Two integers; all optional parts count as present.
  """
  import jax
  import jax.numpy as jnp
  import numpy as np
  import optax

  from fedjax_het.algorithms import ALGORITHMS
  from fedjax_het.data.federated import ClientData
  from fedjax_het.engine import traffic
  from fedjax_het.engine.types import (
      Federation,
      Group,
      LocalTraining,
      Maybe,
      Visit,
  )
  from fedjax_het.models import create

  model = create('fedhe_cnn9', image_shape, num_outputs)
  group = Group('clients', model, np.arange(_NUM_CLIENTS, dtype=np.int32))
  local = LocalTraining(optax.adam, lambda round_num: 1e-3, 1, 50, steps=3)
  federation = Federation((group,), local, num_public=num_public)
  algorithm = ALGORITHMS[name](federation)

  def visit(key):
    data = ClientData(
        jnp.zeros((50, *image_shape), jnp.uint8),
        jnp.zeros(50, jnp.int32),
        jnp.arange(50, dtype=jnp.int32),
        jnp.int32(50),
        lambda images, key=None: images.astype(jnp.float32),
        jnp.zeros(num_public, jnp.int32) if num_public else None,
    )
    turn = Visit(jnp.int32(0), jnp.int32(0), key)
    client = algorithm.init_client(group, turn.client_id, key)
    sent = algorithm.downlink(algorithm.init(key), group, turn)
    _, uplink, _ = algorithm.client_update(group, client, sent, data, turn)
    return sent, uplink

  def count(tree):
    full = jax.tree.map(
        lambda part: part._replace(present=np.ones(part.present.shape, bool))
        if isinstance(part, Maybe)
        else part,
        tree,
        is_leaf=lambda part: isinstance(part, Maybe),
    )
    return int(traffic.num_bytes(traffic.measure(full))) // _NUM_BYTES

  sent, uplink = jax.eval_shape(visit, jax.random.key(0))
  return count(sent), count(uplink)


def rows(image_shape, fedavg: int, rate: str, num_public: int) -> list[Row]:
  """The rows of one table.

  Args:
    image_shape: (height, width, channels).
    fedavg: The paper's number for FedAvg.
    rate: The paper's reduced rate of FedMD, for 10 public examples.
    num_public: n.

  Returns:
    The rows, the paper's FedAvg first.
  """
  n, classes = num_public, NUM_CLASSES
  down, up = exchanged('fedmd', image_shape, classes, n)
  each = classes + math.prod(image_shape)
  images = n * math.prod(image_shape)
  rate = rate if n == 10 else '-'
  return [
      Row(
          'FedAvg, 20 outputs',
          *exchanged('fedavg', image_shape, 2 * classes),
          f'{fedavg:,}',
          '0%',
      ),
      Row('FedAvg, 10 outputs', *exchanged('fedavg', image_shape, classes)),
      Row('FedMD, logits', down, up),
      Row(
          'FedMD, logits and images',
          down,
          up + images,
          f'n x {each} = {n * each:,}',
          rate,
      ),
      Row('FedHe', *exchanged('fedhe', image_shape, classes), '110', '> 99.9%'),
      Row('FD', *exchanged('fd', image_shape, classes)),
  ]


def render(title: str, table: Sequence[Row], num_public: int) -> str:
  """A table as markdown; rates are of the upload, against both FedAvgs."""
  lines = [
      f'{title}: numbers of 4 bytes a client and visit, n = {num_public}',
      '',
      '| method | down | up | paper (up) | less than FedAvg, 20 outputs '
      '| 10 outputs | paper |',
      '|---|---|---|---|---|---|---|',
  ]
  for row in table:
    # Model 9 with 20 outputs is more than with 10: no reduced rate.
    rates = [
        f'{100 * (1 - row.up / base.up):.2f}%' if row.up <= base.up else '-'
        for base in table[:2]
    ]
    lines.append(
        f'| {row.method} | {row.down:,} | {row.up:,} | {row.paper} | '
        f'{rates[0]} | {rates[1]} | {row.paper_rate} |'
    )
  return '\n'.join(lines)


NOTE = """\
FedAvg's upload holds one number more than the model, the weight of its change.
The model counts with its norms' running statistics. FedHe sends ten logits and
one count for every class, FD ten numbers. FedMD sends the public subset's
number with all logits, and down the seed that subsets are drawn from, two
numbers; its images, which the paper counts, are sent once, or are on the
devices.
"""


def define_flags() -> None:
  """Defines the flags; not at import, since other programs share names."""
  flags.DEFINE_integer('num_public', 10, "FedMD's public examples, n.")


def parse_flags(argv: Sequence[str]) -> list[str]:
  """absl's flags parser with one line per error."""
  from fedjax_het.options import integer_between

  rest = terminal.parse_flags(argv)
  try:
    integer_between(1, _MOST_PUBLIC, num_public=flags.FLAGS.num_public)
  except ValueError as error:
    terminal.fail(error)
  return rest


def main(argv: Sequence[str]) -> None:
  """Prints both tables."""
  del argv
  num_public = flags.FLAGS.num_public
  for title, image_shape, fedavg, rate in TABLES:
    table = rows(image_shape, fedavg, rate, num_public)
    print(render(title, table, num_public), end='\n\n')
  print(NOTE, end='')


def run() -> None:
  """Runs the program."""
  define_flags()
  terminal.run(main, parse_flags, __doc__)


if __name__ == '__main__':
  run()
