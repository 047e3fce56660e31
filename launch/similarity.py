r"""Compares the layers of clients' local models by CKA and CCA.

  python -m launch.similarity --config=configs/private.py:quick
  python -m launch.similarity --config=configs/private.py:similarity,mnist \
      --config.data_dir=DIR --workdir=runs/similarity --out=results/similarity

The second is FeDepth's Fig. 6: a 14-layer ResNet for each of 20 clients, which
hold two digits of MNIST each. The paper does not describe the training.

  python -m launch.similarity --workdirs=runs/fedavg,runs/fedin

The third is FedIN's Fig. 6a, 6b and 7, on stored runs: CKA of the same stage in
pairs of networks of a run. The networks are those of its groups or, if clients
have their own models, of clients taken from each group in turn. Blocks
'stage1_block0' to the last of 'stage1' are one stage, and a block with another
name is a stage by itself; stages that all networks of all runs have are
compared on test images. This writes similarity.md, stages.png with a panel for
each data set and split, and clients.png with the matrices of the last two
stages. Of the config, only --config.data_dir is used: the folder of the data.

Without --workdirs the program first runs the experiment, or reads the result of
a workdir that is finished. It compares the clients of the first group on test
images: layer by layer, and every layer with every other. It writes
similarity.md and similarity.png.
"""

from collections.abc import Sequence
import contextlib

from absl import flags

from . import config_command, terminal
from .stored_runs import names_of, network_of, networks, open_runs
from .terminal import fail, folder


def define_flags() -> None:
  """Defines the flags; not at import, since other programs share names."""
  flags.DEFINE_string('out', 'similarity', 'Folder of the results.')
  flags.DEFINE_integer('num_examples', 1000, 'Test images to compare on.')
  flags.DEFINE_integer('num_clients', 20, 'Clients to compare, at most.')
  flags.DEFINE_list(
      'workdirs', None, 'Folders of stored runs, to be compared by stage.'
  )
  flags.DEFINE_string(
      'workdir', None, 'Folder of the run; a new one under ./runs by default.'
  )


def compare(config, workdir, num_examples: int, num_clients: int):
  """Runs an experiment and compares its clients' models.

  Args:
    config: The config.
    workdir: The run's folder.
    num_examples: Test images.
    num_clients: Largest number of clients of the first group.

  Returns:
    Names of the layers, {'CKA': [layers, layers], 'CCA': ...}, and the number
    of test images.

  Raises:
    ValueError: If the method has no personal models, or there are fewer than
      two clients to compare.
  """
  import jax

  from fedjax_het import experiment
  from fedjax_het.analysis import similarity
  from fedjax_het.experiment.build import build

  built = build(config)
  group = built.federation.groups[0]
  algorithm = built.algorithm
  if not algorithm.personal:
    raise ValueError(
        f'{config.algorithm.name} has one model for a group; clients can be '
        'compared where models are personal, such as with private.'
    )
  result = experiment.run(config, workdir)
  x = built.preprocess(built.dataset.test_images[:num_examples])
  features = []
  for row in range(min(group.num_clients, num_clients)):
    client = jax.tree.map(
        lambda leaf, row=row: leaf[row], result.state.clients[group.name]
    )
    model = algorithm.client_model(result.state.server, client, group)
    variables = network_of(model, group.model, config.algorithm.name)
    features.append(similarity.block_features(group.model, variables, x))
  return list(group.model.block_names), {
      'CKA': similarity.mean_similarity(features),
      'CCA': similarity.mean_similarity(features, similarity.mean_cca),
  }, len(x)


def compare_stages(runs, num_examples: int, num_clients: int):
  """CKA of the same stages of the networks of stored runs.

  Args:
    runs: The runs, as `load_run` returns them.
    num_examples: Test images.
    num_clients: Largest number of groups or clients of a run.

  Returns:
    The stages that all networks have, for each run the labels of its N
    networks with {stage: [N, N]}, and the number of test images of each run.

  Raises:
    ValueError: If a run has fewer than two networks, or no stage is common.
    FileNotFoundError: If data or checkpoints are missing.
  """
  from fedjax_het.analysis import similarity

  of_run = [networks(run, num_clients) for run in runs]
  every = [network for found in of_run for network in found]
  common = [
      stage
      for stage in similarity.stages(every[0].model)
      if all(stage in similarity.stages(one.model) for one in every)
  ]
  if not common:
    raise ValueError('The networks of these runs have no stage in common.')
  results, numbers = [], []
  for run, compared in zip(runs, of_run, strict=True):
    x = run.experiment.preprocess(
        run.experiment.dataset.test_images[:num_examples]
    )
    features = [
        similarity.block_features(one.model, one.variables, x)
        for one in compared
    ]
    matrices = {}
    for stage in common:
      blocks = [similarity.stages(one.model)[stage] for one in compared]
      matrices[stage] = similarity.pairwise(
          [f[block] for f, block in zip(features, blocks, strict=True)]
      )
    results.append(([one.label for one in compared], matrices))
    numbers.append(len(x))
  return common, results, numbers


