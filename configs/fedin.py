"""FedIN on clients of different architectures."""

from configs import common


def _set(**options):
  """A variant that sets options of the method."""

  def apply(config):
    for name, value in options.items():
      config.algorithm[name] = value

  return apply


VARIANTS = dict(
    # Feature noise of 0.8 standard deviations ('+Noise').
    noise=_set(noise=0.8),
    # The exact solution of the projection instead of a fixed lambda, and
    # inner products over all intermediate layers instead of each leaf.
    exact=_set(rule='exact'),
    tree=_set(scope='tree'),
    # Ablations: without IN training, proximal term, combined gradient, and
    # averaging.
    wo_in=_set(in_training=False),
    wo_prox=_set(mu=0.0),
    wo_opt=_set(rule='sequential'),
    wo_aggregation=_set(aggregation='none'),
    # Averaging inside each architecture only (v2 Eq. 20; with
    # `weights='data'` Eq. 21).
    architecture=_set(aggregation='architecture'),
)


def get_config(arg=''):
  """FedIN on the embedded digits: 10 clients, three ResNets, Dirichlet 0.5.

  Run: `python -m launch.train`, or with variants
  `python -m launch.train --config=configs/fedin.py:quick`,
  `--config=configs/fedin.py:v2,fashion_mnist,noise --config.data_dir=DIR`.

  Measured without variants, seed 0, two CPU cores: mean client accuracy
  96.7 % after 20 rounds.

  Args:
    arg: Variants of `common` and of this file, separated by commas.

  Returns:
    The config.
  """
  return common.get_config('fedin', arg, VARIANTS)
