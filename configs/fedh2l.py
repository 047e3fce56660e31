"""FedH2L: mutual distillation on seeds that every client publishes."""

from fedjax_het.configs import common

VARIANTS = dict(
    # The posteriors of a client teach on its own seeds only, and only these
    # travel.
    owner=common.set_options(teachers='owner'),
    # Two steps, with g_l and then with z, instead of one with their sum.
    alternate=common.set_options(update='alternate'),
    # Ablations: gradients that conflict are not projected; no distillation,
    # only the labels of the seeds.
    wo_projection=common.set_options(project=False),
    wo_distillation=common.set_options(distill_weight=0.0),
)


def get_config(arg=''):
  """FedH2L on the embedded digits, else as `fedin.py`.

  Run: `python -m launch.train --config=configs/fedh2l.py[:variant,...]`.

  Args:
    arg: Variants of `common` and of this file, separated by commas.

  Returns:
    The config.
  """
  return common.get_config('fedh2l', arg, VARIANTS)
