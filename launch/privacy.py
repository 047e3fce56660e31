r"""Prints what noise on FedIN's features does and does not promise.

  python -m launch.privacy
  python -m launch.privacy --sigma=0.5 --clip=0.1 --rounds=50 \
      --sampling_rate=0.032

It prints epsilon of differential privacy for a run with `algorithm.clip` and
`algorithm.sigma`, beside the formula of the paper's appendix, which is for one
release. Without --sigma, sigma follows from that formula and --epsilon: 0.106
in the paper's example (the paper prints 0.127, the value with a base-2
logarithm). The defaults are the paper's: 500 rounds of a tenth of the clients,
batches of 16 of 500 images. Needs dp-accounting (pip install
'fedjax_het[privacy]').
"""

from collections.abc import Sequence
import math

from absl import flags

from . import terminal
from .terminal import fail

# The PLD accountant needs memory in proportion to epsilon; above this bound on
# it, all of the machine's.
_MOST_PLD = 2000
# Limits of the table.
NOTE = """\
Not covered: FedIN also uploads weights, running statistics and numbers of
examples, without noise, so no row is a guarantee of a whole run. Every vector
must be clipped (algorithm.clip). Noise in units of the features' own spread
(algorithm.noise) promises nothing. Where batch norm takes the statistics of a
batch of B, one example moves all of its features: give --released=2B. If the
recipient knows which examples are drawn, the rows with sampling do not hold; if
it knows who takes part in a round, count the rounds of one client, as here.
"""


def define_flags() -> None:
  """Defines the flags; not at import, since other programs share names."""
  flags.DEFINE_float('clip', 0.1, 'Largest L2 norm C of a feature.')
  flags.DEFINE_float('delta', 1e-6, 'Probability that the bound fails.')
  flags.DEFINE_float('epsilon', 10.0, "For the paper's sigma, without --sigma.")
  flags.DEFINE_float('sigma', None, 'Standard deviation of the noise.')
  flags.DEFINE_integer('rounds', 50, 'Rounds in which a client takes part.')
  flags.DEFINE_float(
      'sampling_rate', 0.032, 'Share of its examples in a round.'
  )
  flags.DEFINE_integer('released', 2, 'Features of an example: s_in and s_out.')


def rows(
    sigma: float,
    clip: float,
    delta: float,
    *,
    rounds: int,
    sampling_rate: float,
    released: int,
) -> list[list[str]]:
  """The table of epsilons; see `privacy.run_epsilon` for the arguments.

  Args:
    sigma: Standard deviation of the noise.
    clip: Largest L2 norm C.
    delta: Probability that the bound fails.
    rounds: Rounds in which a client takes part.
    sampling_rate: Share of a client's examples in a round.
    released: Vectors released per example.

  Returns:
    Header and rows: what is released, how it is counted, epsilon; '-' where
    the PLD accountant would need too much memory.

  Raises:
    ValueError: If an argument is out of its range.
    ImportError: If dp-accounting is not installed.
  """
  from fedjax_het import privacy

  options = dict(rounds=rounds, released=released)
  # First, since it checks all arguments.
  sampled = privacy.run_epsilon(
      sigma, clip, delta, sampling_rate=sampling_rate, **options
  )
  formula = 2 * clip * math.sqrt(2 * math.log(1.25 / delta)) / sigma
  exact = privacy.gaussian_epsilon(sigma, clip, delta)
  both = privacy.gaussian_epsilon(sigma / math.sqrt(released), clip, delta)
  every = privacy.gaussian_epsilon(
      sigma / math.sqrt(released * rounds), clip, delta
  )
  by_chance = math.nan
  if every < _MOST_PLD:
    by_chance = privacy.run_epsilon(
        sigma, clip, delta, sampling_rate=sampling_rate, accountant='pld',
        **options,
    )  # fmt: skip
  outside = '' if formula < 1 else '; not valid from 1 on'
  rate = f'{100 * sampling_rate:g} % of the examples'
  table = [
      ['one feature, once', f"the paper's formula{outside}", formula],
      ['one feature, once', 'exact', exact],
      [f'{released} features, once', 'exact', both],
      [f'{released} features, {rounds} times', 'exact', every],
      [
          f'{released} features, {rounds} rounds',
          f'RDP, {rate} drawn without replacement, as FedIN does', sampled,
      ],
      [
          f'{released} features, {rounds} rounds',
          f'PLD, {rate} drawn by chance, noise alone for the others',
          by_chance,
      ],
  ]  # fmt: skip
  head = ['what is released for an example', 'counted by', 'epsilon']
  return [
      head,
      *(
          [*words, '-' if math.isnan(value) else f'{value:.2f}']
          for *words, value in table
      ),
  ]


def main(argv: Sequence[str]) -> None:
  """Prints the table."""
  del argv
  from fedjax_het import privacy
  from fedjax_het.reporting.tables import as_markdown

  options = flags.FLAGS
  try:
    sigma = options.sigma
    if sigma is None:
      sigma = privacy.gaussian_sigma(
          options.clip, options.epsilon, options.delta
      )
    table = rows(
        sigma, options.clip, options.delta, rounds=options.rounds,
        sampling_rate=options.sampling_rate, released=options.released,
    )  # fmt: skip
  except (ValueError, ImportError) as e:
    fail(e)
  print(
      f'Epsilon for sigma = {sigma:.4g}, C = {options.clip:g}, delta = '
      f'{options.delta:g}, where one example is replaced\n\n'
      f'{as_markdown(table)}\n\n{NOTE}',
      end='',
  )


def run() -> None:
  """Runs the program."""
  define_flags()
  terminal.run(main, terminal.parse_flags, __doc__)


if __name__ == '__main__':
  run()
