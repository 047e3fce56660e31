"""Forms of a round: mapping, lowering and dtype of matrix products.

A cell of the grid is one form of a FedAvg round in which 64 clients train a
model of one family.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
import contextlib
import math
import time
from typing import Any, NamedTuple

import jax
import optax

from benchmarks import common, flops, memory, nets, programs
from fedjax_het.algorithms import fedavg
from fedjax_het.engine.mapping import Backend
from fedjax_het.kernels.auto import UNMEASURED, Choice, using_choice
from fedjax_het.models import create

CHUNKS = (1, 2, 4, 8, 16, 32, 64)
MAPPINGS = ('map', *(f'vmap{chunk}' for chunk in CHUNKS))
LOWERINGS = ('native', 'gemm')
# Dtypes of products. 'default' is JAX's default for float32 operands: TF32 on
# NVIDIA GPUs that have it, bfloat16 on TPUs, float32 on CPUs.
MATMULS = ('default', 'float32', 'bfloat16')
# {family: (batch size, optimizer)}; the model of that name represents a family.
FAMILIES = {**nets.NETS, 'mlp': (memory.IMAGES // 2, optax.sgd)}
QUICK_FAMILIES = ('mlp', 'dropout_cnn')
# Their programs do not depend on the lowering; only the first is measured.
WITHOUT_CONVOLUTIONS = ('mlp', 'vit_t16')
# Forms whose relative difference is smaller count as equal; the smaller chunk
# is then preferred.
NOISE = 0.02


class Form(NamedTuple):
  """One way to run a round.

  Attributes:
    mapping: One of `MAPPINGS`.
    lowering: One of `LOWERINGS`.
    matmul: One of `MATMULS`.
  """

  mapping: str
  lowering: str
  matmul: str

  @property
  def chunk(self) -> int | None:
    """Clients in a batch; None for `map`."""
    if self.mapping == 'map':
      return None
    return int(self.mapping.removeprefix('vmap'))

  @property
  def backend(self) -> Backend:
    """The engine's backend."""
    return Backend('map' if self.chunk is None else 'vmap', self.chunk)

  @contextlib.contextmanager
  def active(self) -> Iterator[None]:
    """A context in which programs are traced in this form."""
    row = UNMEASURED._replace(
        lowering=self.lowering, batched_lowering=self.lowering
    )
    precision = 'float32' if self.matmul == 'float32' else None
    with using_choice(row), jax.default_matmul_precision(precision):
      yield


def all_forms(family: str, quick: bool) -> list[Form]:
  """The grid of a family; only a few forms in a quick run."""
  ways = LOWERINGS[:1] if family in WITHOUT_CONVOLUTIONS else LOWERINGS
  mappings = ('map', 'vmap2') if quick else MAPPINGS
  forms = [Form(m, way, 'default') for m in mappings for way in ways]
  if quick:
    if family == QUICK_FAMILIES[0]:
      forms.append(Form('map', 'native', 'bfloat16'))
    return forms
  return forms + [
      form._replace(matmul=m) for m in MATMULS[1:] for form in forms
  ]


def cell_name(family: str, form: Form) -> str:
  """The name of a cell's step."""
  return '/'.join(('grid', family, *form))


def stage(form: Form, best: Form | None) -> int:
  """How early a form is measured, 0 first.

  Args:
    form: The form.
    best: The family's fastest form with the default dtype so far, or None.

  Returns:
    0: `map` and chunks of 16; 1: chunks of 4 and 64; 2: other dtypes in the
    best form; 3: the other chunks; 4: the rest.
  """
  if form.matmul != 'default':
    return 2 if best is not None and form[:2] == best[:2] else 4
  if form.chunk in (None, 16):
    return 0
  return 1 if form.chunk in (4, 64) else 3


def seconds_per_call(call: Callable[[], object], least: float) -> float:
  """Minimum time of at least two calls and `least` seconds, after a first."""
  call()
  best, spent, times = math.inf, 0.0, 0
  while times < 2 or spent < least:
    begin = time.perf_counter()
    call()
    last = time.perf_counter() - begin
    best, spent, times = min(best, last), spent + last, times + 1
  return best


