"""Options of models that a config does not list."""

import pytest

from fedjax_het.experiment.config import default_config, group_spec
from fedjax_het.experiment.open_entries import open_entry


def opened(*keys, **given):
  config = default_config('fedepth')
  for key in keys:
    open_entry(config, key, given)
  return config


def test_an_option_of_all_models():
  config = opened('model.init')
  config.model.init = 'torch'
  name = next(iter(config.groups))
  assert group_spec(config, name).options['init'] == 'torch'


def test_an_option_of_one_group_which_was_a_number():
  before = default_config('fedepth')
  name, *others = before.groups
  assert isinstance(before.groups[name], int)
  config = opened(f'groups.{name}.init', f'groups.{name}.budget')
  config.groups[name].init = 'torch'
  config.groups[name].budget = '1/2'
  spec = group_spec(config, name)
  assert (spec.model, spec.clients) == (name, before.groups[name])
  assert spec.options['init'] == 'torch' and spec.method == {'budget': '1/2'}
  assert all('init' not in group_spec(config, n).options for n in others)


def test_options_are_those_of_the_model_that_is_given():
  name = next(iter(default_config('fedepth').groups))
  key = f'groups.{name}.preact_shortcut'
  assert 'preact_shortcut' not in group_spec(opened(key), name).options
  config = default_config('fedepth')
  open_entry(config, key, {f'groups.{name}.model': 'preresnet20'})
  assert config.groups[name].preact_shortcut is True
  with pytest.raises(ValueError, match="Unknown model 'preresnet2'"):
    open_entry(config, key, {f'groups.{name}.model': 'preresnet2'})


@pytest.mark.parametrize('key', ['model.ini', 'groups.x.init', 'local.init'])
def test_other_keys_are_left_to_the_check(key):
  config = opened(key)
  assert config.to_dict() == default_config('fedepth').to_dict()
