"""report.md of a workdir."""

from collections.abc import Iterator, Mapping
import contextlib
import json
import logging
import pathlib
from typing import Any

import numpy as np

from fedjax_het.algorithms import ALGORITHMS
from fedjax_het.analysis import pictures
from fedjax_het.engine.driver_kinds import driver_kind
from fedjax_het.engine.needs import needs_of
from fedjax_het.engine.task import ACCURACY
from fedjax_het.files import write_atomically
from fedjax_het.options import keyword_options
from fedjax_het.reporting import class_report, paper_targets, tables
from fedjax_het.reporting.confusion_file import read_confusion
from fedjax_het.reporting.run_files import Row, read_run
from fedjax_het.reporting.summary import Summary, main_metric, summarise

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def fitting(what: Any) -> Iterator[None]:
  """Turns errors on unexpected contents into a ValueError with one line.

  Valid JSON can lack any entry or hold another type; checking each entry would
  take more code than the report.

  Args:
    what: Owner of the files, for the error's text.

  Yields:
    Nothing.

  Raises:
    ValueError: If an entry is missing or of another type.
  """
  try:
    yield
  except ImportError:
    raise
  except (
      ArithmeticError,
      AttributeError,
      LookupError,
      MemoryError,
      RecursionError,
      TypeError,
      ValueError,
  ) as e:
    text = ' '.join(str(e).split())[:80]
    raise ValueError(
        f'The files of {what} do not fit together ({type(e).__name__}: {text}).'
    ) from e


