"""FedMK: clients upload learned examples, on which the server trains."""

from fedjax_het.configs.widths import one_model, widths_config
import ml_collections

from fedjax_het.configs import common


def _paper(config):
  """A larger condensation: 20 examples per class and 100 local steps.

  Of these numbers we had no text of the paper; they are those of an outline of
  its method. The paper's main comparison has ten rounds.
  """
  config.algorithm.per_class = 20
  config.local.steps = 100
  config.num_rounds = min(config.num_rounds, 10)


def _prepare(config, names):
  """One architecture for all: an MLP, or the deepest net of a setting."""
  nets = {*common.SETTINGS, *common.MODELS, 'quick', 'resnet'}
  if not nets & {*names}:
    one_model(config, lambda total: dict(all=total))
    config.groups['all'] = dict(
        model='mlp', clients=config.groups['all'].clients
    )
    config.model = ml_collections.ConfigDict(dict(hidden=64, norm='none'))
    # Ours, as are the numbers of layers and units.
    config.algorithm.per_class = 10
    config.algorithm.inner_lr = 1.0
    return
  if not common.SETTINGS.keys() & names:
    config.local.epochs = 1
  # Running statistics of the server's minibatches would be those of learned
  # examples.
  own = (
      dict(norm='batch_only') if config.model.get('norm') == 'batch' else {}
  )
  one_model(config, lambda total: dict(all=total), dict(all=own))


VARIANTS = dict(
    # The deepest of the three small ResNets instead of an MLP.
    resnet=lambda config: None,
    paper=_paper,
    # Ablation: examples of any loss count equally.
    equal_weights=common.set_options(tau=0.0),
    # The inner step of the outline.
    small_step=common.set_options(inner_lr=0.01),
)


def get_config(arg=''):
  """FedMK on the embedded digits: ten clients of one MLP.

  Run: `python -m launch.train --config=configs/fedmk.py[:variant,...]`.

  The local steps are those of the condensation, as many as `local.epochs`
  passes over a client's examples. With `resnet`, and in the settings of papers,
  norms take the statistics of a batch in tests, too.

  Measured without variants, seed 0, one thread: accuracy 76.9 % after 20
  rounds, 4.0 MB up and 11.0 MB down (with `--config.algorithm.name=fedavg`
  86.5 %); with `paper` 87.6 % after ten rounds.

  Args:
    arg: Variants of `common` and of this file, separated by commas.

  Returns:
    The config.
  """
  return widths_config('fedmk', arg, VARIANTS, _prepare)
