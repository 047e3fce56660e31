"""Parameter counts: published, or worked out by hand from the tables."""

import math

import jax
import numpy as np
import pytest

from fedjax_het.models import MODELS, create


def size(tree):
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def counts(name, shape, num_classes=10, **options):
  model = create(name, shape, num_classes, **options)
  return model.num_params, size(model.abstract_variables.stats)


RGB, GREY = (32, 32, 3), (28, 28, 1)

RESNETS = {
    # depth: (ImageNet stem, CIFAR stem, statistics).
    10: (4_910_922, 4_903_242, 5_760),
    14: (10_812_234, 10_804_554, 8_832),
    18: (11_181_642, 11_173_962, 9_600),
    22: (17_082_954, 17_075_274, 12_672),
    26: (17_452_362, 17_444_682, 13_440),
}


@pytest.mark.parametrize('depth', RESNETS)
def test_resnet(depth):
  imagenet, cifar, stats = RESNETS[depth]
  name = f'resnet{depth}'
  assert counts(name, RGB) == (imagenet, stats)
  assert counts(name, RGB, stem='cifar') == (cifar, stats)
  assert counts(name, RGB, 100) == (imagenet + 46_170, stats)
  if depth == 10:
    assert counts(name, GREY) == (imagenet - 6_272, stats)
    assert counts(name, GREY, stem='cifar') == (cifar - 1_152, stats)


@pytest.mark.parametrize(
    'depth,size_1000', [(50, 25_557_032), (101, 44_549_160), (152, 60_192_808)]
)
def test_bottleneck_resnets_are_those_of_imagenet(depth, size_1000):
  """Their published sizes, with 1000 classes."""
  assert counts(f'resnet{depth}', RGB, 1000)[0] == size_1000


def test_mean_resnet_is_the_printed_12_28_million():
  assert np.mean([row[0] for row in RESNETS.values()]) == 12_288_022.8
  assert np.mean([row[1] for row in RESNETS.values()]) == 12_280_342.8


def test_resnet_parts():
  params = create('resnet26', RGB, 10).abstract_variables.params
  assert size(params['stem']) == 9_536
  assert size(params['head']) == 5_130
  assert size(params['pool']) == 0
  assert [size(params[f'stage{j}_block0']) for j in range(1, 5)] == [
      73_984, 230_144, 919_040, 3_673_088,
  ]
  assert [size(params[f'stage{j}_block2']) for j in range(1, 5)] == [
      73_984, 295_424, 1_180_672, 4_720_640,
  ]


@pytest.mark.parametrize(
    ('variant', 'rgb', 'grey', 'stats'),
    [
        ('a', 19_388_362, 19_387_210, 26_112),
        ('b', 10_033_162, 10_032_010, 15_232),
        ('c', 10_855_242, 10_854_090, 17_152),
        ('d', 13_973_002, 13_971_850, 20_352),
        ('e', 7_407_882, 7_406_730, 12_672),
    ],
)
def test_fedin_v1(variant, rgb, grey, stats):
  name = f'fedin_{variant}'
  assert counts(name, RGB) == (rgb, stats)
  assert counts(name, GREY) == (grey, stats)
  assert counts(name, RGB, tied=True) == (7_407_882, 12_672)


def test_fedin_v1_parts():
  params = create('fedin_e', RGB, 10).abstract_variables.params
  assert (size(params['stem']), size(params['head'])) == (1_920, 10_250)
  model = create('fedin_e', RGB, 10, conv_bias=False)
  assert size(model.abstract_variables.params['stem']) == 1_856
  model = create('fedin_e', GREY, 10)
  assert size(model.abstract_variables.params['stem']) == 768


@pytest.mark.parametrize(
    ('depth', 'large', 'small'),
    [
        (8, 14_571_658, 14_244_490),
        (9, 16_346_122, 16_018_954),
        (10, 18_120_586, 17_793_418),
        (11, 19_895_050, 19_567_882),
        (12, 21_669_514, 21_342_346),
    ],
)
def test_vit_s(depth, large, small):
  assert counts(f'vit_s{depth}', (224, 224, 3)) == (large, 0)
  assert counts(f'vit_s{depth}', RGB) == (small, 0)


