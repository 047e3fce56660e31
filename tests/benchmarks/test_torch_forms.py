"""The benchmarks' PyTorch implementations compute what the library does."""

import copy
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks import naive
from fedjax_het.depthwise import make_stages
from fedjax_het.models import create

torch = pytest.importorskip('torch', reason='PyTorch is an optional extra')

from benchmarks import torch_fedin, torch_models, torch_training  # noqa: E402

RGB, GREY = (32, 32, 3), (28, 28, 1)
LR = 0.1


def count(tree):
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    ('name', 'shape', 'options'),
    [
        ('preresnet20', RGB, {}),
        ('dropout_cnn', RGB, {}),
        ('simple_cnn', RGB, {'norm': 'batch'}),
        ('mlp', GREY, dict(depth=3, hidden=64)),
        ('resnet26', RGB, {}),
        ('vit_t16', RGB, {}),
        *((f'fedhe_cnn{i}', GREY, {}) for i in range(10)),
    ],
)
def test_the_nets_have_equally_many_parameters(name, shape, options):
  model = create(name, shape, 10, **options)
  net = torch_models.mirror(model)
  variables = model.abstract_variables
  assert sum(p.numel() for p in net.parameters()) == count(variables.params)
  buffers = [b for n, b in net.named_buffers() if 'num_batches' not in n]
  assert sum(b.numel() for b in buffers) == count(variables.stats)


_WEIGHTS = {'kernel': 'weight', 'scale': 'weight', 'bias': 'bias'}


def state_of(model, params):
  """{name: tensor} with the names and layouts of the mirrored net."""
  out, shape, image = {}, model.input_shape, None
  for (block, _), after in zip(model.blocks, model.shapes, strict=True):
    # Flattened images have channels last here, and first in PyTorch.
    image = shape if len(shape) == 3 else image
    for path, leaf in jax.tree.leaves_with_path(params[block]):
      *layers, last = (key.key for key in path)
      value = np.asarray(leaf)
      if value.ndim == 4:
        value = value.transpose(3, 2, 0, 1)
      elif value.ndim == 2:
        if image is not None and len(value) == math.prod(image):
          value = value.reshape(*image, -1).transpose(2, 0, 1, 3)
        value = value.reshape(-1, value.shape[-1]).T
      name = '.'.join((block, *layers, _WEIGHTS[last]))
      out[name] = torch.tensor(np.ascontiguousarray(value))
    shape = after
    image = image if len(after) == 3 or not params[block] else None
  return out


def start(name, shape, num=6, **options):
  """A model, its variables, a PyTorch net of equal parameters, and batches."""
  model = create(name, shape, 4, **options)
  variables = model.init(jax.random.key(0))
  net = torch_models.mirror(model)
  net.load_state_dict(state_of(model, variables.params), strict=False)
  x = jax.random.normal(jax.random.key(1), (num, *shape))
  y = jnp.arange(num) % 4
  batch = (
      torch.tensor(np.asarray(x)).permute(0, 3, 1, 2),
      torch.tensor(np.asarray(y), dtype=torch.int64),
  )
  return model, variables, net, (x[None], y[None]), batch


def assert_same(net, want, rtol=1e-4, atol=2e-6):
  got = dict(net.named_parameters())
  assert set(got) == set(want)
  for name, value in want.items():
    np.testing.assert_allclose(
        got[name].detach(), value, rtol=rtol, atol=atol, err_msg=name
    )


def test_a_vision_transformer_computes_the_same():
  model = create('vit_t16', (8, 8, 2), 4, width=2 / 3, head_dim=8)
  variables = model.init(jax.random.key(0))
  net = torch_models.mirror(model)
  params = jax.tree.map(np.asarray, variables.params)
  embed = params.pop('embed')
  patch = embed['patch']['kernel'].reshape(4, 4, 2, -1).transpose(3, 2, 0, 1)
  state = {
      'embed.token': embed['token'],
      'embed.position': embed['position'],
      'embed.patch.weight': patch,
      'embed.patch.bias': embed['patch']['bias'],
  }
  for path, leaf in jax.tree.leaves_with_path(params):
    *layers, last = (key.key for key in path)
    state['.'.join((*layers, _WEIGHTS[last]))] = leaf.T
  state = {n: torch.tensor(np.ascontiguousarray(v)) for n, v in state.items()}
  net.load_state_dict(state)  # Strict: the same names.
  x = np.random.default_rng(0).normal(size=(3, 8, 8, 2)).astype(np.float32)
  want = model.apply(variables, x)
  want = want[0] if isinstance(want, tuple) else want
  got = net(torch.tensor(x).permute(0, 3, 1, 2)).detach()
  np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def sgd(params):
  return torch.optim.SGD(params, lr=LR)


