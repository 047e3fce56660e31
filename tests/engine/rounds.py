"""When the synchronous rounds of given cohorts end."""

import numpy as np

from fedjax_het.engine.clock import Fleet, synchronous_rounds


def round_ends(fleet: Fleet, cohorts) -> np.ndarray:
  """[rounds] float64, the seconds in which rounds of these cohorts end."""
  return np.array([end for end, _ in synchronous_rounds(fleet, cohorts)])
