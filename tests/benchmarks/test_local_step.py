"""The command that times local steps."""

import json
import sys

import optax
import pytest

from benchmarks import local_step, lowerings, nets, step_profile


@pytest.mark.slow
@pytest.mark.usefixtures('not_stored')
def test_a_step_of_each_backend(monkeypatch, tmp_path, capsys):
  monkeypatch.setitem(nets.NETS, 'mini_resnet6', (4, optax.sgd))
  monkeypatch.setattr(nets, 'INPUT_SHAPE', (8, 8, 1))
  monkeypatch.setattr(
      nets.programs, 'matrix_product', lambda: (lambda: None, 1)
  )
  path = tmp_path / 'steps.json'
  command = ['local_step', '--models=mini_resnet6', '--quick']
  monkeypatch.setattr(sys, 'argv', [*command, f'--output={path}'])
  local_step.main()
  steps = json.loads(path.read_text())['milliseconds']['mini_resnet6']
  assert tuple(steps) == lowerings.libraries()
  assert all(step > 0 for step in steps.values())
  assert '| mini_resnet6 |' in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures('users_generator')
def test_clients_are_divided_over_devices(monkeypatch):
  monkeypatch.setitem(nets.NETS, 'mlp', (4, optax.sgd))
  monkeypatch.setattr(nets, 'INPUT_SHAPE', (4, 4, 1))
  program = nets.local_epoch('mlp', clients=2)
  program.call()
  assert program.num_images == 2 * 4 * nets.STEPS


@pytest.mark.slow
def test_pytorch_does_the_same_steps(monkeypatch):
  pytest.importorskip('torch', reason='PyTorch is an optional extra')
  monkeypatch.setitem(nets.NETS, 'mlp', (4, optax.sgd))
  monkeypatch.setattr(nets, 'INPUT_SHAPE', (4, 4, 1))
  monkeypatch.setattr(local_step, 'libraries', lambda: ('xla',))
  steps = local_step.beside_torch('mlp', 1)
  assert tuple(steps) == ('xla', 'torch')
  assert all(step > 0 for step in steps.values())


@pytest.mark.slow
@pytest.mark.usefixtures('not_stored')
def test_a_profile_has_the_products_of_a_step(monkeypatch, tmp_path, capsys):
  monkeypatch.setitem(nets.NETS, 'mlp', (32, optax.sgd))
  path = tmp_path / 'profile.json'
  command = ['step_profile', '--models=mlp', f'--output={path}']
  monkeypatch.setattr(sys, 'argv', command)
  step_profile.main()
  found = json.loads(path.read_text())['nets']['mlp']
  # 3 passes of 3,072 x 64, 64 x 64 and 64 x 10 numbers, batches of 32.
  assert found['gflop'] == pytest.approx(
      3 * 32 * 2 * (3072 * 64 + 64 * 64 + 64 * 10) / 1e9
  )
  products = {'ynn_fusion', 'dot', 'dot_general'} & found['operations'].keys()
  assert products and all(found['operations'][name] > 0 for name in products)
  assert '| others |' in capsys.readouterr().out


@pytest.mark.slow
def test_products_of_dense_layers_in_both_libraries(monkeypatch, tmp_path):
  pytest.importorskip('torch', reason='PyTorch is an optional extra')
  from benchmarks import dense_products

  path = tmp_path / 'products.json'
  command = ['dense_products', '--quick', f'--output={path}']
  monkeypatch.setattr(sys, 'argv', command)
  dense_products.main()
  rates = json.loads(path.read_text())['gflops']
  assert len(rates) == len(dense_products.PRODUCTS)
  for found in rates.values():
    assert found.keys() == {'XLA', 'PyTorch'} and min(found.values()) > 0
