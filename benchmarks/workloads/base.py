"""What a workload is: a round of the library, and the same work by others."""

from collections.abc import Callable
import functools
from typing import NamedTuple

from benchmarks import common
from benchmarks.programs import Program, Round

try:
  import torch
except ImportError:
  torch = None

# 'map' or 'vmap' is what 'auto' chooses.
BACKENDS = ('map', 'vmap', 'shard_map')
ONE_CLIENT_AT_A_TIME = ('map', 'shard_map')


class Reference(NamedTuple):
  """The same work without the library.

  Attributes:
    make: `(steps) -> Program`, a call of which takes that many local steps.
    steps: Of a call; few where they are slow.
    slow: Whether fewer repetitions have to do.
    once: Whether a single call has to do, with none before it.
  """

  make: Callable[[int], Program]
  steps: int
  slow: bool = False
  once: bool = False


class Case(NamedTuple):
  """One architecture or budget of a workload.

  Attributes:
    task: Makes the round.
    num_images: Images that it trains on, each once an epoch.
    flops: Useful operations an image: of the matrix products of training.
    references: {name: Reference}.
    backends: Those that are timed besides 'auto'; each is compiled.
    onednn: Whether it is timed with oneDNN's convolutions, too.
    cohorts: Two sizes of a cohort whose peak memory is compared, or none.
  """

  task: Callable[[], Round]
  num_images: int
  flops: float
  references: dict[str, Reference]
  backends: tuple[str, ...] = ()
  onednn: bool = True
  cohorts: tuple[int, ...] = ()


class Workload(NamedTuple):
  """Cases that belong together.

  Attributes:
    make: `(case, scale) -> Case`; 'full' is what is reported, 'quick' a look
      at everything within minutes, 'tiny' nets and clients for tests.
    cases: Their names.
    quick: Those of a quick run.
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
  """The references that can be had: without PyTorch the naive form alone.

  Args:
    naive: Plain JAX; None where that takes too long.
    eager: PyTorch, one client after another.
    stacked: PyTorch over stacked nets; at most four steps.
    steps: Of the round, and so of the eager form.
    naive_once: Whether the naive form is called once only.
    naive_steps: Of a call of it.
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
  """Makes SGD of parameters."""
  return functools.partial(torch.optim.SGD, lr=lr, momentum=momentum)


def torch_adam(params):
  """Adam of parameters, fused."""
  return torch.optim.Adam(params, lr=common.LEARNING_RATE, fused=True)
