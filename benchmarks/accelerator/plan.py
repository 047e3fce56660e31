"""The steps of `benchmarks.accelerator`, in order of importance."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from benchmarks.accelerator import forms
from benchmarks.workloads import WORKLOADS
from fedjax_het.algorithms import ALGORITHMS
from fedjax_het.kernels.auto import Choice, auto_choice

SECTIONS = ('agreement', 'grid', 'workloads', 'memory', 'start', 'table')
# Seconds that a step may take, mostly for compilation.
LIMITS = dict(
    device=120, reference=240, agreement=180, grid=90, workload=150,
    memory=120, start=180, table=None,
)  # fmt: skip
_KEY_CASES = ('fedin/resnet18', 'fedhe/ten_cnns', 'simulation/cifar10')
_QUICK_CASES = ('many/cohort',)
_TORCH = ('PyTorch', 'PyTorch vmap')
# Full-length cells of FedIN's table: (row, column).
TABLE = 'fedin_v2_table1'
_TABLE_CELLS = (
    ('FedIN', 'fashion_mnist_iid'),
    ('FedAvg', 'fashion_mnist_iid'),
    ('FedIN', 'cifar10_iid'),
    ('FedIN', 'cifar10_non_iid'),
)


class Step(NamedTuple):
  """One step, which runs in a child process.

  Attributes:
    name: Its name, 'section/...', or 'reference/...' for steps of a reference.
    task: A function of `benchmarks.accelerator.tasks`.
    args: Its arguments, which JSON can hold.
    limit: Seconds that it may take; None for all remaining time.
    on_cpu: Whether JAX computes on the CPU.
    parallel: Whether other steps may run at the same time, as nothing is timed.
    fresh: Whether it needs its own child process, such as to measure memory.
  """

  name: str
  task: str
  args: dict[str, Any]
  limit: float | None
  on_cpu: bool = False
  parallel: bool = False
  fresh: bool = False


def references(quick: bool) -> list[Step]:
  """The `quick` variant of each algorithm on the CPU."""
  return [
      Step(
          f'reference/{name}', 'run_quick', dict(name=name),
          LIMITS['reference'], on_cpu=True, parallel=True,
      )
      for name in _algorithms(quick)
  ]  # fmt: skip


def agreement(quick: bool) -> list[Step]:
  """The `quick` variant of each algorithm, here and on the CPU."""
  here = [
      Step(
          f'agreement/{name}', 'run_quick', dict(name=name),
          LIMITS['agreement'], parallel=True,
      )
      for name in _algorithms(quick)
  ]  # fmt: skip
  return here + references(quick)


def _algorithms(quick: bool) -> list[str]:
  return ['fedavg', 'private'] if quick else sorted(ALGORITHMS)


def grid(quick: bool, results: Mapping[str, Any]) -> list[list[Step]]:
  """The grid's steps by `forms.stage`, which depends on the results."""
  found, stages = forms.rates(results), [[] for _ in range(5)]
  for family in forms.families(quick):
    best = forms.best_form(found.get(family, {}))
    for form in forms.all_forms(family, quick):
      name = forms.cell_name(family, form)
      args = dict(family=family, form=list(form), quick=quick)
      stages[forms.stage(form, best)].append(
          Step(name, 'grid_cell', args, LIMITS['grid'])
      )
  return stages


def _in_library(case: str, scale: str, form: str) -> Step:
  return Step(
      f'workloads/{case}/{form}', 'library_form',
      dict(case=case, form=form, scale=scale), LIMITS['workload'],
  )  # fmt: skip


def _in_torch(case: str, scale: str, form: str, kind: str) -> Step:
  """A step of PyTorch, during which JAX leaves the device and is on the CPU."""
  return Step(
      f'workloads/{case}/{form}', 'torch_form',
      dict(case=case, form=form, scale=scale, accelerated=kind != 'cpu'),
      LIMITS['workload'], on_cpu=True,
  )  # fmt: skip