def measure_cell(family: str, form: Form, quick: bool) -> dict[str, Any]:
  """Compiles and times one cell.

  Args:
    family: A key of `FAMILIES`.
    form: How the round is run.
    quick: Whether the net and the cohort are tiny.

  Returns:
    images_per_second, tflops (10^12 operations of products per second),
    compile_seconds, megabytes (planned by XLA).
  """
  batch_size, optimizer = FAMILIES[family]
  clients, steps = (4, 1) if quick else (CHUNKS[-1], 2)
  shape, options = nets.INPUT_SHAPE, dict(matmul_dtype='float32')
  if form.matmul == 'bfloat16':
    options['matmul_dtype'] = 'bfloat16'
  if family == 'mlp':
    shape = memory.INPUT_SHAPE
    options |= memory.OPTIONS
  elif quick:
    options['width'] = 1 / 16
  model = create(family, shape, 10, **options)
  federation, data = common.make_federation(
      model,
      clients,
      batch_size * steps,
      common.local_training(optimizer, batch_size=batch_size),
  )
  task = programs.Round(fedavg(federation), federation, data, clients)
  images = clients * batch_size * steps
  with form.active():
    program = programs.library(task, form.backend, images)
    seconds = seconds_per_call(program.call, 0.05 if quick else 0.5)
  return dict(
      images_per_second=images / seconds,
      tflops=flops.training_flops(model) * images / seconds / 1e12,
      compile_seconds=program.compile_seconds,
      megabytes=program.megabytes,
  )


Rates = Mapping[str, Mapping[Form, float]]


def rates(results: Mapping[str, Mapping[str, Any]]) -> dict[str, dict]:
  """{family: {form: images per second}} of the measured cells."""
  found: dict[str, dict[Form, float]] = {}
  for name, result in results.items():
    kind, _, rest = name.partition('/')
    if kind == 'grid':
      family, *form = rest.split('/')
      row = found.setdefault(family, {})
      # A form that failed, such as for lack of memory, counts as the slowest.
      row[Form(*form)] = result.get('images_per_second', 0.0)
  return found


def best_form(row: Mapping[Form, float], matmul: str = 'default'):
  """The fastest form of one family with a dtype of products, or None."""
  known = {f: rate for f, rate in row.items() if f.matmul == matmul and rate}
  return max(known, key=known.get, default=None)


def of_all_lowerings(family: str, row: Mapping[Form, float]):
  """{form: rate} with all lowerings; these are equal without convolutions."""
  if family not in WITHOUT_CONVOLUTIONS:
    return dict(row)
  return {
      form._replace(lowering=way): rate
      for form, rate in row.items()
      for way in LOWERINGS
  }


def scores(found: Rates) -> dict[Form, float]:
  """The speed of each form over all families, with the default dtype.

  Args:
    found: See `rates`.

  Returns:
    {form: geometric mean over families of its rate, relative to the family's
    fastest form}, for forms that were measured in every family.
  """
  tables = [
      {
          form: rate
          for form, rate in of_all_lowerings(family, row).items()
          if form.matmul == 'default'
      }
      for family, row in found.items()
  ]
  if not tables or not all(tables):
    return {}
  common_forms = set.intersection(*map(set, tables))
  fastest = [max(table.values()) or 1.0 for table in tables]
  return {
      form: math.prod(
          table[form] / most for table, most in zip(tables, fastest)
      )
      ** (1 / len(tables))
      for form in common_forms
  }


def families(quick: bool) -> tuple[str, ...]:
  """The families of nets that the grid measures."""
  return QUICK_FAMILIES if quick else tuple(FAMILIES)


def choose(
    found: Rates, wanted: Collection[str], source: str
) -> Choice | None:
  """The row of `kernels.auto` that follows from the grid.

  Args:
    found: See `rates`.
    wanted: The families that must have been measured, see `families`.
    source: The row's text on its measurements.

  Returns:
    The row; None if `map` and `vmap` were not both measured in every family
    with both lowerings, or one of them always fails in some family.
  """
  if not found.keys() >= set(wanted):
    return None
  by_form, rows = scores(found), {}
  for kind in ('map', 'vmap'):
    mine = {f: score for f, score in by_form.items() if f.backend.kind == kind}
    measured = {form.lowering for form in mine}
    if len(measured) < len(LOWERINGS) or not max(mine.values()):
      return None
    enough = (1 - NOISE) * max(mine.values())
    rows[kind] = min(
        (form for form, score in mine.items() if score >= enough),
        key=lambda form: (form.chunk or 0, -mine[form]),
    )
  one, many = rows['map'], rows['vmap']
  return Choice(
      backend='vmap' if by_form[many] >= by_form[one] else 'map',
      chunk=many.chunk,
      lowering=one.lowering,
      batched_lowering=many.lowering,
      source=source,
  )
