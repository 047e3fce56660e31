"""Types of workloads: a round of the library and reference programs."""

from collections.abc import Callable
import functools
from typing import NamedTuple

from benchmarks import common
from benchmarks.programs import Program, Round

try:
  import torch
except ImportError:
  torch = None

# On one device 'auto' is 'map' or 'vmap'; a run may also take 'shard_map'.
BACKENDS = ('map', 'vmap', 'shard_map')
ONE_CLIENT_AT_A_TIME = ('map', 'shard_map')


class Reference(NamedTuple):
  """The same training without the library.

  Attributes:
    make: `(steps) -> Program`; a call runs that many local steps.
    steps: Local steps per call; few for slow programs.
    slow: Whether it is repeated less often.
    once: Whether it is called only once, without a first untimed call.
  """

  make: Callable[[int], Program]
  steps: int
  slow: bool = False
  once: bool = False


class Case(NamedTuple):
  """One architecture or budget of a workload.

  Attributes:
    task: Makes the round.
    num_images: Images per round, each once per epoch.
    flops: Operations per image, of the matrix products of training.
    references: {name: Reference}.
    backends: Backends timed in addition to 'auto'.
    onednn: Whether it is also timed with oneDNN's convolutions.
    cohorts: Two cohort sizes whose peak memory is compared, or none.
  """

  task: Callable[[], Round]
  num_images: int
  flops: float
  references: dict[str, Reference]
  backends: tuple[str, ...] = ()
  onednn: bool = True
  cohorts: tuple[int, ...] = ()


class Workload(NamedTuple):
  """A set of cases.

  Attributes:
    make: `(case, scale) -> Case`; the scale is 'full' for reported results,
      'quick' for a run of minutes, or 'tiny' for tests.
    cases: Names of the cases.
    quick: Cases of a quick run.
  """

  make: Callable[[str, str], Case]
  cases: tuple[str, ...]
  quick: tuple[str, ...]


def references(
    naive: Callable[[int], Program] | None,
    eager: Callable[[int], Program],
    stacked: Callable[[int], Program],
    steps: int,
    naive_once: bool = False,
    naive_steps: int = 2,
    **more: Callable[[int], Program],
) -> dict[str, Reference]:
  """The available references: without PyTorch only the naive form.

  Args:
    naive: Plain JAX; None to omit it.
    eager: PyTorch, one client after another.
    stacked: PyTorch over stacked models; at most four steps.
    steps: Local steps of the round and of the eager form.
    naive_once: Whether the naive form is called only once.
    naive_steps: Local steps per call of the naive form.
    **more: Further eager forms.

  Returns:
    {name: Reference}.
  """
  found = {}
  if naive is not None:
    found['naive JAX'] = Reference(
        naive, naive_steps, slow=True, once=naive_once
    )
  if torch is None:
    return found
  return {
      'PyTorch': Reference(eager, steps),
      'PyTorch vmap': Reference(stacked, min(steps, 4), slow=True),
      **{f'PyTorch {name}': Reference(m, steps) for name, m in more.items()},
      **found,
  }


def torch_sgd(lr: float, momentum: float = 0.0):
  """A function that makes SGD for parameters."""
  return functools.partial(torch.optim.SGD, lr=lr, momentum=momentum)


def torch_adam(params):
  """Fused Adam for parameters."""
  return torch.optim.Adam(params, lr=common.LEARNING_RATE, fused=True)
