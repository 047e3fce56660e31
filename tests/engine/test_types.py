"""What groups and local training refuse."""

import numpy as np
import pytest

from fedjax_het.engine.types import Group
from tests.tiny import tiny_model


def test_a_group_without_clients_is_refused():
  with pytest.raises(ValueError, match="Group 'none' has no client"):
    Group('none', tiny_model(1), np.array([], np.int32))
