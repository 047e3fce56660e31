r"""Prints training memory and the schedules that fit a budget.

  python -m launch.plan_memory --config=configs/fedepth.py:fedepth \
      --budget_mb=100,200,464 --nomeasure
  python -m launch.plan_memory --config=configs/fedavg.py:v2 --nomeasure
  python -m launch.plan_memory --paper_table
  python -m launch.plan_memory --paper_table --picture=memory.png

For each model of the config it prints the memory of its blocks by the paper's
estimate, and for each budget FeDepth's schedule, with the budget, the paper's
estimate and the compiler's figure of every stage. `--plan=paper` or
`--plan=measured` chooses which of the two the schedule is packed by. Without it
the config chooses; if it has no plan, the compiler's figure is used, or the
paper's estimate with `--nomeasure`. Without `budget_mb` the budgets are those
of the config, or shares of the whole model.

`--paper_table` prints FeDepth's Table 1 instead, for PreResNet-20 and for
ViT-T/16. `--picture` also draws, like FeDepth's Fig. 1 for a WideResNet and a
translation model, how the memory of the whole net and of each block divides
into parameters and activations, by the paper's estimate and by the compiler.
One MB is 2^20 bytes. A stage's batch is `local.batch_size`; in Table 1 it is
32. Data are not read. Exit codes: 0, or 2 if the command, the config or a
budget is wrong.
"""

from collections.abc import Iterator, Sequence
import fractions

from absl import flags

from . import config_command, terminal

_SHARES = ('1/6', '1/3', '1/2', '1')


def define_flags() -> None:
  """Defines the flags; not at import, since other programs share names."""
  flags.DEFINE_list('budget_mb', None, 'Budgets in MB, separated by commas.')
  flags.DEFINE_bool('measure', True, 'Compile the steps and ask XLA.')
  flags.DEFINE_bool('paper_table', False, "Print FeDepth's Table 1 instead.")
  flags.DEFINE_string('picture', None, 'With paper_table: file of a picture.')


def report(config, budgets_mb=None, measure: bool = True) -> Iterator[str]:
  """Yields the text to print.

  Args:
    config: A checked config.
    budgets_mb: Texts of budgets in MB; None for those of the config.
    measure: Whether to compile the training steps.

  Yields:
    Lines, or tables of several lines.

  Raises:
    ValueError: If a budget is wrong or does not hold the last block.
  """
  from fedjax_het import depthwise
  from fedjax_het.data.sources import shape_of
  from fedjax_het.experiment.config import group_spec
  from fedjax_het.experiment.local import local_training
  from fedjax_het.kernels import libraries
  from fedjax_het.models import create
  from fedjax_het.reporting.tables import as_text

  flagged = None if budgets_mb is None else _in_mb(budgets_mb)
  (shape, num_classes), local = shape_of(config), local_training(config)
  models = {}
  for name in config.groups:
    spec = group_spec(config, name)
    net = create(
        spec.model,
        shape,
        num_classes,
        matmul_dtype=config.matmul_dtype,
        conv_backend=libraries.concrete(config.conv_backend),
        **spec.options,
    )
    models.setdefault(net, []).append(name)
  options = config.algorithm
  heads, slack = options.get('heads', 'shared'), options.get('slack', 0.05)
  by = options.get('plan', 'measured' if measure else 'paper')

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
    costs = paper
    if by == 'measured':
      costs, slack = depthwise.measured_costs(net, local, heads), 0.0
    asked = _budgets(config, groups) if flagged is None else flagged
    for text in asked or _SHARES:
      budget = depthwise.budget_mb(text, costs.full)
      try:
        spans = depthwise.pack(costs, budget, slack)
      except ValueError as e:
        if asked:
          raise
        yield f'\nBudget {text}: {e}'
        continue
      yield ''
      yield (
          f'Budget {text}: {budget:.2f} MB, plan {by}, slack {slack:g}'
      )
      stages = depthwise.make_stages(
          net, spans, heads=heads, partial=options.get('partial', 'frozen')
      )
      rows = [('stage', 'budget', 'MB (paper)')]
      if measure:
        rows[0] += ('MB (XLA)', 'arguments', 'outputs', 'temporary')
      for j, (stage, span) in enumerate(zip(stages, spans, strict=True), 1):
        trained = _listed(names, stage.trained)
        estimate = f'{paper.span(*span):.2f}'
        row = (f'{j}: {trained}', f'{budget:.2f}', estimate)
        if measure:
          plan = depthwise.step_memory(stage, local)
          sizes = (plan.arguments, plan.outputs, plan.temporary)
          row += (f'{plan.mb:.2f}',)
          row += tuple(f'{n / 2**20:.2f}' for n in sizes)
        rows.append(row)
      yield as_text(rows)
      covered = {u for span in spans for u in range(*span)}
      rest = [u + 1 for u in range(head - 1) if u not in covered]
      if rest:
        yield f'Not trained: {_listed(names, rest)}'
    yield ''


