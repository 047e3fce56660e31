"""Scales and FedIN's columns, shared by the tables of the papers."""

from collections.abc import Callable, Mapping, Sequence

from fedjax_het.configs import fedmd

# The first is the default.
SCALES = ('cpu', 'full', 'quick')
_QUICK = (
    'Only to see that the commands work: two rounds of three tiny dense nets '
    'on the embedded digits, whatever data set and models a column or row '
    'names.'
)


def with_options(get_config, **options):
  """A `get_config` that also sets options of the method."""

  def changed(arg):
    config = get_config(arg)
    config.algorithm.update(options)
    return config

  return changed


def at_scale(get_config, variants: str, scale: str):
  """The config of a method at a scale.

  Args:
    get_config: The `get_config` of the method's file.
    variants: Variants of setting and method, separated by commas.
    scale: One of `SCALES`.

  Returns:
    The config; at the scale 'quick' it is on the digits and needs no
    `data_dir`.
  """
  size = '' if scale == 'full' else scale
  config = get_config(','.join(part for part in (variants, size) if part))
  if scale == 'quick':
    config.dataset = 'digits'
    config.local.batch_size = min(config.local.batch_size, 64)
    if config.public_size is not None:
      config.public_size = fedmd.PUBLIC['digits']
  return config


def in_words(scale: str, full: str, cpu: str) -> str:
  """A table's setting in words.

  Args:
    scale: One of `SCALES`.
    full: The paper's own setting.
    cpu: How the scale 'cpu' differs from it.

  Returns:
    The words for the scale.
  """
  return {'full': full, 'cpu': f'{full} {cpu}', 'quick': _QUICK}[scale]


def fedin_columns(datasets: Sequence[str]) -> dict[str, tuple[str, bool]]:
  """FedIN's columns, IID and Dirichlet 0.5: {name: (data set, whether IID)}."""
  return {
      f'{dataset} {"IID" if iid else "non-IID"}': (dataset, iid)
      for dataset in datasets
      for iid in (True, False)
  }


def fedin_rows(
    methods: Mapping[str, tuple[Callable, str]],
    columns: Mapping[str, tuple[str, bool]],
    scale: str,
) -> dict[str, dict[str, object]]:
  """The configs of FedIN's methods on data sets and splits.

  Args:
    methods: {label: (the `get_config` of its file, variants)}.
    columns: As of `fedin_columns`.
    scale: One of `SCALES`.

  Returns:
    {label: {column: config}}.
  """
  return {
      label: {
          # Without a variant the split is Dirichlet 0.5.
          column: at_scale(
              get_config, f'{variants},{dataset}' + ',iid' * iid, scale
          )
          for column, (dataset, iid) in columns.items()
      }
      for label, (get_config, variants) in methods.items()
  }


def fedin_paper(
    target: Callable[[str, str, bool], object],
    names: Mapping[str, str],
    columns: Mapping[str, tuple[str, bool]],
) -> dict[str, dict[str, object]]:
  """The paper's results by row and column.

  Args:
    target: (method, data set, whether IID) -> `Target` or None.
    names: {label: the paper's name of the method}.
    columns: As of `fedin_columns`.

  Returns:
    {label: {column: target}}.
  """
  return {
      label: {
          column: found
          for column, (dataset, iid) in columns.items()
          if (found := target(name, dataset, iid)) is not None
      }
      for label, name in names.items()
  }


def with_rate(config, rate: float):
  """A copy with another learning rate of local training."""
  config = config.copy_and_resolve_references()
  config.local.learning_rate = rate
  return config
