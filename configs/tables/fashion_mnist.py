"""FedIN v2 on Fashion-MNIST, narrowed and shortened for two CPU cores."""

from fedjax_het.configs import fedavg, fedin, fedprox, private
from fedjax_het.reporting import paper_targets
from fedjax_het.reporting.results_table import Table

_ARG = 'v2,fashion_mnist,cpu'


def _private():
  """Two visits per client, in total as many as the others' 20 rounds of 10."""
  config = private.get_config(_ARG)
  config.cohort_size = 100
  config.num_rounds = 2
  config.eval_every = 1
  return config


def get_table() -> Table:
  """Six methods, three seeds.

  Run: `python -m launch.sweep --table=configs/tables/fashion_mnist.py
  --data_dir=DIR`.

  Returns:
    The table; the paper's numbers are those of its Table 1, non-IID: full
    width, 500 rounds of 5 epochs.
  """
  return Table(
      title='FedIN v2 on Fashion-MNIST, Dirichlet 0.5',
      setting=(
          '100 clients of ResNet10, 14, 18, 22 and 26 (20 each), 10 a round, '
          'batch 16, Adam 1e-3, Dirichlet 0.5 over clients as in the paper; '
          'widths a quarter, 2 local epochs instead of 5 and 20 rounds instead '
          'of 500, which is the difference to the paper column. Private trains '
          'every client in two rounds: as many client visits as the others in '
          'all, and four models of each group are evaluated. Nothing is '
          'augmented and images are 28x28, of which the paper says nothing; '
          'the last partial batch of an epoch is left out. Optimisers begin '
          'anew in every visit.'
      ),
      rows={
          'Private': _private(),
          'FedAvg': fedavg.get_config(_ARG),
          'FedProx': fedprox.get_config(_ARG),
          'FedIN': fedin.get_config(_ARG),
          'FedIN +Noise': fedin.get_config(f'{_ARG},noise'),
          'FedIN w/o Opt': fedin.get_config(f'{_ARG},wo_opt'),
      },
      paper={
          label: paper_targets.fedin_v2_table_1(name, 'fashion_mnist', False)
          for label, name in (
              ('FedAvg', 'FedAvg'),
              ('FedProx', 'FedProx'),
              ('FedIN', 'FedIN'),
              ('FedIN +Noise', 'FedIN (+Noise)'),
          )
      },
      seeds=(0, 1, 2),
      mean='groups',
  )
