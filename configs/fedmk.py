"""FedMK: clients upload learned examples, on which the server trains."""

from fedjax_het.configs.widths import one_model, widths_config

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
  """One architecture, the deepest of the setting, without running statistics.

  Those of the server's minibatches would be statistics of learned examples.
  """
  if not common.SETTINGS.keys() & names:
    config.local.epochs = 1
  own = (
      dict(norm='batch_only') if config.model.get('norm') == 'batch' else {}
  )
  one_model(config, lambda total: dict(all=total), dict(all=own))


VARIANTS = dict(
    paper=_paper,
    # Ablation: examples of any loss count equally.
    equal_weights=common.set_options(tau=0.0),
    # The inner step of the outline.
    small_step=common.set_options(inner_lr=0.01),
)


def get_config(arg=''):
  """FedMK on the embedded digits: ten clients of one ResNet.

  Run: `python -m launch.train --config=configs/fedmk.py[:variant,...]`.

  The local steps are those of the condensation: one pass over a client's
  examples in every round (`local.epochs`). Norms take the statistics of a batch
  in tests, too.

  Measured without variants, seed 0, one thread: accuracy 49.3 % after 20 rounds
  (`private.py`: 63.4 %, `fedavg.py`: 92.1 %), 1.6 MB up and 137.4 MB down. The
  setting is small, see `docs/methods/fedmk.md`.

  Args:
    arg: Variants of `common` and of this file, separated by commas.

  Returns:
    The config.
  """
  return widths_config('fedmk', arg, VARIANTS, _prepare)
