"""Commands that analyse stored runs: `attack`, `tsne` and `similarity`."""

import json
import pathlib
import types

import jax
import numpy as np
import pytest

from fedjax_het import experiment
from fedjax_het.algorithms.fedin.passes import Features, forward
from fedjax_het.analysis.similarity import linear_cka
from fedjax_het.experiment.build import build
from fedjax_het.experiment.trained import Model
from launch import attack, similarity, stored_runs, tsne
from tests.experiment.tiny_runs import tiny_config
from tests.fuzz import forks


def untrained(config):
  """An untrained run with the interface of a stored run."""
  built = build(config)
  groups = {g.name: g.model for g in built.federation.groups}
  group_of, _ = built.federation.places()

  def model(group=None, *, client=None):
    if group is None:
      group = built.federation.groups[group_of[client]].name
    key = jax.random.fold_in(jax.random.key(1), client or 0)
    return Model(None, groups[group].init(key))

  return types.SimpleNamespace(
      workdir=pathlib.Path('runs/a'), config=config, experiment=built,
      model=model,
  )  # fmt: skip


@pytest.fixture(scope='module')
def fedin():
  config = tiny_config('fedin', train_size=300)
  config.algorithm.noise = 0.8
  return untrained(config)


def test_the_adversary_has_what_a_client_uploads(fedin):
  run = fedin
  target = attack.read_target(run, 3, 5)
  assert target.own_noise == 0.8 and target.guess.shape == (8, 8, 1)
  data = run.experiment.data.client(3)
  batch = data.batch(np.arange(5), None)
  np.testing.assert_array_equal(
      np.round(255 * target.originals), data.images[data.index[:5]]
  )
  group, _ = run.experiment.federation.places()
  model = run.experiment.federation.groups[group[3]].model
  protect = Features(None, 0.5)
  key = jax.random.key(0)
  pairs = forward(
      model, run.model(client=3).variables, batch.x, None, key, protect
  )[1]
  feature = target.extract(target.originals)
  noisy = target.protect(0.5)(jax.random.split(key, 5)[1], feature)
  np.testing.assert_allclose(noisy, pairs.s_in, rtol=1e-4, atol=1e-5)


def test_levels_share_pixels_and_images(fedin):
  target = attack.read_target(fedin, 3, 3)
  options = dict(steps=20, learning_rate=0.05, tv=0.0, seed=0)
  plain, noisy = attack.attack_run(target, None, **options)
  assert (plain.label, noisy.label) == ('no noise', 'noise 0.8')
  assert plain.psnr.shape == noisy.ssim.shape == (20, 3)
  assert not np.array_equal(plain.images, noisy.images)
  (again,) = attack.attack_run(target, [0.8], **options)
  np.testing.assert_array_equal(again.images, noisy.images)
  # Absolute noise of the run stays at every level, and the label says so.
  (kept,) = attack.attack_run(
      target._replace(sigma=0.5), [0.0], **options, name='a, '
  )
  assert kept.label == 'a, no noise but sigma 0.5'
  table = attack.as_table(target, [plain, noisy])
  mean, spread = np.mean(noisy.ssim[-1]), np.std(noisy.ssim[-1], ddof=1)
  assert table[2][2] == f'{mean:.3f} ± {spread:.3f}'
  assert table[3][0] == 'mean image' and len(table) == 4
  images = fedin.experiment.dataset.train_images
  np.testing.assert_allclose(target.guess, (images / 255).mean(0), rtol=1e-5)
  assert target.originals.max() <= 1 and 0.1 < target.guess.mean() < 0.9

  def lpips(images, others):
    return np.abs(images - others).mean(axis=(1, 2, 3))

  (noisy,) = attack.attack_run(target, [0.8], **options, lpips=lpips)
  table = attack.as_table(target, [noisy], lpips)
  assert table[0][3] == 'LPIPS' and len(table[2]) == 5
  distance = lpips(noisy.images, target.originals)
  assert table[1][3].startswith(f'{distance.mean():.3f} ± ')


def test_what_cannot_be_attacked_is_refused(fedin):
  for change, message in (
      (dict(name='fedavg'), 'of fedavg, whose clients upload no features'),
      (dict(in_training=False), 'fedin without IN training'),
      (dict(aggregation='none'), 'stay on the clients'),
  ):
    config = fedin.config.copy_and_resolve_references()
    config.algorithm.update(change)
    changed = types.SimpleNamespace(**{**vars(fedin), 'config': config})
    with pytest.raises(ValueError, match=message):
      attack.read_target(changed, 0, 4)
  for levels, message in (
      (['much'], 'numbers such as 0,0.8'), (['-1'], '--noise must be at least'),
  ):  # fmt: skip
    with pytest.raises(ValueError, match=message):
      attack._levels(levels)
  assert attack._levels(['0', '0.8', '0.0']) == [0.0, 0.8]


EMBED = dict(
    stage=None, label=None, num_examples=12, num_clients=5, perplexity=5.0,
    seed=0,
)  # fmt: skip


