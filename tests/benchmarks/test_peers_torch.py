"""PyTorch implementations of the work of published programs."""

import math

import pytest

from benchmarks.peers import nets, tasks

torch = pytest.importorskip('torch', reason='PyTorch is an optional extra')

from benchmarks.peers import eager, torch_nets  # noqa: E402


@pytest.mark.parametrize('name', ['a', 'b', 'd', 'e'])
def test_all_programs_build_nets_of_one_size(name):
  work = tasks.work(name, quick=True)
  total = sum(
      torch_nets.count(
          torch_nets.make(nets.layers_of(model, 10, work.width), tasks.SHAPE)
      )
      for model in work.models
  )
  assert total == tasks.num_parameters(work)


def test_averages_of_class_means_leave_the_receiver_out():
  losses = [eager.FdLoss(torch.nn.Identity(), 2) for _ in range(3)]
  logits = torch.tensor([[0.0, math.log(3.0)]])  # Probabilities 1/4, 3/4.
  for loss, label in zip(losses, (0, 0, 1), strict=True):
    got = float(loss(logits, torch.tensor([label])))
    assert math.isclose(got, math.log((4, 4 / 3)[label]), rel_tol=1e-5)
  eager.exchange_means(losses)
  known = [loss.known.tolist() for loss in losses]
  assert known == [[1, 1], [1, 1], [1, 0]]
  torch.testing.assert_close(losses[2].goal[0], torch.tensor([0.25, 0.75]))
  # The cross-entropy plus H(q, p), here with q = p.
  entropy = 0.25 * math.log(4) + 0.75 * math.log(4 / 3)
  assert math.isclose(
      float(losses[2](logits, torch.tensor([0]))), math.log(4) + entropy,
      rel_tol=1e-5,
  )  # fmt: skip


def test_layers_of_two_depths_are_averaged_by_their_place():
  small, large = (
      torch_nets.make(nets.layers_of(name, 10, 1 / 32), tasks.SHAPE)
      for name in ('resnet10', 'resnet14')
  )
  small = eager.shared_names(small, [1, 1, 1, 1])
  large = eager.shared_names(large, [1, 1, 2, 2])
  assert set(small) < set(large)
  assert {n: p.shape for n, p in small.items()} == {
      n: large[n].shape for n in small
  }
  extra = {name.partition('.')[0] for name in set(large) - set(small)}
  assert extra == {'stage2_block1', 'stage3_block1'}
  assert len(small) == len({id(p) for p in small.values()})


def test_augmentation():
  torch.manual_seed(0)
  x = torch.arange(1.0, 1 + 8 * 3 * 6 * 6).reshape(8, 3, 6, 6)
  got = torch_nets.crop_flip(x, pad=0)
  assert got.is_contiguous()
  same = [bool((a == b).all()) for a, b in zip(got, x, strict=True)]
  flipped = [bool((a == b.flip(2)).all()) for a, b in zip(got, x, strict=True)]
  assert all(a != b for a, b in zip(same, flipped, strict=True))
  assert any(same) and any(flipped)
  holes = torch_nets.cut_out(x, side=2) == 0
  assert (holes.all(1) == holes.any(1)).all()
  assert holes[:, 0].sum((1, 2)).max() == 4
  inputs = torch_nets.Inputs('crop_flip_cutout')
  before = torch_nets.Inputs.images
  assert inputs.eval()(x) is x and inputs.train()(x).shape == x.shape
  assert torch_nets.Inputs.images - before == 8
