r"""Prints FedHe's Tables III and IV: numbers that a client and server exchange.

  python -m launch.communication
  python -m launch.communication --num_public=5000
  python -m launch.communication --table=fedin_v2_table1 --scale=full \
      --cols=cifar10_iid --data_dir=DIR

The numbers are counted from the methods' messages, in both directions and with
all classes present, without training. The paper counts the upload only, FedAvg
on model 9 with 20 outputs, and FedMD's public images together with its logits.

With `--table` it prints instead what a client receives, keeps and sends in each
row of a results table, in the first of its columns or of `--cols`. For FedIN
v2's Table 1 this is the paper's Table 3, beside the printed numbers.
"""

from collections.abc import Iterator, Sequence
import math
from typing import NamedTuple

from absl import flags
import tqdm

from . import table_files, terminal

# (title, image shape, the paper's number for FedAvg and reduced rate of FedMD).
TABLES = (
    ('Table III, MNIST', (28, 28, 1), 324_672, '97.6%'),
    ('Table IV, CIFAR-10', (32, 32, 3), 326_976, '90.6%'),
)
NUM_CLASSES = 10
_NUM_CLIENTS = 10
_MOST_PUBLIC = 10**6  # Larger than any data set here.
_NUM_BYTES = 4  # All messages are float32.


class Row(NamedTuple):
  """Numbers sent per visit; `paper` and `paper_rate` are printed values."""

  method: str
  down: int
  up: int
  paper: str = '-'
  paper_rate: str = '-'


def exchanged(
    name: str, image_shape, num_outputs: int, num_public: int = 0
) -> tuple[int, int]:
  """Numbers (down, up) of one visit of a method on model 9, from shapes only.

  Args:
    name: A key of `ALGORITHMS`.
    image_shape: (height, width, channels).
    num_outputs: Outputs of the model.
    num_public: Size of the public set; each round uses all of it.

  Returns:
    Two integers, which count all optional parts as present.
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
    num_public: Number of public examples n.

  Returns:
    The rows, beginning with the paper's FedAvg.
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
  """A table as Markdown; reduced rates compare the upload with both FedAvgs."""
  lines = [
      f'{title}: numbers of 4 bytes a client and visit, n = {num_public}',
      '',
      '| method | down | up | paper (up) | less than FedAvg, 20 outputs '
      '| 10 outputs | paper |',
      '|---|---|---|---|---|---|---|',
  ]
  for row in table:
    # FedAvg with 20 outputs sends more than with 10: no reduced rate.
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


def overheads(table, data_dir: str | None = None) -> Iterator[list[str]]:
  """Yields what each row of a results table holds and sends; trains nothing.

  Args:
    table: The `Table`; each row is counted in its first column.
    data_dir: Folder of the data sets; None for the configs' own.

  Yields:
    The header, then a line for each row.

  Raises:
    ValueError: As `build`.
    FileNotFoundError: As `build`.
  """
  from fedjax_het.experiment.build import build
  from fedjax_het.experiment.overheads import count

  paper = table.overheads
  yield [
      'method', 'sent, M', 'received, M', 'model, MB', 'received, MB',
      'kept, MB', 'sum, MB', 'server, MB',
      *['paper: sent, M', 'paper: memory, MB'] * bool(paper),
  ]  # fmt: skip
  for row in table.rows:
    of_row = (table.config(row, column) for column in table.columns)
    config = next((config for config in of_row if config is not None), None)
    if config is None:
      continue  # The row has no cell in these columns.
    if data_dir is not None:
      config = config.copy_and_resolve_references()
      config.data_dir = data_dir
    found = count(build(config, check_memory=False))
    numbers = (found.sent, found.received)
    held = (found.model, found.received, found.kept, found.held, found.server)
    printed = paper.get(row, ('-', '-')) if paper else ()
    yield [
        row,
        *(f'{size / _NUM_BYTES / 1e6:,.2f}' for size in numbers),
        *(f'{size / 2**20:,.2f}' for size in held),
        *map(str, printed),
    ]


OVERHEADS_NOTE = """\
Means over clients; M are millions of numbers of 4 bytes, MB are 2^20 bytes. The
sum is what a visit holds beside gradients, optimiser and activations: the model
in training, what it has received and what it keeps between visits. Messages
count with all their optional parts, and the model is the part that a client
trains, the largest where it draws it. A paper's memory is of one client of each
model together."""


def define_flags() -> None:
  """Defines the flags; not at import, since other programs share names."""
  flags.DEFINE_integer('num_public', 10, "FedMD's public examples, n.")
  flags.DEFINE_string(
      'table', None, 'Instead: name of a results table, or path of its file.'
  )
  flags.DEFINE_string('scale', None, "The table's first scale by default.")
  flags.DEFINE_string('data_dir', None, "Folder of the table's data sets.")
  flags.DEFINE_list('rows', None, 'Rows of the table, instead of all.')
  flags.DEFINE_list('cols', None, 'Columns; the first one of each row counts.')


def parse_flags(argv: Sequence[str]) -> list[str]:
  """absl's flags parser with one line per error."""
  from fedjax_het.options import integer_between

  rest = terminal.parse_flags(argv)
  options = flags.FLAGS
  if options.table is None:
    for name in ('scale', 'data_dir', 'rows', 'cols'):
      if options[name].value is not None:
        terminal.fail(f'--{name} belongs to a results table: --table=NAME.')
  elif options['num_public'].present:
    terminal.fail("--num_public is of FedHe's tables; leave out --table.")
  try:
    integer_between(1, _MOST_PUBLIC, num_public=options.num_public)
  except ValueError as error:
    terminal.fail(error)
  return rest


def _print_overheads() -> None:
  """Prints what the chosen rows of the table hold and send."""
  from fedjax_het.reporting.tables import as_markdown

  options = flags.FLAGS
  try:
    found = table_files.find_table(options.table, options.scale)
    part = table_files.choose(
        found.table, None, options.rows, options.cols, found.merged
    )
    where = options.data_dir
    if where is not None:
      where = str(terminal.expanded(where, '--data_dir'))
    lines = [*tqdm.tqdm(
        overheads(part, where), total=1 + len(part.rows), unit='row',
        leave=False, disable=None,
    )]  # fmt: skip
  except (ValueError, OSError, ImportError) as error:
    terminal.fail(error)
  print(f'{found.heading}: what each method holds and sends\n')
  print(f'{as_markdown(lines)}\n\n{OVERHEADS_NOTE}')


def main(argv: Sequence[str]) -> None:
  """Prints FedHe's tables, or what rows of a results table hold and send."""
  del argv
  if flags.FLAGS.table is not None:
    _print_overheads()
    return
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
