r"""Prints what training takes in memory, and which schedules fit a budget.

  python -m launch.plan_memory --config=configs/fedepth.py --budget_mb=1,2
  python -m launch.plan_memory --config=configs/fedavg.py:v2 --nomeasure

For each model of the config: what its blocks take by the paper's estimate, and
for each budget the schedule of FeDepth, with both estimates of every stage.
Without `budget_mb` the budgets are those of the config, or shares of the whole
model. One MB is 2^20 bytes; a stage's batch is `local.batch_size`. Data are
not read. Exit codes: 0, or 2 if the command, the config or a budget is wrong.
"""

from collections.abc import Iterator, Sequence

from absl import app, flags

from launch import train

_SHARES = ('1/6', '1/3', '1/2', '1')


def define_flags() -> None:
  """Defines the flags; not at import, since other programs share names."""
  flags.DEFINE_list('budget_mb', None, 'Budgets in MB, separated by commas.')
  flags.DEFINE_bool('measure', True, 'Compile the steps and ask XLA.')


def report(config, budgets_mb=None, measure: bool = True) -> Iterator[str]:
  """The lines to print.

  Args:
    config: A checked config.
    budgets_mb: Texts of budgets in MB; None for those of the config.
    measure: Whether to compile the steps of training.

  Yields:
    Lines, some of them tables of several.

  Raises:
    ValueError: If a budget is wrong or does not hold the last block.
  """
  from fedjax_het import depthwise
  from fedjax_het.data.catalog import DATASETS
  from fedjax_het.experiment.build import local_training
  from fedjax_het.experiment.config import group_spec
  from fedjax_het.experiment.tables import as_text
  from fedjax_het.models import create

  source, local = DATASETS[config.dataset], local_training(config)
  size = config.image_size
  shape = (*((size, size) if size else source.image_shape[:2]),
           source.image_shape[2])  # fmt: skip
  models = {}
  for name in config.groups:
    model, _, options = group_spec(config, name)
    net = create(
        model,
        shape,
        source.num_classes,
        products=config.products,
        convolutions=config.convolutions,
        **options,
    )
    models.setdefault(net, []).append(name)
  options = config.algorithm
  heads, slack = options.get('heads', 'shared'), options.get('slack', 0.05)
  planner = options.get('planner', 'paper')

  for net, groups in models.items():
    yield (
        f'Model {net.name} ({", ".join(groups)}), input '
        f'{"x".join(map(str, shape))}, batches of {local.batch_size}'
    )
    table = depthwise.block_table(net)
    rows = [('block', 'output', 'numbers', 'parameters', 'MB (paper)')]
    for cost in table:
      mb = depthwise.paper_mb(cost, local.batch_size)
      rows.append((
          cost.name, 'x'.join(map(str, cost.shape)), f'{cost.outputs:,}',
          f'{cost.params:,}', f'{mb:.2f}',
      ))  # fmt: skip
    yield as_text(rows)
    head = depthwise.head_start(net)
    names = net.block_names
    yield (
        f'Units are {names[1]} to {names[head - 1]}; the head is '
        f'{" and ".join(names[head:])}.'
    )
    paper = depthwise.paper_costs(net, local.batch_size)
    line = f'The whole model: {paper.full:.2f} MB by the paper'
    (whole,) = depthwise.make_stages(net, [(0, head - 1)])
    if measure:
      plan = depthwise.step_memory(whole, local)
      line += f', {plan.mb:.2f} MB by XLA'
    yield f'{line}.'
    if planner == 'xla':
      costs = depthwise.measured_costs(net, local, heads)
    else:
      costs = paper
    for text in _budgets(config, groups, budgets_mb):
      budget = depthwise.budget_mb(text, costs.full)
      spans = depthwise.pack(costs, budget, slack)
      yield ''
      yield (
          f'Budget {text}: {budget:.2f} MB, planner {planner}, slack {slack:g}'
      )
      stages = depthwise.make_stages(
          net, spans, heads=heads, partial=options.get('partial', 'frozen')
      )
      rows = [('stage', 'MB (paper)')]
      if measure:
        rows[0] += ('arguments', 'outputs', 'temporary', 'MB (XLA)')
      for j, (stage, span) in enumerate(zip(stages, spans, strict=True), 1):
        trained = _listed(names, stage.trained)
        row = (f'{j}: {trained}', f'{paper.span(*span):.2f}')
        if measure:
          plan = depthwise.step_memory(stage, local)
          sizes = (plan.arguments, plan.outputs, plan.temporary)
          row += tuple(f'{n / 2**20:.2f}' for n in sizes)
          row += (f'{plan.mb:.2f}',)
        rows.append(row)
      yield as_text(rows)
      covered = {u for span in spans for u in range(*span)}
      rest = [u + 1 for u in range(head - 1) if u not in covered]
      if rest:
        yield f'Not trained: {_listed(names, rest)}'
    yield ''


def _listed(names, positions) -> str:
  """'a to c, e' for positions of which the first three are neighbours."""
  runs = []
  for i in positions:
    if runs and runs[-1][-1] == i - 1:
      runs[-1].append(i)
    else:
      runs.append([i])
  return ', '.join(
      names[run[0]] + (f' to {names[run[-1]]}' if run[1:] else '')
      for run in runs
  )


def _budgets(config, groups, budgets_mb):
  """Texts for `budget_mb`, each once."""
  if budgets_mb is not None:
    return [f'{text.strip()}MB' for text in budgets_mb]
  entries = config.algorithm.get('budgets', '').split(',')
  pairs = [entry.strip().partition(':') for entry in entries]
  named = [budget for name, _, budget in pairs if name in groups]
  return dict.fromkeys(named or _SHARES)


def main(argv: Sequence[str]) -> None:
  """Prints the plans that the flags ask for."""
  del argv
  from fedjax_het import experiment

  config = flags.FLAGS.config
  try:
    experiment.check(config)
    for line in report(config, flags.FLAGS.budget_mb, flags.FLAGS.measure):
      print(line, flush=True)
  except ValueError as e:
    train.fail(e, 2)


if __name__ == '__main__':
  define_flags()
  app.run(main, flags_parser=train.parse_flags)