def workloads(quick: bool, kind: str) -> tuple[list[Step], list[Step]]:
  """The cases that matter most, and the others."""
  # Measures 'auto' and the backend that it does not choose.
  library = 'auto', 'map' if auto_choice(kind).backend == 'vmap' else 'vmap'

  def steps(cases, scale: str) -> list[Step]:
    # All cases by the library come first: PyTorch needs another child process.
    return [
        *(_in_library(c, scale, form) for c in cases for form in library),
        *(_in_torch(c, scale, form, kind) for c in cases for form in _TORCH),
    ]

  if quick:
    return steps(_QUICK_CASES, 'tiny'), []
  cases = [
      f'{name}/{case}'
      for name, workload in WORKLOADS.items()
      for case in workload.cases
  ]
  rest = [case for case in cases if case not in _KEY_CASES]
  return steps(_KEY_CASES, 'full'), steps(rest, 'full')


def chosen(quick: bool, choice: Choice | None) -> list[Step]:
  """The key cases as `auto` runs them with a new row; [] without a row."""
  if choice is None:
    return []
  label = f'{choice.backend}{choice.chunk}, {choice.lowering}, '
  label += choice.batched_lowering
  steps = []
  for case in _QUICK_CASES if quick else _KEY_CASES:
    step = _in_library(case, 'tiny' if quick else 'full', 'auto')
    steps.append(step._replace(
        name=f'workloads/{case}/{label}',
        args={**step.args, 'choice': list(choice)},
    ))  # fmt: skip
  return steps


def memory(quick: bool) -> list[Step]:
  """Peak memory of a small and a large cohort of the same clients."""
  large = 40 if quick else 1000
  return [
      Step(
          f'memory/{name}/{cohort}', 'cohort_memory',
          dict(name=name, cohort=cohort, clients=large),
          LIMITS['memory'], fresh=True,
      )
      for name in (('fedavg',) if quick else ('fedavg', 'fedin'))
      for cohort in (10, large)
  ]  # fmt: skip


def start(quick: bool) -> list[Step]:
  """The default run from its start to the first round, twice."""
  config = 'configs/fedavg.py:quick' if quick else 'configs/fedin.py'
  return [
      Step(
          f'start/{cache} cache', 'first_round',
          dict(config=config, empty=cache == 'empty'),
          LIMITS['start'], fresh=True,
      )
      for cache in ('empty', 'warm')
  ]  # fmt: skip


def table(quick: bool, data_dir: str | None) -> list[Step]:
  """Cells of FedIN's table, which run until the time ends; [] without data."""
  if not quick and data_dir is None:
    return []
  scale = 'quick' if quick else 'full'
  return [
      Step(
          f'table/{row}/{column}', 'table_cell',
          dict(
              table=TABLE, scale=scale, row=row, column=column,
              data_dir=data_dir,
          ),
          LIMITS['table'], fresh=True,
      )
      for row, column in (_TABLE_CELLS[1:2] if quick else _TABLE_CELLS)
  ]  # fmt: skip


def plan(
    results: Mapping[str, Any],
    *,
    quick: bool,
    kind: str,
    data_dir: str | None = None,
    sections=SECTIONS,
) -> list[Step]:
  """All steps, the most important first; some depend on earlier results.

  Args:
    results: {name: result} of the steps that were run.
    quick: Whether all sizes are tiny.
    kind: The `device_kind` of JAX.
    data_dir: Folder of the data sets of `table`.
    sections: Some of `SECTIONS`.

  Returns:
    The steps, including those that were run.
  """
  stages = grid(quick, results)
  first, rest = workloads(quick, kind)
  choice = forms.choose(forms.rates(results), forms.families(quick), '')
  ordered = [
      *agreement(quick), *stages[0], *first, *memory(quick), *start(quick),
      *stages[1], *stages[2], *stages[3], *chosen(quick, choice), *rest,
      *table(quick, data_dir), *stages[4],
  ]  # fmt: skip
  return [step for step in ordered if _section(step) in sections]


def _section(step: Step) -> str:
  section = step.name.partition('/')[0]
  return 'agreement' if section == 'reference' else section
