"""What reports and estimates say a client trains, beside what it is sent."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from fedjax_het.algorithms import ALGORITHMS
from fedjax_het.algorithms.heterofl import heterofl
from fedjax_het.engine.needs import needs_of
from fedjax_het.engine.types import Visit, values_of
from tests.algorithms.suite import Case, make, needed_federation
from tests.tiny import one_model_federation

# {method: options of the two groups}: a client holds a part of the model.
PARTS = dict(
    heterofl=dict(tiny1=dict(rate='1/2'), tiny2=dict(rate='1')),
    fedrolex=dict(tiny1=dict(rate='1/2'), tiny2=dict(rate='1')),
    fjord=dict(tiny1=dict(rate='1/2'), tiny2=dict(rate='1')),
    slimfl=dict(tiny1=dict(rate='1/2'), tiny2=dict(rate='1')),
    scalefl=dict(tiny1=dict(rate='1/2', exit='1/2'), tiny2={}),
    depthfl=dict(tiny1=dict(exit='1/2'), tiny2={}),
    splitmix=dict(tiny1=dict(budget='1/2'), tiny2=dict(budget='1')),
)


def numbers(tree) -> int:
  return sum(leaf.size for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize('name', PARTS)
def test_a_client_trains_the_numbers_that_it_is_sent(name):
  algorithm, federation = make(
      name, needed_federation(name), Case(groups=PARTS[name])
  )
  found = []
  for group in federation.groups:
    visit = Visit(jnp.int32(group.client_ids[0]), jnp.int32(0), None)
    sent = jax.eval_shape(
        lambda key, group=group, visit=visit: values_of(
            algorithm.downlink(
                algorithm.init(key), group, visit._replace(key=key)
            )
        ),
        jax.random.key(0),
    )
    floats = [
        leaf for leaf in jax.tree.leaves(sent) if leaf.dtype == jnp.float32
    ]
    models = algorithm.trained_models(group)
    assert numbers(floats) == sum(model.num_params for model in models)
    found.append(numbers(floats))
  assert found[0] < found[1]


def test_a_drawn_width_is_counted_as_the_widest():
  federation = one_model_federation(norm=False)
  algorithm = heterofl(federation, levels=('1/4', '1/2'), odds=(3, 1))
  half = heterofl(
      dataclasses.replace(
          federation,
          groups=tuple(
              dataclasses.replace(group, options=dict(rate='1/2'))
              for group in federation.groups
          ),
      )
  )
  for group in federation.groups:
    (drawn,), (model,) = (
        method.trained_models(group) for method in (algorithm, half)
    )
    assert drawn.num_params == model.num_params < group.model.num_params


def test_a_second_model_counts():
  # The shared model is the smallest of all groups' models.
  fml, federation = make('fml')
  for group in federation.groups:
    assert fml.trained_models(group) == (
        group.model,
        federation.groups[0].model,
    )


def test_mutual_distillation_counts_every_model():
  federation = one_model_federation(norm=False, num_groups=2)
  budgets = dict(tiny1=dict(budget='2'), tiny2=dict(budget='1'))
  federation = dataclasses.replace(
      federation,
      groups=tuple(
          dataclasses.replace(group, options=budgets[group.name])
          for group in federation.groups
      ),
  )
  algorithm = ALGORITHMS['fedepth'](federation, plan='paper', mkd_models=2)
  found = [algorithm.trained_models(group) for group in federation.groups]
  assert [len(models) for models in found] == [2, 1]


def test_every_method_over_widths_or_depths_is_tried_here():
  shares = {'rate', 'exit'}
  found = {
      name for name, make_method in ALGORITHMS.items()
      if shares & {*needs_of(make_method).group_options}
  }  # fmt: skip
  assert found <= {*PARTS}
