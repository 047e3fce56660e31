"""report.md of a workdir."""

from collections.abc import Mapping
import pathlib
from typing import Any

from fedjax_het.engine.task import ACCURACY
from fedjax_het.files import write_atomically
from fedjax_het.reporting import class_report, paper_targets, tables
from fedjax_het.reporting.confusion_file import read_confusion
from fedjax_het.reporting.report_pictures import NO_PICTURES, draw
from fedjax_het.reporting.run_files import Row, fitting, read_run
from fedjax_het.reporting.setting import setting
from fedjax_het.reporting.summary import Summary, main_metric, summarise


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
    drawn = draw(folder, config, facts, rows, confusion)
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
    table.append([
        target.source,
        target.method,
        f'{target.text} %',
        target.first_round,
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
