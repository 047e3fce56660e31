"""A method's needs: which configs are refused, and what the builder provides.

A toy method, which is registered only in `ALGORITHMS`, declares needs.
"""

import json

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest

from fedjax_het import experiment
from fedjax_het.algorithms import ALGORITHMS, fedavg
from fedjax_het.data.federated import NO_LABEL
from fedjax_het.engine.needs import Needs, needs_of, requires
from fedjax_het.engine.types import Visit
from fedjax_het.experiment.stored_config import with_new_entries
from fedjax_het.models import Block, Head, model_options
from tests.algorithms import suite
from tests.experiment.tiny_runs import tiny_config
from tests.mutation.run import ROOT, sources
from tests.tiny import with_group_options

pytestmark = pytest.mark.usefixtures('undrawn')

seen = []


def test_a_method_must_return_an_algorithm(monkeypatch):
  monkeypatch.setitem(ALGORITHMS, 'toy', lambda federation: None)
  with pytest.raises(
      ValueError, match='toy must return a FederatedAlgorithm, got None'
  ):
    experiment.build(tiny_config('toy'))


def test_a_metric_must_be_a_scalar(monkeypatch, tmp_path):
  def toy(federation):
    method = fedavg(federation)

    def client_update(*args):
      client, uplink, metrics = method.client_update(*args)
      return client, uplink, {**metrics, 'mine': jnp.zeros(3)}

    return method._replace(client_update=client_update)

  monkeypatch.setitem(ALGORITHMS, 'toy', toy)
  with pytest.raises(ValueError, match=r"'mine' of shape \(3,\); a metric is"):
    experiment.run(tiny_config('toy'), tmp_path)


def side_exit(group, federation):
  """A head 'side' behind the first block."""
  del federation
  first, *_, last = group.model.blocks
  return (Head(first.name, (Block('side', last.module),)),)


@pytest.fixture
def toy(monkeypatch):
  """A function that registers FedAvg as 'toy' with the given needs."""

  def register(**needs):
    @requires(**needs)
    def constructor(federation, *, level: int = 1):
      seen.append((federation, level))
      return fedavg(federation)._replace(facts=lambda: dict(level=level))

    monkeypatch.setitem(ALGORITHMS, 'toy', constructor)
    return constructor

  seen.clear()
  return register


def section(**entries):
  return ml_collections.ConfigDict(entries)


def refused(config, call=experiment.check):
  with pytest.raises(ValueError) as error:
    call(config)
  assert '\n' not in str(error.value)
  return str(error.value)


def test_needs_that_do_not_exist_are_refused():
  with pytest.raises(ValueError, match=r'public must be .* or None, got True'):
    Needs(public=True)
  with pytest.raises(TypeError):
    requires(server=True)
  assert needs_of(lambda federation: None) == Needs()


def test_methods_declare_that_they_read_the_number_of_rounds():
  for name, constructor in ALGORITHMS.items():
    texts = [(ROOT / path).read_text() for path in sources(name)]
    reads = any('.num_rounds' in text for text in texts)
    assert needs_of(constructor).num_rounds == reads, name


def test_a_registered_method_needs_no_further_line(toy, tmp_path):
  """Its default config is valid; it runs, resumes and passes the suite."""
  toy(
      public='unlabelled', sizes=True, one_model=True, server_model=True,
      partner=True, keep_optimizer=True, group_options=dict(share='1', top=2),
      heads=side_exit,
  )  # fmt: skip
  config = experiment.default_config('toy')
  experiment.check(config)
  assert config.local.keep_optimizer
  config = tiny_config('toy', num_rounds=1)
  config.server_model = section(model='mlp', depth=4)
  config.groups.small.update(partner='mlp', share='1/2')
  config.groups.large.update(partner=section(model='mlp', hidden=3), top=5)
  result = experiment.run(config, tmp_path)
  assert result.finished and result.summary.rounds == 1
  assert result.facts['level'] == 1 and 'schedules' not in result.facts
  (federation, level), *_ = seen
  large, small = federation.groups
  assert dict(small.options) == dict(share='1/2', top=2)
  assert dict(large.options) == dict(share='1', top=5)
  assert large.model.head_names == small.model.head_names == ('side', 'head')
  # Options in `model` apply to every model that has them.
  assert small.partner.shapes[0] == (8,) and large.partner.shapes[0] == (3,)
  assert federation.server_model.name == 'mlp4'
  assert federation.num_rounds == 1 and federation.num_public == 100
  assert len(federation.sizes) == 5 and level == 1
  assert experiment.run(config, tmp_path).finished
  config.groups.small.share = '1/3'
  message = refused(config, lambda config: experiment.run(config, tmp_path))
  assert "groups.small.share is '1/2' there and '1/3' here" in message
  algorithm, federation = suite.make('toy')
  assert algorithm.init(jax.random.key(0)) is not None
  assert federation.groups[0].options == dict(share='1', top=2)
  assert federation.groups[0].partner and federation.server_model
  assert federation.groups[0].model.head_names == ('side', 'head')


