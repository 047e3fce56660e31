"""FedIN v2's Fig. 6c: batch sizes, on CIFAR-10."""

from fedjax_het.configs.tables import _papers, fedin_v2_table1

from fedjax_het.reporting.results_table import Table

SCALES = _papers.SCALES
BATCHES = (8, 16, 32, 64, 128)
COLUMNS = {f'batch {size}': size for size in BATCHES}
METHODS = ('HeteroFL', 'InclusiveFL', 'FedIN')


def _with_batch(config, size: int):
  """Sets the batch size; FedIN then exchanges one batch of pairs."""
  config = config.copy_and_resolve_references()
  config.local.batch_size = size
  # All sizes share one split, in which every client holds the largest batch.
  config.partition.min_size = max(BATCHES)
  return config


def get_table(scale: str = SCALES[0]) -> Table:
  """Three methods by five batch sizes, three seeds.

  Run: `python -m launch.sweep --table=fedin_v2_fig6c --data_dir=DIR`.

  The paper draws a figure and prints no numbers. It says that 16, 32 and 64 are
  best, and that FedIN with 8 and 128 is still above HeteroFL and InclusiveFL.
  It does not say whether the batches of these two also change; here they do.

  Args:
    scale: One of `SCALES`.

  Returns:
    The table.
  """
  rows = fedin_v2_table1.get_table(scale).rows
  full = fedin_v2_table1.SETTING.replace('batch 16', 'the batch named')
  return Table(
      title='FedIN v2, Fig. 6c: batch sizes',
      setting=_papers.in_words(
          scale,
          f'{full} Every client holds at least {max(BATCHES)} images. HeteroFL '
          'has widths of one ResNet152, drawn anew by every client in every '
          'visit.',
          f'{fedin_v2_table1.CPU} HeteroFL: parts of a ResNet26.',
      ),
      rows={
          label: {
              column: _with_batch(rows[label]['cifar10 non-IID'], size)
              for column, size in COLUMNS.items()
          }
          for label in METHODS
      },
      paper={},
      seeds=(0, 1, 2),
      columns=tuple(COLUMNS),
      mean='groups',
      axis=('Batch size', COLUMNS),
  )
