"""Predicts how long a run takes in each form, from measured speeds of nets."""

import heapq
import math
from typing import NamedTuple

import jax
import numpy as np

from fedjax_het.engine.local import visit_steps
from fedjax_het.engine.types import Federation
from fedjax_het.experiment import tuned
from fedjax_het.kernels import libraries
from fedjax_het.kernels.libraries import AUTO
from fedjax_het.models import BlockModel

# Another form must be predicted to take less than this share of the time of
# the one that is used without a table.
_GAIN = 0.95
# Predicted seconds below which a run uses no library whose programs each start
# compiles, unless this machine was measured.
_SHORT = 60.0


class Form(NamedTuple):
  """A form.

  Attributes:
    conv_backend: Library of convolutions.
    devices: Over how many devices clients are divided; 1 for what `auto` uses
      without a table.
    date: When the speeds were measured that chose it; '' if none were.
    machine: The other machine on which they were measured; '' for this one.
  """

  conv_backend: str
  devices: int
  date: str = ''
  machine: str = ''


PLAIN = Form(libraries.concrete(AUTO), 1)


def describe(model: BlockModel) -> tuned.Net:
  """What is known of a model's speed from its shapes alone.

  Each kernel of a block counts as if applied at each place of its output.
  """
  params, kernels = model.abstract_variables.params, []
  for name, shape in model.outputs.items():
    places = math.prod(shape[:-1])
    leaves = [leaf.shape for leaf in jax.tree.leaves(params.get(name, {}))]
    kernels += [(s, places * math.prod(s)) for s in leaves if len(s) > 1]
  work = max(1, sum(times for _, times in kernels))
  taps = sum(
      times for s, times in kernels if len(s) == 4 and math.prod(s[:2]) > 1
  )
  width = sum(times * math.log(s[-1]) for s, times in kernels) / work
  number = max(1, len(kernels))
  return tuned.Net(float(work), number, math.exp(width), 2 * taps >= work)


def predict(
    federation: Federation,
    cohort_size: int | None,
    num_rounds: int,
    table: tuned.Table,
    *,
    cached: bool = True,
) -> dict[Form, float]:
  """Seconds of local training of a run, and of compilations at each start.

  A group trains as fast as the measured net that is nearest to its own, per
  multiplication. Clients are divided over devices as
  `engine.balance.assign` does.

  Args:
    federation: The federation, with `sizes`.
    cohort_size: Clients a round; None for all.
    num_rounds: Rounds.
    table: The speeds.
    cached: Whether programs are kept on disk, where they can be; these take no
      time then.

  Returns:
    {form: seconds}, of the forms that all nearest nets were measured in; none
    if there is no net for a group.
  """
  nets = {group.name: describe(group.model) for group in federation.groups}
  near = {name: _nearest(net, table) for name, net in nets.items()}
  if not all(near.values()):
    return {}
  steps = np.asarray(visit_steps(federation.local, federation.sizes))
  images = steps * float(federation.local.batch_size)
  cohort = np.random.default_rng(0).permutation(len(images))[:cohort_size]
  forms = [
      Form(library, devices, table.date, table.machine)
      for library in libraries.CONV_BACKENDS
      for devices in sorted({1, table.devices})
  ]
  found = {}
  for form in forms:
    loads, compiling = np.zeros(len(images)), 0.0
    for group in federation.groups:
      row, case = _row(near[group.name], form), near[group.name].net
      if row is None:
        break
      net = nets[group.name]
      rate = row.images_per_second * case.work / net.work
      loads[group.client_ids] = images[group.client_ids] / rate
      if not cached or libraries.uncacheable(form.conv_backend):
        compiling += row.compile_seconds * net.kernels / case.kernels
    else:
      busiest = _busiest(loads[cohort], form.devices)
      found[form] = num_rounds * busiest + compiling
  return found


def _nearest(net: tuned.Net, table: tuned.Table) -> tuned.Case | None:
  """The measured net of the same kind that is nearest.

  The width says more than the size of a product, whose logarithm counts half.
  """

  def distance(case):
    size = case.net.work / case.net.kernels * net.kernels / net.work
    width = case.net.width / net.width
    return abs(math.log(width)) + abs(math.log(size)) / 2

  cases = [
      case for case in table.cases.values()
      if case.net.convolutional == net.convolutional
  ]  # fmt: skip
  return min(cases, key=distance, default=None)


def _row(case: tuned.Case, form: Form) -> tuned.Row | None:
  """The measurement of a form; dense nets have no library of convolutions."""
  library = form.conv_backend
  if not case.net.convolutional:
    library = PLAIN.conv_backend
  rows = [
      row for row in case.rows
      if (row.conv_backend, row.devices) == (library, form.devices)
  ]  # fmt: skip
  return rows[0] if rows else None


def _busiest(loads: np.ndarray, devices: int) -> float:
  """Seconds of a round: of the device with the most work.

  Args:
    loads: [K] seconds of each client, if all devices work on such clients.
    devices: Their number.

  Returns:
    Seconds; a client alone keeps its device `devices` times as long.
  """
  if devices == 1:
    return float(loads.sum())
  heap = [0.0] * devices
  for load in np.sort(loads)[::-1]:
    heapq.heapreplace(heap, heap[0] + float(load) * devices)
  return max(heap)


def fastest(
    seconds: dict[Form, float], numbers: set[int], fixed: str | None = None
) -> Form:
  """The form that ends first, if it gains enough, else the plain one.

  Args:
    seconds: From `predict`.
    numbers: The allowed numbers of devices.
    fixed: The library of convolutions; None for a choice.

  Returns:
    One of `seconds`, or `PLAIN`.
  """

  short = max(seconds.values(), default=0.0) < _SHORT

  def allowed(form):
    if form.devices not in numbers or libraries.why_not(form.conv_backend):
      return False
    if fixed is not None:
      return form.conv_backend == fixed
    compiled_again = libraries.uncacheable(form.conv_backend)
    return not (form.machine and short and compiled_again)

  seconds = {form: s for form, s in seconds.items() if allowed(form)}
  wanted = fixed or PLAIN.conv_backend, min(numbers)
  plain = next((form for form in seconds if form[:2] == wanted), None)
  if plain is None:
    return PLAIN
  best = min(seconds, key=seconds.__getitem__)
  return best if seconds[best] < _GAIN * seconds[plain] else plain
