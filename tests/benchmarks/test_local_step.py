"""The command that times local steps."""

import json
import sys

import optax
import pytest

from benchmarks import local_step, lowerings, nets


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
def test_pytorch_does_the_same_steps(monkeypatch):
  pytest.importorskip('torch', reason='PyTorch is an optional extra')
  monkeypatch.setitem(nets.NETS, 'mlp', (4, optax.sgd))
  monkeypatch.setattr(nets, 'INPUT_SHAPE', (4, 4, 1))
  monkeypatch.setattr(local_step, 'libraries', lambda: ('xla',))
  steps = local_step.beside_torch('mlp', 1)
  assert tuple(steps) == ('xla', 'torch')
  assert all(step > 0 for step in steps.values())