def setting(config: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
  """A run's setting in one sentence, for comparison with a paper's.

  Args:
    config: Its config as nested dicts.
    facts: Its facts.

  Returns:
    The sentence, with all options of the method that differ from the default.
  """
  local, groups = config['local'], facts['groups']
  section = dict(config['algorithm'])
  name = section.pop('name')
  models = ', '.join(
      f'{g["clients"]} {group} {_own_options(config, group)}'.strip()
      for group, g in groups.items()
  )
  options = {
      k: v for k, v in section.items() if v != _defaults(name).get(k)
  }
  optimizer = f'{local["optimizer"]} {local["learning_rate"]:g}'
  if local['schedule'] != 'constant':
    optimizer += f' ({local["schedule"]})'
  parts = [
      f'{sum(g["clients"] for g in groups.values())} clients ({models})',
      f'{facts["cohort_size"]} sampled',
      f'{config["num_rounds"]} rounds',
      f'{local["epochs"]} local epochs'
      if local.get('steps') is None
      else f'{local["steps"]} local steps',
      f'batch {local["batch_size"]}',
      optimizer,
      'models ' + _options(config['model']),
      'split ' + named(config['partition']),
      f'{name} {_options(options)}'.strip(),
      f'seed {config["seed"]}, sampling seed {config["sampling_seed"]}',
  ]
  # Configs of older runs have no clock.
  driver = driver_kind(config.get('clock', {}).get('mode', 'synchronous'))
  fleet = ', '.join(
      f'{kind["clients"]} {name}'
      for name, kind in config.get('devices', {}).items()
  )
  if driver.setting:
    parts.append(driver.setting)
  if fleet:
    parts.append(f'devices {fleet}')
  if config.get('validation') is not None:
    parts.append(f'{config["validation"]:.0%} of each client held out')
  if config['image_size'] is not None:
    parts.append(f'images resized to {config["image_size"]}')
  return ', '.join(parts)


def _own_options(config: Mapping[str, Any], group: str) -> str:
  """The options of the method that a group's config sets.

  They are not known of a method that a config file has registered elsewhere.
  """
  name = config['algorithm']['name']
  entry = config['groups'].get(group)
  if name not in ALGORITHMS or not isinstance(entry, Mapping):
    return ''
  known = needs_of(ALGORITHMS[name]).group_options
  return _options({k: v for k, v in entry.items() if k in known})


def _defaults(name: str) -> dict[str, Any]:
  """A method's default options, as they come back from JSON, if known."""
  if name not in ALGORITHMS:
    return {}
  defaults = {k: v for k, (_, v) in keyword_options(ALGORITHMS[name]).items()}
  return json.loads(json.dumps(defaults))


def _options(options: Mapping[str, Any]) -> str:
  return ' '.join(f'{k}={v}' for k, v in sorted(options.items()))


def named(section: Mapping[str, Any]) -> str:
  """A section's name and its other entries."""
  rest = {k: v for k, v in section.items() if k != 'name'}
  return f'{section["name"]} {_options(rest)}'


def write_report(folder: pathlib.Path) -> pathlib.Path:
  """Writes report.md and its pictures from the other files of a workdir.

  Without matplotlib the report has no pictures, and says so.

  Args:
    folder: The workdir.

  Returns:
    The path of report.md.

  Raises:
    FileNotFoundError: If the workdir holds no evaluated run.
    ValueError: If a file is damaged.
    OSError: If it cannot be written.
  """
  config, facts, rows = read_run(folder)
  with fitting(folder):
    # Renders the text first, so that nothing is drawn if this fails.
    confusion = read_confusion(folder)
    _sections(config, facts, rows, confusion, {})
    drawn = _draw(folder, config, facts, rows, confusion)
    text = '\n\n'.join(_sections(config, facts, rows, confusion, drawn))
  path = folder / 'report.md'
  write_atomically(path, text + '\n')
  return path


def _sections(
    config, facts, rows, confusion, drawn: Mapping[str, str]
) -> list[str]:
  """The paragraphs of a report; `drawn` are the paths of its pictures."""
  summary = summarise(rows, config['target_accuracy'], main_metric(facts))
  metric = summary.metric.name.capitalize()
  title = f'{config["algorithm"]["name"]} on {config["dataset"]}'
  if summary.rounds == config['num_rounds']:
    state = f'All {summary.rounds} rounds are done.'
  else:
    state = f'{summary.rounds} of {config["num_rounds"]} rounds are done.'
  return [
      f'# {title}',
      f'{state} Setting: {setting(config, facts)}. The whole config is in '
      f'`config.json`.\n\n{_versions(facts)}',
      f'## {metric}',
      f'On all {facts["test_examples"]:,} test examples. '
      f'{_models(summary, facts)} {_best(summary)}',
      tables.as_markdown(tables.results(summary, facts)),
      '\n'.join(
          f'- {line}'
          for line in tables.totals(summary, config['target_accuracy'])
      ),
      *([f'![{metric} by round]({drawn["curves"]})'] if drawn else []),
      *(
          [f'![{metric} by virtual time]({drawn["times"]})']
          if 'times' in drawn
          else []
      ),
      *_personal(summary, facts),
      *class_report.sections(confusion, drawn),
      *_server(rows),
      *_paper(config, facts, summary),
      '## Who holds what',
      *(
          [
              f'![Clients and classes]({drawn["partition"]})',
              f'![Clients by classes]({drawn["classes"]})',
          ]
          if drawn
          else [NO_PICTURES]
      ),
      '## Communication',
      _COMMUNICATION,
      tables.as_markdown(tables.communication(rows, facts)),
      '## Memory',
      _MEMORY,
      tables.as_markdown(tables.memory(facts)),
      *_schedules(facts),
      *_program(facts),
  ]


NO_MATPLOTLIB = (
    'No pictures: matplotlib cannot be imported (`pip install matplotlib`)'
)
NO_PICTURES = f'{NO_MATPLOTLIB}; `fedjax-het report` then adds them.'
_COMMUNICATION = (
    'Bytes counted from the arrays that travelled, parts left empty not '
    'included. Per client and round: the mean over all visits.'
)
_PERSONAL = (
    "Each client's model in the last round, on test examples of its own: those "
    "of the partition's file, or else the test set divided in the proportions "
    'of the training partition. Each client has the same weight; in the last '
    'column each test example has.'
)
_MEMORY = (
    'A count of state, 4 bytes a number; not the activations and optimiser '
    'state that training needs on top. MB are 10^6 bytes.'
)


def _best(summary: Summary) -> str:
  """A sentence on how the best round was chosen."""
  metric = summary.metric
  best = 'highest' if metric.larger_is_better else 'lowest'
  if summary.validated:
    return (
        f'The best round is the one with the {best} mean {metric.name} on the '
        'examples that clients have held out.'
    )
  return (
      f'The best round is the one with the {best} mean test {metric.name}; '
      'it is chosen on the test set, so it is optimistic.'
  )


def _models(summary: Summary, facts: Mapping[str, Any]) -> str:
  counts = [v for k, v in summary.last.items() if k.startswith('models/')]
  # Facts of older runs lack it.
  if not facts.get('personal', max(counts) > 1):
    return "A group's clients share one model, so the worst is that model."
  return 'A group is the mean over the models of its clients.'


def _versions(facts: Mapping[str, Any]) -> str:
  versions = facts['versions']
  return (
      f'Run with jax {versions["jax"]} on {versions["platform"]} '
      f'({versions["device"]}).'
  )


def _server(rows) -> list[str]:
  """The section on the server's training; [] if it has no metrics."""
  table = tables.server(rows)
  if not table:
    return []
  return [
      "Metrics of the server's own training, the means over a round's "
      'updates of the server.',
      tables.as_markdown(table),
  ]


def _personal(summary: Summary, facts: Mapping[str, Any]) -> list[str]:
  """The section on clients' own test examples; [] where there are none."""
  table = tables.personal(summary, facts)
  if not table:
    return []
  return [
      '## Each client on its own test examples',
      _PERSONAL,
      tables.as_markdown(table),
  ]


def _schedules(facts: Mapping[str, Any]) -> list[str]:
  """The section on FeDepth's budgets and the memory of its stages."""
  if not facts.get('schedules'):
    return []
  plan = next(iter(facts['schedules'].values()))['plan']
  who = "the paper's estimate" if plan == 'paper' else "the compiler's figure"
  return [
      "Memory for training a stage: the paper's estimate of its blocks, and "
      "the compiler's figure for the whole step (stem, head, frozen blocks and "
      f'optimiser included). Stages are planned by {who}; a budget is a share '
      'of it for the whole model. MB are 2^20 bytes.',
      tables.as_markdown(tables.schedules(facts)),
  ]


def _program(facts: Mapping[str, Any]) -> list[str]:
  """XLA's memory plan of the round program, if the run stored it."""
  program = facts.get('program_memory')
  if not program:
    return []
  amounts = ', '.join(
      f'{name} {tables.megabytes(value)}' for name, value in program.items()
  )
  return [
      'What XLA planned for the compiled round program, in which all clients '
      f'run: {amounts}. Arguments hold the data set and all state; temporary '
      'holds activations, gradients and optimiser state.' + _compilation(facts)
  ]


def _compilation(facts: Mapping[str, Any]) -> str:
  """A sentence on the seconds of compilation; '' if they are not known."""
  seconds = facts.get('compile_seconds')
  if seconds is None:
    return ''
  return (
      ' Tracing it, and compiling it or loading it from the cache, took '
      f'{seconds:.1f} s at the last start.'
  )


def _paper(config, facts, summary: Summary) -> list[str]:
  """The section with the paper's accuracies, this run's, and both settings."""
  targets = paper_targets.find(config)
  if not targets or summary.metric != ACCURACY:
    return []
  table = [['source', 'method', 'accuracy', 'first round', 'setting']]
  for target in targets:
    spread = '' if target.spread is None else f' ± {target.spread:g}'
    reached = '-'
    if target.reached is not None:
      reached = f'{target.reached} (at {target.level:g} %)'
    table.append([
        target.source,
        target.method,
        f'{target.accuracy:g}{spread} %',
        reached,
        target.setting,
    ])
  reached = '-'
  if config['target_accuracy'] is not None:
    first = 'not' if summary.reached is None else summary.reached
    reached = f'{first} (at {100 * config["target_accuracy"]:g} %)'
  table.append([
      '**this run**',
      config['algorithm']['name'],
      f'last {_both_means(summary, summary.last)}, '
      f'best {_both_means(summary, summary.best)}',
      reached,
      setting(config, facts),
  ])
  return [
      '## Beside the paper',
      'The settings differ; read them before the numbers.',
      tables.as_markdown(table),
  ]


def mean_of(summary: Summary, row: Row | None) -> str:
  """The mean metric of one of a run's evaluations, or '-'."""
  if row is None:
    return '-'
  return tables.amount(row[summary.metric.name], summary.metric)


def _both_means(summary: Summary, row: Row | None) -> str:
  """The mean over groups, and that over clients where it differs."""
  over_groups = mean_of(summary, row)
  key = f'{summary.metric.name}/clients'
  if row is None or key not in row:  # Runs of older versions lack it.
    return over_groups
  over_clients = tables.amount(row[key], summary.metric)
  if over_clients == over_groups:
    return over_groups
  return f'{over_groups} over groups, {over_clients} over clients'


def _draw(folder, config, facts, rows, confusion) -> dict[str, str]:
  """Draws the pictures; {} without matplotlib."""
  metric = main_metric(facts)
  summary = summarise(rows, None, metric)
  counts = np.array(facts['partition'], np.int64)
  if counts.ndim != 2 or counts.min() < 0 or counts.sum() > _MOST_EXAMPLES:
    raise ValueError('partition holds no counts of examples')
  title = f'{config["algorithm"]["name"]} on {config["dataset"]}'
  looks = {**pictures.group_looks(facts['groups']), _MEAN: pictures.MEAN_LOOK}
  by_round = {title: _curves(rows, facts)}
  by_class = class_report.content(confusion, summary.last, facts)
  # Labels and parts with these counts; the original indices do not matter.
  num_clients, num_classes = counts.shape
  labels = np.repeat(
      np.tile(np.arange(num_classes), num_clients), counts.reshape(-1)
  )
  ends = np.cumsum(counts.sum(axis=1))[:-1]
  parts = np.split(np.arange(len(labels)), ends)
  try:
    pictures.draw_partition(
        labels,
        parts,
        folder / 'partition.png',
        facts['group_of'],
        title=f'{config["dataset"]}, {named(config["partition"])}',
    )
    pictures.draw_curves(
        by_round,
        folder / 'curves.png',
        f'Test {metric.name}',
        looks=looks,
        percent=metric.percent,
    )
    drawn = dict(
        partition='partition.png',
        curves='curves.png',
        **class_report.draw(folder, by_class, metric),
    )
    if summary.virtual_time is None:
      return drawn
    pictures.draw_curves(
        {title: _curves(rows, facts, 'virtual_time')},
        folder / 'times.png',
        f'Test {metric.name}',
        looks=looks,
        xlabel=VIRTUAL_TIME,
        percent=metric.percent,
    )
  except ImportError:
    _log.info(NO_PICTURES)
    return {}
  return dict(drawn, times='times.png')


_MEAN = 'mean over groups'
VIRTUAL_TIME = 'Virtual time (s)'
# In two lines, so that the labels of adjacent panels do not overlap.
CLIENT_BYTES = 'Sent and received by a client\nin the whole run (mean)'
# More than any data set has; otherwise a damaged count could fill the memory.
_MOST_EXAMPLES = 10**8


def _curves(
    rows, facts, over: str = 'round'
) -> dict[str, tuple[list[float], list[float]]]:
  """Curves of each group and, if there are several, the mean over groups."""
  tests = [row for row in rows if row['split'] == 'test']
  rounds = [row[over] for row in tests]
  groups = pictures.group_looks(facts['groups'])  # In natural order.
  main = main_metric(facts).name
  names = {name: f'{main}/{name}' for name in groups}
  if len(groups) > 1:
    names[_MEAN] = main
  return {
      label: (rounds, [or_nan(row[key]) for row in tests])
      for label, key in names.items()
  }


def or_nan(value: float | None) -> float:
  """A number as a float; NaN (a gap in a curve) for None."""
  return float('nan') if value is None else float(value)