def test_points_are_images_in_networks(fedin):
  points = tsne.embed_run(fedin, 'run', **EMBED)
  labels = fedin.experiment.dataset.test_labels[:12]
  assert points.place.shape == (24, 2)
  assert points.network == ['large'] * 12 + ['small'] * 12
  np.testing.assert_array_equal(points.classes, [*labels, *labels])
  panels = tsne.panels([points], by_class=True)
  (by_client,), (by_class,) = (panels[kind].values() for kind in panels)
  np.testing.assert_array_equal(by_client['small'], points.place[12:])
  np.testing.assert_array_equal(
      by_class['class 3'], points.place[points.classes == 3]
  )
  assert sum(map(len, by_class.values())) == 24
  one_class = tsne.embed_run(fedin, 'run', **{**EMBED, 'label': 3})
  assert set(one_class.classes) == {3}
  with pytest.raises(ValueError, match='no test image of that class'):
    tsne.embed_run(fedin, 'run', **{**EMBED, 'label': 10})
  with pytest.raises(ValueError, match="stage of mlp3 'layer9'"):
    tsne.embed_run(fedin, 'run', **{**EMBED, 'stage': 'layer9'})


def test_common_stages_are_compared(fedin):
  common, ((labels, matrices),), numbers = similarity.compare_stages(
      [fedin], 50, 20
  )
  assert numbers == [50]
  assert common == ['stem', 'layer1'] and labels == ['large', 'small']
  x = fedin.experiment.preprocess(fedin.experiment.dataset.test_images[:50])
  large, small = (
      np.asarray(group.model.apply(
          fedin.model(group.name).variables, x, stop=2
      )[0])
      for group in fedin.experiment.federation.groups
  )  # fmt: skip
  cka = linear_cka(small, large)
  np.testing.assert_allclose(
      matrices['layer1'], [[1, cka], [cka, 1]], rtol=1e-4
  )


def test_personal_clients_are_of_all_groups():
  run = untrained(tiny_config('private', train_size=300))
  found = stored_runs.networks(run, 3)
  groups = run.experiment.federation.groups
  first, second = (group.client_ids for group in groups)
  assert [one.label for one in found] == [
      f'large, client {first[0]}', f'large, client {first[1]}',
      f'small, client {second[0]}',
  ]  # fmt: skip


def test_networks_are_found_in_what_methods_evaluate(fedin):
  model = fedin.experiment.federation.groups[0].model
  variables, other = (
      group.model.abstract_variables
      for group in fedin.experiment.federation.groups
  )
  assert stored_runs.network_of(variables, model, 'a') is variables
  assert stored_runs.network_of((other, variables), model, 'a') is variables
  with pytest.raises(ValueError, match='fedgkt does not evaluate'):
    stored_runs.network_of((other, 1), model, 'fedgkt')
  built = fedin.experiment
  one = built._replace(algorithm=built.algorithm._replace(one_model=True))
  changed = types.SimpleNamespace(**{**vars(fedin), 'experiment': one})
  with pytest.raises(ValueError, match='one model for all groups'):
    stored_runs.networks(changed, 5)


@pytest.mark.slow
@pytest.mark.usefixtures('undrawn')
def test_stored_runs_are_analysed(tmp_path):
  config = tiny_config('fedin', num_rounds=1, train_size=300)
  config.algorithm.noise = 0.8
  experiment.run(config, tmp_path / 'run')
  experiment.run(
      tiny_config('fedavg', num_rounds=1, train_size=300), tmp_path / 'avg'
  )

  def done(program, *args):
    ended = forks.run(program, args, tmp_path)
    assert ended.code == 0, ended.err
    return ended.out

  args = '--workdir=run', '--steps=59', '--num_images=3', '--client=3'
  printed = done('attack', *args)
  found = json.loads((tmp_path / 'attack' / 'attack.json').read_text())
  # Twenty snapshots, the same number of steps apart.
  assert found['steps'] == 40 and found['client'] == 3
  assert [one['noise'] for one in found['results']] == [0.0, 0.8]
  assert {len(one['psnr']) for one in found['results']} == {3}
  assert '| noise 0.8 |' in printed
  for name in ('images', 'psnr', 'ssim'):
    assert (tmp_path / 'attack' / f'{name}.png').stat().st_size > 1000
  for args in (
      ('--workdir=avg',), ('--workdir=run', '--client=99'), (),
      ('--workdir=missing',), ('--workdir=run', '--steps=0'),
  ):  # fmt: skip
    ended = forks.run('attack', args, tmp_path)
    assert ended.code == 2 and ended.err.startswith('Error: '), ended
    assert ended.err.count('\n') == 1
  done('tsne', '--workdir=run,avg', '--num_examples=20')
  lines = (tmp_path / 'tsne' / 'tsne.csv').read_text().splitlines()
  assert lines[0] == 'run,network,class,x,y' and len(lines) == 1 + 2 * 2 * 20
  assert (tmp_path / 'tsne' / 'tsne.png').stat().st_size > 1000
  printed = done('similarity', '--workdirs=run,avg')
  assert '| avg | fedavg | 2 | ' in printed
  for name in ('stages', 'clients'):
    assert (tmp_path / 'similarity' / f'{name}.png').stat().st_size > 1000