# FeDepth's Table 1: MB of a block, and of the net at a share of its width.
_DEPTH = (20.02,) * 3 + (14.05,) + (10.07,) * 2 + (7.21,) + (5.28,) * 2
_WIDTH = {'1/8': 14.51, '1/6': 19.34, '1/3': 38.68, '1/2': 58.02, '1': 116.04}


def _preresnet(share):
  """PreResNet-20 as it fits the paper's table, at a share of its width."""
  from fedjax_het.models import create

  return create(
      'preresnet20', (32, 32, 3), 10, shortcut='A', stem_norm=False,
      final_norm=False, width=float(share),
  )  # fmt: skip


def _vit(share):
  """ViT-T/16 with a share of its 192 features and three attention heads."""
  from fedjax_het.models import create

  return create(
      'vit_t16', (224, 224, 3), 10, patch=16, head_dim=round(64 * share)
  )


# {name: function from a share of the width to a net} of table and picture.
_NETS = {'PreResNet-20, 32x32x3': _preresnet, 'ViT-T/16, 224x224x3': _vit}


def _papers_training():
  """The paper's optimiser, with the momentum and weight decay of its code."""
  import optax

  from fedjax_het.engine.types import LocalTraining

  return LocalTraining(
      lambda rate: optax.chain(
          optax.add_decayed_weights(5e-4), optax.sgd(rate, 0.9)
      ),
      lambda round_num: 0.1,
      epochs=1,
      batch_size=32,
  )


def shares_of_memory(
    net, local, measure: bool = True
) -> dict[str, dict[str, tuple[float, float]]]:
  """Divides the memory of a training step into parameters and the rest.

  Args:
    net: A model.
    local: Local training.
    measure: Whether to compile the steps and ask XLA.

  Returns:
    {'whole' or block number: {'paper' or 'XLA': (a, b)}} in MB. By the paper, a
    is parameters and b activations; by XLA, a is variables, optimiser state and
    batch, and b is temporary buffers and outputs.
  """
  from fedjax_het import depthwise

  head = depthwise.head_start(net)
  table = depthwise.block_table(net)
  spans = {'whole': (0, head - 1)}
  spans |= {str(i + 1): (i, i + 1) for i in range(head - 1)}
  total = depthwise.paper_costs(net, local.batch_size)
  found = {}
  for name, (start, end) in spans.items():
    # For the whole net the paper counts all blocks, else only the unit.
    blocks = table if name == 'whole' else table[start + 1 : end + 1]
    params = sum(4 * cost.params for cost in blocks) / 2**20
    mb = total.full if name == 'whole' else total.span(start, end)
    found[name] = {'paper': (params, mb - params)}
    if measure:
      (stage,) = depthwise.make_stages(net, [(start, end)])
      plan = depthwise.step_memory(stage, local)
      held = plan.arguments / 2**20
      found[name]['XLA'] = (held, plan.mb - held)
  return found


def draw_shares(path: str, measure: bool = True) -> None:
  """Draws `shares_of_memory` of the nets of Table 1, one panel each.

  Args:
    path: File to write; .png, .pdf or .svg.
    measure: As for `shares_of_memory`.

  Raises:
    FileNotFoundError: If the folder does not exist.
    ImportError: If matplotlib is not installed.
    ValueError: If the suffix is unknown.
  """
  from fedjax_het.analysis import pictures

  local = _papers_training()
  pictures.draw_stacks(
      {
          name: shares_of_memory(make(fractions.Fraction(1)), local, measure)
          for name, make in _NETS.items()
      },
      path,
      dict(
          paper=('parameters', 'activations'),
          XLA=('variables, optimiser state, batch', 'temporary buffers'),
      ),
      xlabel='Whole net, or a block alone',
      ylabel='Training memory, MB',
  )


