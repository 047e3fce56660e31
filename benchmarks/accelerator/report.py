"""The tables of `benchmarks.accelerator`."""

from collections.abc import Callable, Mapping
import math
from typing import Any

from benchmarks import common
from benchmarks.accelerator import agreement, forms
from fedjax_het.kernels.auto import Choice

Results = Mapping[str, Mapping[str, Any]]


def _of(results: Results, section: str) -> dict[str, Mapping[str, Any]]:
  """{rest of the name: result} of the steps of a section."""
  found = {}
  for name, result in results.items():
    first, _, rest = name.partition('/')
    if first == section:
      found[rest] = result
  return found


def _failure(result: Mapping[str, Any]) -> str:
  """The status and error of a step without numbers; '' for other steps."""
  if result['status'] in ('ok', 'partial'):
    return ''
  return f'{result["status"]}: {result["error"]}'


def _cell(value: Any) -> Any:
  return '-' if value is None else value


def agreement_rows(results: Results) -> list[list[Any]]:
  """Rows of algorithm, seconds, largest difference, metric, verdict."""
  rows, references = [], _of(results, 'reference')
  for name, here in sorted(_of(results, 'agreement').items()):
    seconds, there = here.get('seconds', '-'), references.get(name)
    failure = _failure(here)
    if not failure and there is not None and _failure(there):
      failure = f'reference {_failure(there)}'
    if failure:
      rows.append([name, seconds, '-', '-', failure])
    elif there is None:
      rows.append([name, seconds, '-', '-', 'runs; no reference yet'])
    else:
      found = agreement.compare(here['rows'], there['rows'])
      verdict = 'agrees' if found.agrees else 'DIFFERS'
      if here['jax'] != there['jax']:
        verdict += f' (reference of jax {there["jax"]})'
      difference = f'{found.difference:.1e}'
      rows.append([name, seconds, difference, found.where or '-', verdict])
  return rows


def grid_rows(results: Results) -> list[list[Any]]:
  """Rows of family, form, its numbers, and its rate relative to the best."""
  rows = []
  found, cells = forms.rates(results), _of(results, 'grid')
  for family, row in found.items():
    best = forms.best_form(row)
    for form, rate in sorted(row.items(), key=lambda item: -item[1]):
      result = cells['/'.join((family, *form))]
      if failure := _failure(result):
        rows.append([family, *form, '-', '-', '-', '-', failure])
        continue
      share = rate / row[best] if best else math.nan
      rows.append([
          family, *form, rate, result['tflops'], result['compile_seconds'],
          result['megabytes'], share,
      ])  # fmt: skip
  return rows


def workload_rows(results: Results) -> list[list[Any]]:
  """Rows of case, form, its numbers, and its rate relative to PyTorch's."""
  cells, rows = _of(results, 'workloads'), []
  for name, result in cells.items():
    case, _, form = name.rpartition('/')
    if failure := _failure(result):
      rows.append([case, form, '-', '-', '-', failure])
      continue
    eager = cells.get(f'{case}/PyTorch', {}).get('images_per_second')
    rate = result['images_per_second']
    rows.append([
        case, form, rate, _cell(result['compile_seconds']),
        _cell(result['megabytes']), rate / eager if eager else '-',
    ])  # fmt: skip
  return rows


def _plain(*keys: str) -> Callable[[Results, str], list[list[Any]]]:
  """Rows of a section's steps with these entries of their results."""

  def rows(results: Results, section: str) -> list[list[Any]]:
    return [
        [name, *(_cell(result.get(key)) for key in keys), _failure(result)]
        for name, result in _of(results, section).items()
    ]

  return rows


_MEMORY = ('host', 'device', 'xla')
_START = ('first_round', 'whole')
_TABLE = ('rounds', 'round_seconds', 'accuracy')


def as_markdown(
    results: Results, device: Mapping[str, Any] | None, choice: Choice | None
) -> str:
  """All tables.

  Args:
    results: {name: result} of the steps.
    device: Result of `tasks.device`; None if only references were run.
    choice: The resulting row of `kernels.auto`, or None.

  Returns:
    Markdown.
  """
  lines = ['# Measurements on an accelerator', '']
  if device is not None:
    versions = device['machine']['versions']
    listed = ', '.join(f'{k} {v}' for k, v in versions.items() if v)
    lines += [f'{device["devices"]} x {device["kind"]}; {listed}.', '']
  sections = [
      (
          'Every algorithm: `quick` here and on the CPU',
          ['algorithm', 'seconds', 'largest difference', 'of', 'verdict'],
          agreement_rows(results),
      ),
      (
          'Forms of a round of 64 clients',
          ['family', 'mapping', 'lowering', 'products', 'images/s', 'TFLOP/s',
           'compile, s', 'XLA, MB', 'relative to the best default'],
          grid_rows(results),
      ),
      (
          'Workloads',
          ['workload', 'form', 'images/s', 'compile, s', 'MB',
           'times eager PyTorch'],
          workload_rows(results),
      ),
      (
          'Peak memory by cohort',
          ['algorithm and cohort', 'host, MB', 'device, MB', 'XLA, MB', ''],
          _plain(*_MEMORY)(results, 'memory'),
      ),
      (
          'From the start to the first round',
          ['cache of programs', 'first round, s', 'whole run, s', ''],
          _plain(*_START)(results, 'start'),
      ),
      (
          'Full-length cells of FedIN v2, Table 1 (with `--data-dir`)',
          ['cell', 'rounds', 's a round', 'accuracy', ''],
          _plain(*_TABLE)(results, 'table'),
      ),
  ]  # fmt: skip
  for title, header, rows in sections:
    text = common.markdown(header, rows) if rows else 'Not measured yet.'
    lines += [f'## {title}', '', text, '']
  lines += ['## What `auto` should choose', '', *advice(results, choice), '']
  return '\n'.join(lines)


def advice(results: Results, choice: Choice | None) -> list[str]:
  """Lines on what `auto` should choose and its speed in each family."""
  if choice is None:
    return ['The grid is not far enough: run the same command again.']
  lines = [
      f'- backend `{choice.backend}`, chunk {choice.chunk}',
      f'- convolutions of one client: `{choice.lowering}`; of a batch of '
      f'clients: `{choice.batched_lowering}`',
  ]
  chosen = forms.Form(
      'map' if choice.backend == 'map' else f'vmap{choice.chunk}',
      choice.lowering if choice.backend == 'map' else choice.batched_lowering,
      'default',
  )
  for family, row in forms.rates(results).items():
    best = forms.best_form(row)
    share = forms.of_all_lowerings(family, row)[chosen] / row[best]
    lines.append(
        f'- {family}: {share:.0%} of its best form ({", ".join(best[:2])})'
    )
  return lines