@pytest.mark.parametrize('public', ['unlabelled', 'labelled', None])
def test_a_method_that_declares_no_labels_gets_none_of_the_public_set(
    toy, public
):
  toy(public=public)
  built = experiment.build(tiny_config('toy', public_size=100))
  labels = built.dataset.train_labels
  of_public = labels[np.asarray(built.data.public)]
  want = np.full(100, NO_LABEL) if public == 'unlabelled' else of_public
  for found in (built.data.of_public(), built.data.client(3).of_public()):
    np.testing.assert_array_equal(found.batch(jnp.arange(100)).y, want)
  for k, part in enumerate(built.parts):
    own = built.data.client(k).batch(jnp.arange(len(part))).y
    np.testing.assert_array_equal(own, labels[part])


def test_a_constructor_checks_the_federation_that_it_is_given(toy):
  """As `experiment.build` does, without a config."""
  federation = suite.needed_federation('fedavg')
  for needs, message in (
      (dict(task='regression'), "is made for the task 'regression', not for "),
      (dict(public='labelled'), r'needs a public set, Federation\(num_public='),
      (dict(sizes=True), r'needs Federation\(sizes=\.\.\.\)'),
      (dict(server_model=True), r'needs Federation\(server_model=\.\.\.\)'),
      (dict(partner=True), r'needs Group\(partner=\.\.\.\), which '),
  ):
    with pytest.raises(ValueError, match=f'^constructor {message}') as error:
      toy(**needs)(federation, level=2)
    assert '\n' not in str(error.value)
  with pytest.raises(ValueError) as error:
    toy(one_model=True)(federation, level=2)
  assert str(error.value) == (
      "groups.tiny2: constructor needs one model for all groups, but those of "
      "'tiny1' (tiny1) and 'tiny2' (tiny2) differ; give both one model and the "
      'same options.'
  )
  with pytest.raises(ValueError) as error:
    toy(heads=side_exit)(federation, level=2)
  assert str(error.value) == (
      "groups.tiny1: constructor needs the heads side, which 'tiny1' lacks; "
      'attach them by engine.needs.with_heads(constructor, federation).'
  )
  groups = with_group_options(
      federation, rate=[1.0] * 9, leveel=['1/2'] * 9
  )
  with pytest.raises(ValueError, match="no option 'leveel'; did you mean"):
    toy(group_options=dict(level='1'))(groups, level=2)
  groups = with_group_options(federation, rate=[1.0] * 9, level=[2.0] * 9)
  with pytest.raises(ValueError, match='level must be a string'):
    toy(group_options=dict(level='1'))(groups, level=2)
  assert not seen
  toy(group_options=dict(level=None))(groups, level=2)
  assert seen.pop() == (groups, 2)
  toy(task='classification')(federation, level=2)
  assert seen == [(federation, 2)]