def paper_table(measure: bool = True) -> Iterator[str]:
  """FeDepth's Table 1 beside this library's figures.

  Args:
    measure: Whether to compile the training steps.

  Yields:
    Lines to print, or tables of several lines.
  """
  from fedjax_het import depthwise
  from fedjax_het.reporting.tables import as_text

  local = _papers_training()
  blank = ('-',) * len(_DEPTH)
  printed_of = dict.fromkeys(_NETS, (blank, dict.fromkeys(_WIDTH, '-')))
  printed_of[next(iter(_NETS))] = _DEPTH, _WIDTH
  for name, make in _NETS.items():
    depth, width = printed_of[name]
    net = make(fractions.Fraction(1))
    units = depthwise.head_start(net) - 1
    costs = depthwise.paper_costs(net, local.batch_size)

    def figures(net, span, paper, estimate):
      row = [str(paper), f'{estimate:.2f}']
      if measure:
        (stage,) = depthwise.make_stages(net, [span])
        row.append(f'{depthwise.step_memory(stage, local).mb:.2f}')
      return row

    head = ['printed', 'MB (paper)'] + ['MB (XLA)'] * measure
    rows = [('depth', *head)]
    for unit in range(units):
      span = (unit, unit + 1)
      printed = depth[unit] if unit < len(depth) else '-'
      label = f'{unit + 1}: {net.block_names[unit + 1]}'
      rows.append((label, *figures(net, span, printed, costs.span(*span))))
    yield f'Table 1, {name}, 10 classes, batches of {local.batch_size}'
    yield as_text(rows)
    # The paper prints shares of the whole net's figure, not narrow nets' own.
    rows = [('width', head[0], 'share of the whole', *head[1:])]
    for share, printed in width.items():
      small = make(fractions.Fraction(share))
      estimate = depthwise.paper_costs(small, local.batch_size).full
      printed, *own = figures(small, (0, units), printed, estimate)
      part = f'{costs.full * float(fractions.Fraction(share)):.2f}'
      rows.append((f'x {share}', printed, part, *own))
    yield as_text(rows)
    yield ''


def _listed(names, positions) -> str:
  """Names at positions, with consecutive ones merged, as 'a to c, e'."""
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


def _in_mb(texts: Sequence[str]) -> list[str]:
  """Values of the flag as texts for `budget_mb`; ValueError for a wrong one."""
  from fedjax_het import depthwise

  found = [f'{text.strip()}MB' for text in texts]
  for text, budget in zip(texts, found, strict=True):
    try:
      depthwise.budget_mb(budget, 1.0)
    except ValueError:
      raise ValueError(
          f'--budget_mb must be MB above 0, such as 100,19.34, got {text!r}.'
      ) from None
  return found


def _budgets(config, groups) -> list[str]:
  """Distinct budgets of some groups; [] if the config gives none."""
  from fedjax_het.experiment.config import group_spec

  own = [group_spec(config, name).method.get('budget') for name in groups]
  return list(dict.fromkeys(text for text in own if text is not None))


def main(argv: Sequence[str]) -> None:
  """Prints the plans that the flags ask for."""
  del argv
  from fedjax_het import experiment
  from fedjax_het.analysis.pictures.style import check_path
  from fedjax_het.experiment.cache import enable_compilation_cache

  config = config_command.CONFIG.value
  picture = flags.FLAGS.picture
  if picture is not None and not flags.FLAGS.paper_table:
    terminal.fail('--picture draws the table of --paper_table; give both.', 2)
  if flags.FLAGS.paper_table and flags.FLAGS.budget_mb:
    terminal.fail('--paper_table has no budget; leave out --budget_mb.', 2)
  try:
    if picture is not None:
      picture = check_path(terminal.expanded(picture, '--picture'))
    experiment.check(config)
    if config.compilation_cache:
      enable_compilation_cache()
    lines = report(config, flags.FLAGS.budget_mb, flags.FLAGS.measure)
    if flags.FLAGS.paper_table:
      lines = paper_table(flags.FLAGS.measure)
    for line in lines:
      print(line, flush=True)
    if picture is not None:
      draw_shares(picture, flags.FLAGS.measure)
  except (FileNotFoundError, ImportError, ValueError) as e:
    terminal.fail(e, 2)
  except OSError as e:
    terminal.fail(e, 1)


def run() -> None:
  """Runs the program."""
  define_flags()
  terminal.run(main, config_command.parse_flags, __doc__)


if __name__ == '__main__':
  run()