def _draw_stages(runs, common, results, out) -> list[str]:
  """Draws the means by stage, and the matrices of the last two stages.

  Returns:
    The pictures, as Markdown.
  """
  from fedjax_het.analysis import pictures, similarity
  from fedjax_het.reporting.looks import method_looks
  from fedjax_het.reporting.setting import named

  panels, methods, names = {}, {}, names_of(runs)
  for run, name, (_, matrices) in zip(runs, names, results, strict=True):
    split = named(run.config.partition.to_dict()).strip()
    panel = panels.setdefault(f'{run.config.dataset}, {split}', {})
    means = [similarity.mean_of_pairs(matrices[stage]) for stage in common]
    panel[name] = list(range(len(common))), means
    methods[name] = run.config.algorithm.name
  pictures.draw_curves(
      panels, out / 'stages.png', 'Mean CKA of two networks',
      looks=method_looks(methods), xlabel='Stage',
      marks=dict(enumerate(common)),
  )  # fmt: skip
  shown = ['![Mean CKA by stage](stages.png)']
  labels = results[0][0]
  if all(found == labels for found, _ in results):
    shown.append('![CKA client by client](clients.png)')
    pictures.draw_matrices(
        {
            f'{name}, {stage}': matrices[stage]
            for name, (_, matrices) in zip(names, results, strict=True)
            for stage in common[-2:]
        },
        labels,
        out / 'clients.png',
        downwards=True,
        columns=len(common[-2:]),
    )
  return shown


def _main_of_stages(options) -> None:
  """Compares the stored runs that --workdirs names."""
  from fedjax_het.analysis import similarity
  from fedjax_het.files import write_atomically
  from fedjax_het.reporting.tables import as_markdown

  out = folder('--out', options.out)
  config = options.config
  runs = open_runs(
      options.workdirs, config.data_dir, config.data_file, flag='--workdirs'
  )
  common, results, numbers = compare_stages(
      runs, options.num_examples, options.num_clients
  )
  table = [['run', 'method', 'networks', *common]]
  for run, name, (labels, matrices) in zip(
      runs, names_of(runs), results, strict=True
  ):
    means = [similarity.mean_of_pairs(matrices[stage]) for stage in common]
    table.append([
        name, run.config.algorithm.name, str(len(labels)),
        *(f'{mean:.3f}' for mean in means),
    ])  # fmt: skip
  text = as_markdown(table)
  out.mkdir(parents=True, exist_ok=True)
  shown = []
  with contextlib.suppress(ImportError):  # No matplotlib: no pictures.
    shown = _draw_stages(runs, common, results, out)
  parts = [
      '# Equal stages of different networks',
      'Linear CKA, mean over pairs of networks of a run, on '
      f'{" or ".join(map(str, sorted(set(numbers))))} test images.',
      text,
      *shown,
  ]
  write_atomically(out / 'similarity.md', '\n\n'.join(parts) + '\n')
  print(text)
  print(f'\nComparison: {out / "similarity.md"}')


def main(argv: Sequence[str]) -> None:
  """Writes the comparison that the flags describe."""
  del argv
  from fedjax_het import experiment
  from fedjax_het.analysis import pictures
  from fedjax_het.files import write_atomically
  from fedjax_het.options import at_least
  from fedjax_het.reporting.report_pictures import NO_MATPLOTLIB
  from fedjax_het.reporting.tables import as_markdown

  options = flags.FLAGS
  try:
    for name in ('num_examples', 'num_clients'):
      at_least(1, **{f'--{name}': options[name].value})
    if options.workdirs is not None:
      _main_of_stages(options)
      return
    experiment.check(options.config)
    out = folder('--out', options.out)
    workdir = experiment.new_workdir(options.config)
    if options.workdir is not None:
      workdir = folder('--workdir', options.workdir)
    layers, matrices, number = compare(
        options.config, workdir, options.num_examples, options.num_clients
    )
    out.mkdir(parents=True, exist_ok=True)
    table = [['layer', *matrices]]
    for i, layer in enumerate(layers):
      table.append([layer, *(f'{m[i, i]:.3f}' for m in matrices.values())])
    text = as_markdown(table)
    picture = '![Every layer with every other](similarity.png)'
    try:
      pictures.draw_matrices(matrices, layers, out / 'similarity.png')
    except ImportError:
      picture = f'{NO_MATPLOTLIB}.'
    write_atomically(
        out / 'similarity.md',
        '# Equal layers of different clients\n\nMean over pairs of clients, on '
        f'{number} test images.\n\n{text}\n\n{picture}\n',
    )
  except (ValueError, FileNotFoundError, ImportError) as e:
    fail(e)
  except (FloatingPointError, OSError) as e:
    fail(e, 1)
  print(text)
  print(f'\nComparison: {out / "similarity.md"}')


def run() -> None:
  """Runs the program."""
  define_flags()
  terminal.run(main, config_command.parse_flags, __doc__)


if __name__ == '__main__':
  run()