@pytest.mark.parametrize('name', ALGORITHMS)
def test_statistics_stay_on_clients_or_this_is_refused(name):
  """`local_stats` gives each client a model of its own."""
  federation = suite.needed_federation(name, norm=True, local_stats=True)
  if needs_of(ALGORITHMS[name]).local_stats:
    assert suite.make(name, federation)[0].personal
  else:
    with pytest.raises(ValueError) as error:
      suite.make(name, federation)
    assert str(error.value) == (
        f'{name} does not keep running statistics on the clients; set '
        'local_stats=False.'
    )
    # Without running statistics there is nothing to keep.
    federation = suite.needed_federation(name, local_stats=True)
    assert suite.make(name, federation)


@pytest.mark.parametrize(
    ('needs', 'change', 'message'),
    [
        (
            dict(public='labelled'),
            lambda config: config.update(public_size=None),
            'public_size: toy needs a public set; set its number of examples, '
            'such as --config.public_size=100.',
        ),
        (
            dict(server_model=True),
            lambda config: config.update(server_model=None),
            'server_model: toy needs a model of the server; set its name, such '
            'as --config.server_model=resnet18.',
        ),
        (
            dict(),
            lambda config: config.update(server_model='mlp'),
            'server_model: toy has no model of the server; leave it out.',
        ),
        (
            dict(server_model=None),
            lambda config: config.update(server_model='mpl'),
            "Unknown model of server_model 'mpl'; did you mean 'mlp'? Known",
        ),
        (
            dict(server_model=True),
            lambda config: config.update(
                server_model=section(model='mlp', dpth=2)
            ),
            "server_model.dpth: model 'mlp' has no option 'dpth'; did you mean "
            "'depth'? It takes ",
        ),
        (
            dict(partner=True),
            lambda config: config.groups.small.update(partner='mlp'),
            'groups.large.partner: toy needs a second model on each client; ',
        ),
        (
            dict(),
            lambda config: config.groups.small.update(partner='mlp'),
            'groups.small.partner: toy has no second model on a client; leave '
            'it out.',
        ),
        (
            dict(one_model=True),
            lambda config: config.groups.small.update(depth=3, hidden=9),
            "groups.small: toy needs one model for all groups, but those of "
            "'large' (mlp) and 'small' (mlp) differ in depth (2 and 3), hidden "
            '(8 and 9); give both one model and the same options.',
        ),
        (
            dict(group_options=dict(share='1')),
            lambda config: config.groups.small.update(shar='1/2'),
            "groups.small.shar: model 'mlp' with algorithm 'toy' has no option "
            "'shar'; did you mean 'share'? It takes depth, hidden, norm, init, "
            'share.',
        ),
        (
            dict(group_options=dict(share='1')),
            lambda config: config.groups.small.update(share=0.5),
            'groups.small.share must be a string, got 0.5.',
        ),
        (
            dict(group_options=dict(share=0.5)),
            lambda config: config.groups.small.update(share=float('nan')),
            'groups.small.share must be a finite number, got nan.',
        ),
        (
            dict(),
            lambda config: config.groups.small.update(share='1'),
            "groups.small.share: model 'mlp' has no option 'share'; ",
        ),
        (
            dict(),
            lambda config: config.local.update(keep_optimizer=True),
            'local.keep_optimizer=True: toy begins the optimiser anew in each ',
        ),
    ],
)
def test_what_a_method_lacks_or_cannot_use_is_refused(
    toy, needs, change, message
):
  toy(**needs)
  config = tiny_config('toy')
  with config.unlocked(), config.ignore_type():
    change(config)
  assert refused(config).startswith(message)


def test_one_model_may_be_written_in_two_ways(toy):
  """An option set to its default gives the same model."""
  toy(one_model=True)
  config = tiny_config('toy')
  config.groups = section(
      small=section(model='mlp', clients=3, hidden=8),
      large=section(
          model='mlp', clients=2, depth=model_options('mlp')['depth']
      ),
  )
  experiment.check(config)
  config.groups.large.depth += 1
  assert 'differ in depth (3 and 2); give both one' in refused(config)


