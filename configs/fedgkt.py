"""FedGKT: small nets on the clients, a large one on the server."""

from fedjax_het.configs import common


def _released(config):
  """The authors' released command: 20 server epochs without distillation."""
  config.algorithm.server_distillation = False
  config.algorithm.server_epochs = 20


def _eval_logits(config):
  """The server's logits are computed in eval mode, after its training."""
  config.algorithm.server_logits = 'eval'


VARIANTS = dict(released=_released, eval_logits=_eval_logits)


def get_config(arg=''):
  """FedGKT on the embedded digits, else as `fedin.py`.

  Run: `python -m launch.train --config=configs/fedgkt.py[:variant,...]`.

  The server trains for 10 epochs on the uploads of a round, as in FedIN v1, and
  for 2 on the digits. Its net is the tail of the deepest group's model; the
  extractors of all groups must give features of one shape.

  Measured without variants, seed 0, one thread, after 20 rounds: 99.4 % for
  the server's net behind each client's extractor, 64.4 % for the clients' own
  nets (mean over clients, view 'clients'); 238 MB of features, logits and
  labels up, of all clients together.

  Args:
    arg: Variants of `common` and of this file, separated by commas.

  Returns:
    The config.
  """
  config = common.get_config('fedgkt', arg, VARIANTS)
  if config.dataset == 'digits' and 'released' not in arg.split(','):
    config.algorithm.server_epochs = 2
  return config
