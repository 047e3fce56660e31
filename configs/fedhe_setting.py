"""The setting of FedHe (arXiv 2110.09910), for all methods of a comparison."""

import ml_collections

from fedjax_het.algorithms import ALGORITHMS
from fedjax_het.engine.needs import needs_of


def apply(config):
  """Ten clients of ten CNNs, IID; 5,000 visits each, of three minibatches.

  Batch, optimiser and the number of visits are those of the authors' code. The
  code has 50,000 visits of one client at a time, which is a cohort of one and
  50,000 rounds; here there are 5,000 rounds of ten. Images are normalised by
  channel; the code subtracts the mean image.

  Args:
    config: The config to change: MNIST unless it names a data set.
  """
  if config.dataset == 'digits':
    config.dataset = 'mnist'
    config.target_accuracy = 0.90
  config.groups = ml_collections.ConfigDict(
      {f'fedhe_cnn{i}': 1 for i in range(10)}
  )
  config.model = ml_collections.ConfigDict(dict(width=1.0, norm='batch'))
  config.partition = ml_collections.ConfigDict(
      dict(name='iid', seed=config.partition.seed)
  )
  config.cohort_size = None
  config.num_rounds = 5000
  config.eval_every = 100
  config.checkpoint_every = 100
  config.local.steps = 3
  config.local.batch_size = 50
  config.local.optimizer = 'adam'
  config.local.learning_rate = 1e-3
  # In the authors' code each client has one optimiser for the whole run. A new
  # optimiser per visit would have Adam moments of only three steps.
  needs = needs_of(ALGORITHMS[config.algorithm.name])
  config.local.keep_optimizer = needs.keep_optimizer is not None