OLD = dict(
    fedepth=(
        dict(budgets='x1_6:1/6,x1:14.51MB'),
        dict(x1_6=dict(clients=2, model='mlp', budget='1/6'),
             x1=dict(clients=1, budget='14.51MB'), mlp=3),
    ),
    splitmix=(
        dict(budgets='x1_6:1/6 x1:1 mlp:1/2'),
        dict(x1_6=dict(clients=2, model='mlp', budget='1/6'),
             x1=dict(clients=1, budget='1'), mlp=dict(clients=3, budget='1/2')),
    ),
    heterofl=(
        dict(rates='x1_6:1/6 x1:1 mlp:1/2', odds=[]),
        dict(x1_6=dict(clients=2, model='mlp', rate='1/6'),
             x1=dict(clients=1, rate='1'), mlp=dict(clients=3, rate='1/2')),
    ),
)  # fmt: skip


@pytest.mark.parametrize('name', OLD)
def test_strings_of_shares_in_stored_configs_are_group_options(name):
  algorithm, want = OLD[name]
  stored = dict(
      algorithm=dict(name=name, **algorithm),
      groups=dict(x1_6=dict(clients=2, model='mlp'), x1=1, mlp=3),
  )
  before = json.dumps(stored)
  new = with_new_entries(stored)
  assert new['groups'] == want
  assert not {'budgets', 'rates'} & set(new['algorithm'])
  assert json.dumps(stored) == before


def test_names_with_spaces_in_stored_configs_are_tuples():
  for text, names in (('', []), ('x1_6', ['x1_6']), ('x1 mlp', ['x1', 'mlp'])):
    stored = dict(algorithm=dict(name='heterofl', left_out=text))
    assert with_new_entries(stored)['algorithm']['left_out'] == names
    assert stored['algorithm']['left_out'] == text


def test_rates_that_clients_draw_are_levels():
  for rates, levels in (
      ('b:1/3 a:1', ['1', '1/3']),
      ('', ['1', '1/2']),
  ):
    stored = dict(
        algorithm=dict(name='heterofl', rates=rates, odds=[1, 1]),
        groups=dict(mlp=3),
    )
    new = with_new_entries(stored)
    assert new['algorithm']['levels'] == levels and new['groups'] == dict(mlp=3)


@pytest.mark.parametrize(
    ('name', 'change', 'message'),
    [
        (
            'fedepth', lambda config: config.algorithm.update(budgets='a:1'),
            'algorithm.budgets: this entry is now called groups.NAME.budget.',
        ),
        (
            'heterofl', lambda config: config.algorithm.update(rates='a:1'),
            'algorithm.rates: this entry is now called groups.NAME.rate, or ',
        ),
        (
            'fedavg', lambda config: config.update(products='bfloat16'),
            'products: this entry is now called matmul_dtype.',
        ),
        (
            'fedavg', lambda config: config.update(convolutions='onednn'),
            'convolutions: this entry is now called conv_backend.',
        ),
    ],
)  # fmt: skip
def test_old_names_are_refused_with_the_new_one(name, change, message):
  config = tiny_config(name)
  with config.unlocked():
    change(config)
  assert refused(config).startswith(message)
  if name == 'fedepth':
    with pytest.raises(ValueError, match=r'now called groups\.NAME\.budget'):
      experiment.algorithm_config('fedepth', budgets='a:1')


def test_a_method_may_have_an_option_of_an_old_name(toy, monkeypatch):
  def constructor(federation, *, budgets: str = ''):
    del budgets
    return fedavg(federation)

  monkeypatch.setitem(ALGORITHMS, 'toy', constructor)
  config = tiny_config('toy')
  config.algorithm.budgets = 'a:1'
  experiment.check(config)


def test_group_options_reach_the_methods():
  """A group of half the width receives fewer numbers."""
  config = tiny_config('heterofl')
  config.groups.small.rate, config.groups.large.rate = '1/2', '1'
  built = experiment.build(config)
  server = built.algorithm.init(jax.random.key(0))
  sizes = {}
  for group in built.federation.groups:
    client_id = jnp.int32(group.client_ids[0])
    visit = Visit(client_id, jnp.int32(0), jax.random.key(4))
    sent = built.algorithm.downlink(server, group, visit)
    sizes[group.name] = sum(np.size(leaf) for leaf in jax.tree.leaves(sent))
  assert sizes['small'] < sizes['large']
