r"""Measures this machine's speeds, which runs with `auto` follow on a CPU.

  python -m launch.tune
  python -m launch.tune --show

Times local training of seven small nets with XLA's and oneDNN's convolutions,
on one device and on one device per core (at most 16), in a minute or two. Let
the machine be idle. The speeds are a file in the user's cache folder, for this
processor, number of cores and version of jaxlib. New runs then take the form
that is predicted to end first; runs that were begun before keep theirs, since
forms differ in rounding. To undo it, remove the file. Exit codes: 0, or 2 if
the command is wrong, the device is no CPU or the file cannot be written.
"""

from collections.abc import Iterator, Sequence
import os

from absl import flags

from . import terminal


def define_flags() -> None:
  """Defines the flags; not at import, since other programs share names."""
  flags.DEFINE_bool('show', False, 'Print what was measured, and stop.')
  flags.DEFINE_bool(
      'quick', False,
      'Tiny batches, to test the command. The speeds are stored only if '
      'FEDJAX_HET_TUNED names a folder.',
  )  # fmt: skip
  flags.DEFINE_float(
      'seconds', None,
      'No further net is begun after this time, instead of two minutes.', 0.0,
  )  # fmt: skip


def lines(table) -> Iterator[str]:
  """What a table holds, images a second."""
  from fedjax_het.kernels import libraries
  from fedjax_het.reporting import tables

  forms = dict.fromkeys(
      (row.devices, row.conv_backend)
      for case in table.cases.values()
      for row in case.rows
  )
  header = ['images/s', *(f'{libraries.title(b)}, {d}' for d, b in forms)]
  rows = [header]
  for name, case in table.cases.items():
    found = {(row.devices, row.conv_backend): row for row in case.rows}
    rows.append([
        name,
        *(f'{found[form].images_per_second:,.0f}' if form in found else '-'
          for form in forms),
    ])  # fmt: skip
  yield tables.as_text(rows)
  yield 'Behind each library: over how many devices clients are divided.'


def main(argv: Sequence[str]) -> None:
  """Measures and stores, or shows what is stored."""
  del argv
  from fedjax_het.experiment import tuned

  values = flags.FLAGS
  tuned.start_devices(tuned.devices())
  try:
    if values.show:
      table = tuned.read()
      if table is None:
        terminal.fail(
            'Nothing was measured with this processor, number of cores and '
            'jaxlib; python -m launch.tune does so.'
        )
    else:
      table = _measure(values)
  except (ValueError, OSError, RuntimeError) as e:
    terminal.fail(e)
  terminal.show('\n'.join(lines(table)))
  if not values.show and not _is_stored(values):
    terminal.show('Not stored, as the batches of --quick are tiny.')
  else:
    terminal.show(f'Measured on {table.date}: {tuned.table_path()}')


def _measure(values):
  """Measures and stores the speeds."""
  import jax

  from fedjax_het.experiment import tune, tuned

  if load := tune.busy():
    terminal.show(
        f'Warning: other processes run (load {load:.1f}); measure again when '
        'the machine is idle.'
    )
  if jax.default_backend() == 'cpu' and jax.device_count() != tuned.devices():
    raise ValueError(
        f'JAX has {jax.device_count()} CPU devices, runs have '
        f'{tuned.devices()}: leave JAX_NUM_CPU_DEVICES and XLA_FLAGS unset.'
    )
  limit = {} if values.seconds is None else dict(seconds=values.seconds)
  table = tune.measure(**limit, small=values.quick, say=terminal.show)
  if not table.cases:
    raise ValueError('No net was measured; give more --seconds.')
  if _is_stored(values):
    tuned.write(table)
  return table


def _is_stored(values) -> bool:
  """Whether runs may follow what is measured; not by `--quick` unasked."""
  from fedjax_het.experiment import tuned

  return not values.quick or bool(os.environ.get(tuned.FOLDER))


def run() -> None:
  """Runs the program."""
  define_flags()
  terminal.run(main, terminal.parse_flags, __doc__)


if __name__ == '__main__':
  run()
