"""What groups and local training refuse."""

import dataclasses

import jax
import numpy as np
import pytest

from fedjax_het.algorithms import fedavg
from fedjax_het.engine import rounds
from fedjax_het.engine.types import Group
from tests.tiny import tiny_data, tiny_federation, tiny_model


@pytest.mark.parametrize(
    ('changes', 'sizes', 'public', 'message'),
    [
        (dict(), (5, 8, 3), 0, 'of 3 clients, but the groups hold 4'),
        (dict(), (5, 8, 3, 4, 4), 0, 'of 5 clients, but the groups hold 4'),
        (
            dict(num_public=8), (5, 8, 3, 4), 4,
            r'data has 4 examples, but Federation\(num_public=8\)',
        ),
        (dict(num_public=8), (5, 8, 3, 4), 0, 'data has 0 examples'),
        (
            dict(sizes=np.array([5, 9, 3, 4])), (5, 8, 3, 4), 0,
            'a client of 9 examples, but no client of the data has more than 8',
        ),
    ],
)  # fmt: skip
def test_data_of_another_federation_are_refused(
    changes, sizes, public, message
):
  """In a traced program a client without data would get another's."""
  federation = dataclasses.replace(tiny_federation((1, 2)), **changes)
  algorithm, key = fedavg(federation), jax.random.key(0)
  state = rounds.init_state(algorithm, federation, key)
  run_round = rounds.make_round(algorithm, federation, cohort_size=2)
  with pytest.raises(ValueError, match=message):
    run_round(state, tiny_data(sizes, public=public), key, key)


@pytest.mark.parametrize('name', ['loss', 'clients', 'bytes_up', 'lost'])
def test_a_metric_that_has_the_name_of_another_entry_is_refused(name):
  federation = tiny_federation((1, 2))
  plain, key = fedavg(federation), jax.random.key(0)

  def client_update(*args):
    client, uplink, metrics = plain.client_update(*args)
    return client, uplink, {**metrics, name: metrics['train_loss']}

  algorithm = plain._replace(client_update=client_update)
  state = rounds.init_state(algorithm, federation, key)
  run_round = rounds.make_round(algorithm, federation, cohort_size=2)
  with pytest.raises(ValueError, match=f"returns a metric '{name}', but"):
    run_round(state, tiny_data((5, 8, 3, 4)), key, key)


def test_a_group_without_clients_is_refused():
  with pytest.raises(ValueError, match="Group 'none' has no client"):
    Group('none', tiny_model(1), np.array([], np.int32))