def test_vit_parts_and_published_sizes():
  image = (224, 224, 3)
  assert counts('vit_s12', image, 1000) == (22_050_664, 0)
  assert counts('vit_t16', image, 1000) == (5_717_416, 0)
  assert counts('vit_t16', image) == (5_526_346, 0)
  assert counts('vit_t16', image, 100) == (5_543_716, 0)
  params = create('vit_s8', image, 10).abstract_variables.params
  assert size(params['embed']) == 295_296 + 384 + 75_648
  assert size(params['encoder07']) == 1_774_464
  assert (size(params['token']), size(params['head'])) == (768, 3_850)


@pytest.mark.parametrize(
    ('variant', 'grey', 'stats', 'rgb'),
    [
        (0, 729_856, 768, 875_520),
        (1, 1_094_016, 1_024, 1_311_360),
        (2, 1_458_176, 1_280, 1_747_200),
        (3, 1_026_304, 1_024, 1_174_272),
        (4, 2_049_536, 1_536, 2_340_864),
        (5, 352_640, 896, 353_792),
        (6, 272_960, 768, 274_112),
        (7, 566_592, 1_152, 568_896),
        (8, 226_816, 768, 229_120),
        (9, 306_496, 896, 308_800),
    ],
)
def test_fedhe_cnn(variant, grey, stats, rgb):
  assert counts(f'fedhe_cnn{variant}', GREY) == (grey, stats)
  assert counts(f'fedhe_cnn{variant}', RGB) == (rgb, stats)


def test_fedhe_communication_table_has_20_outputs():
  assert sum(counts('fedhe_cnn9', GREY, 20)) == 324_672
  assert sum(counts('fedhe_cnn9', RGB, 20)) == 326_976


@pytest.mark.parametrize(
    ('options', 'ten', 'stats'),
    [
        ({}, 272_314, 1_408),
        ({'shortcut': 'A'}, 269_754, 1_408),
        ({'shortcut': 'A', 'stem_norm': False}, 269_722, 1_376),
        ({'stem_bias': True, 'final_norm': False}, 272_202, 1_280),
    ],
)
def test_preresnet20(options, ten, stats):
  options = {'norm': 'batch', **options}
  assert counts('preresnet20', RGB, **options) == (ten, stats)
  # 90 more outputs of 64 weights and a bias.
  assert counts('preresnet20', RGB, 100, **options)[0] == ten + 5_850
  # By default there are no running statistics.
  assert counts('preresnet20', RGB) == (272_314, 0)


@pytest.mark.parametrize(
    ('width', 'want'),
    [
        (1 / 8, 4_536),
        (1 / 6, 6_817),
        (1 / 3, 29_102),
        (1 / 2, 68_706),
        (2, 1_084_266),
    ],
)
def test_preresnet20_widths(width, want):
  assert counts('preresnet20', RGB, width=width)[0] == want


def test_small_nets():
  assert counts('resnet14_mnist', GREY)[0] == 172_218
  assert counts('resnet14_mnist', GREY, shortcut='B')[0] == 174_970
  assert counts('simple_cnn', RGB) == (62_006, 0)
  assert counts('simple_cnn', GREY) == (44_426, 0)
  assert counts('simple_cnn', RGB, projection=True) == (92_626, 0)
  # As printed for CIFAR-10 and, with 62 classes, for EMNIST.
  assert counts('dropout_cnn', RGB) == (1_626_442, 0)
  assert counts('dropout_cnn', GREY, 62) == (1_206_590, 0)
  assert counts('mlp', (8, 8, 1), hidden=32) == (65 * 32 + 33 * 32 + 330, 0)


@pytest.mark.parametrize('name', MODELS)
def test_every_model_maps_a_masked_batch_to_logits(name):
  model = create(name, RGB, 7)
  variables = model.abstract_variables
  x = jax.ShapeDtypeStruct((2, *RGB), np.float32)
  mask = jax.ShapeDtypeStruct((2,), bool)

  def train(variables, x, mask, key):
    return model.apply(variables, x, train=True, mask=mask, key=key)

  logits, stats = jax.eval_shape(train, variables, x, mask, jax.random.key(0))
  assert (logits.shape, logits.dtype) == ((2, 7), np.float32)
  assert stats == variables.stats
  assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {
      np.dtype(np.float32)
  }
  # FedIN exchanges s_out, which is a vector in every model.
  assert len(model.shapes[model.cut[1] - 1]) == 1
  assert model.classifier == ('head',)