def train_both(loss, params, names, batch):
  """Takes one step, eagerly and in a stack of two; asserts that they agree."""
  stack = torch_training.Stack([copy.deepcopy(loss.net) for _ in range(2)])
  torch_training.train(loss, params, sgd(params), *batch, len(batch[1]))
  data = torch_training.Data(*(t.expand(2, *t.shape) for t in batch))
  stack.train(loss, sgd, data, len(batch[1]), names)
  for name, p in loss.named_parameters():
    for row in stack.params[name]:
      np.testing.assert_allclose(row, p.detach(), rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize(
    ('name', 'shape', 'options'),
    [
        ('dropout_cnn', (8, 9, 2), dict(dropout=0.0, width=1 / 8)),
        ('mlp', (3, 2, 2), dict(depth=3, hidden=5)),
        ('fedhe_cnn0', (6, 5, 1), dict(dropout=0.0, width=1 / 32)),
        ('fedhe_cnn5', (13, 12, 2), dict(dropout=0.0, width=1 / 16)),
    ],
)
def test_a_step_of_a_whole_net(name, shape, options):
  model, variables, net, images, batch = start(name, shape, **options)
  keys = jax.random.split(jax.random.key(0))
  tx = optax.sgd(LR)
  if 'fedhe' in name:
    means = jax.random.normal(jax.random.key(2), (4, 4))
    client = naive.class_logits(model, tx, means)
    loss = torch_training.LogitLoss(net, torch.tensor(np.asarray(means)))
  else:
    client = naive.whole_model(model, tx)
    loss = torch_training.CrossEntropy(net)
  end = client(variables, *images, keys[0])
  train_both(loss, list(net.parameters()), None, batch)
  assert_same(net, state_of(model, end.params))


def test_stages_of_fedepth():
  model, variables, net, images, batch = start(
      'preresnet20', (8, 8, 1), num_blocks=1, width=1 / 4
  )
  stages = make_stages(model, [(0, 1), (1, 2), (2, 3)])
  client = naive.depthwise(stages, optax.sgd(LR))
  end = client(variables, *images, jax.random.key(0))
  for stage in stages:
    loss = torch_training.StageLoss(net, stage)
    names = torch_training.stage_names(loss)
    assert {name.split('.')[1] for name in names} == set(stage.names)
    train_both(loss, loss.trained(), names, batch)
  assert_same(net, state_of(model, end.params), rtol=1e-3, atol=1e-5)


def test_fedin_of_stacked_clients():
  torch.manual_seed(0)
  nets = [torch_fedin.ResNet((1, 1, 1, 1), 1, 4, 1 / 32) for _ in range(2)]
  data = torch_training.noise(2, 4, (16, 16, 1))
  pairs = (torch.rand(2, 4, 2, 4, 4), torch.rand(2, 4, 16))
  rates = dict(lr=1e-3, mu=0.1, lam=0.7)
  labels = data.labels % 4
  before = [copy.deepcopy(net) for net in nets]
  got = torch_training.fedin_epoch(
      nets, data._replace(labels=labels), pairs, 4, **rates
  )
  for k, net in enumerate(before):
    mine = tuple(p[k] for p in pairs)
    torch_fedin.local_epoch(net, data.images[k], labels[k], mine, 4, **rates)
    for name, p in net.named_parameters():
      np.testing.assert_allclose(
          got.params[f'net.{name}'][k], p.detach(), rtol=1e-3, atol=1e-5
      )
    for name, b in net.named_buffers():
      np.testing.assert_allclose(
          got.buffers[f'net.{name}'][k], b, rtol=1e-4, atol=1e-6
      )


def test_a_round_of_averaging():
  """The mean of one step of equally large clients is a step on all data."""
  net = start('mlp', (2, 2, 1), depth=2, hidden=3)[2]
  data = torch_training.noise(3, 4, (2, 2, 1))
  data = data._replace(labels=data.labels % 4)
  stacked, central = copy.deepcopy(net), copy.deepcopy(net)
  torch_training.average_round(net, data, 4, sgd)
  torch_training.stacked_average_round(stacked, data, 4, sgd)
  params = list(central.parameters())
  torch_training.train(
      torch_training.CrossEntropy(central),
      params,
      sgd(params),
      data.images.flatten(0, 1),
      data.labels.flatten(),
      12,
  )
  want = {name: p.detach() for name, p in central.named_parameters()}
  assert_same(net, want)
  assert_same(stacked, want)
