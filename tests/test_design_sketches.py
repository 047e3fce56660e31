"""The methods sketched in docs/design.md run, and do what they claim."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_het.aggregation.averaging import average_weights
from fedjax_het.aggregation.exchange import make_exchange
from fedjax_het.algorithms import fedavg
from fedjax_het.engine import local as local_lib
from fedjax_het.engine import rounds
from fedjax_het.engine.task import CLASSIFICATION, masked_mean
from fedjax_het.engine.types import (
  Maybe,
  Uplink,
)
from fedjax_het.models import Variables
from tests.tiny import (
  NUM_CLASSES,
  tiny_data,
  tiny_federation,
)

TEXT = pathlib.Path(__file__).resolve().parents[1] / 'docs' / 'design.md'
NOTHING = Variables({}, {})
SIZES = (5, 8, 3, 7)


def sketch(name, federation, **names):
  """A sketch's functions, with all that the text says they share."""
  blocks = dict(
      re.findall(
          r'<!-- sketch: (\w+) -->\n```python\n(.*?)```', TEXT.read_text(), re.S
      )
  )
  names.update(
      jax=jax,
      jnp=jnp,
      optax=optax,
      Maybe=Maybe,
      Uplink=Uplink,
      Variables=Variables,
      NOTHING=NOTHING,
      num_classes=NUM_CLASSES,
      federation=federation,
      local=federation.local,
      cross_entropy=CLASSIFICATION.loss,
      masked_mean=masked_mean,
      **{
          n: getattr(local_lib, n)
          for n in (
              'train_epochs',
          )
      },
  )
  names['exchange'] = make_exchange(federation, 'layerwise')
  for block in ('shared', name):
    exec(compile(blocks[block], f'<{block}>', 'exec'), names)
  return names


def federate(**kwargs):
  """Two groups of two clients, depths 1 and 2, no norm."""
  return tiny_federation((1, 2), norm=False, **kwargs)


def averaging(names, **functions):
  """FedAvg with some functions replaced."""
  return average_weights(names['exchange'], None)._replace(**functions)


def run(algorithm, federation, num_rounds=1, cohort_size=4):
  """The state before and after some rounds, and the last reports."""
  run_round = rounds.make_round(
      algorithm, federation, cohort_size=cohort_size, backend='map'
  )
  state = rounds.init_state(algorithm, federation, jax.random.key(0))
  before = jax.device_get(state)
  for _ in range(num_rounds):
    state, reports = run_round(
        state, tiny_data(SIZES), jax.random.key(1), jax.random.key(2)
    )
  return before, jax.device_get(state), reports


def assert_trees(got, want, **kwargs):
  assert jax.tree.structure(got) == jax.tree.structure(want)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
    np.testing.assert_allclose(a, b, **kwargs)



def moon(federation, mu):
  def cosine(u, v):
    def norm(a):
      return jnp.sqrt(jnp.maximum(jnp.sum(a * a, axis=-1), 1e-16))

    return jnp.sum(u * v, axis=-1) / (norm(u) * norm(v))

  names = sketch('moon', federation, mu=mu, tau=0.5, cosine=cosine)
  exchange = names['exchange']
  return averaging(
      names,
      client_update=names['client_update'],
      init_client=lambda group, i, key: (
          jnp.float32(0.0),
          group.model.init(key),
      ),
      client_model=lambda server, client, group: exchange.assemble(
          group, NOTHING, exchange.download(server, group)
      ),
  )


@pytest.mark.parametrize('mu,num_rounds,equal', [(1.0, 1, True),
                                                 (0.0, 2, True),
                                                 (1.0, 2, False)])
def test_moon_differs_from_fedavg_by_its_pull_alone(mu, num_rounds, equal):
  federation = federate()
  _, got, _ = run(moon(federation, mu), federation, num_rounds)
  _, want, _ = run(fedavg(federation), federation, num_rounds)
  if equal:
    assert_trees(got.server, want.server, rtol=1e-5, atol=1e-6)
  else:
    gaps = jax.tree.map(lambda a, b: np.abs(a - b).max(), got.server,
                        want.server)  # fmt: skip
    assert max(jax.tree.leaves(gaps)) > 1e-3
