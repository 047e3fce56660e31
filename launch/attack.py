r"""Reconstructs images from the features that clients of FedIN upload.

  python -m launch.attack --workdir=runs/quick
  python -m launch.attack --workdir=runs/fedin,runs/fedin_noise --noise=0,0.8

This is FedIN's Fig. 10, on stored runs. The adversary is a server that knows a
client's extractor and the features of one batch of its images; it optimises
random pixels until they have these features. A level of --noise is the Gaussian
noise that the client adds, in units of the features' standard deviation; the
default levels are 0 and the run's own. The run's `clip` and `sigma` apply at
all levels. Features are computed as for an upload: batch norm uses the batch's
statistics. Client and adversary use the extractor of the last checkpoint.

The program prints PSNR and SSIM, mean and standard deviation over images, and
writes attack.md, attack.json (values of each image), images.png, psnr.png and
ssim.png. The last row is the mean training image, which needs no attack. The
paper also measures LPIPS, which needs the parameters of a pretrained network:
give their file by --lpips (see analysis/lpips.py), else LPIPS is left out.
"""

from collections.abc import Sequence
import json
import pathlib
from typing import Any, NamedTuple

from absl import flags

from . import stored_runs, terminal
from .stored_runs import names_of, open_runs
from .terminal import CommandError, expanded, fail, folder

_MOST_SHOWN = 8  # Images in the picture.


class Result(NamedTuple):
  """Result of an attack at one level of noise.

  Attributes:
    label: The level, after the run's name if there are several runs.
    workdir: The run.
    noise: The level.
    step: [S], steps of the adversary.
    error: [S], mean squared error of the features.
    psnr: [S, N], of each of N images.
    ssim: [S, N].
    lpips: [N], at the last step; None without weights.
    images: [N, H, W, C] in [0, 1], at the last step.
  """

  label: str
  workdir: str
  noise: float
  step: Any
  error: Any
  psnr: Any
  ssim: Any
  lpips: Any
  images: Any


class Target(NamedTuple):
  """The client of a run that is attacked.

  Attributes:
    originals: [N, H, W, C] in [0, 1], its first training images.
    guess: [H, W, C], the mean training image of all clients.
    extract: Function from images in [0, 1] to features, as for an upload.
    protect: `(noise level) -> function (key, features) -> features`.
    own_noise: The run's noise level.
    sigma: The deviation of the run's absolute noise, which all levels keep.
  """

  originals: Any
  guess: Any
  extract: Any
  protect: Any
  own_noise: float
  sigma: float = 0.0


def define_flags() -> None:
  """Defines the flags; not at import, since other programs share names."""
  flags.DEFINE_list('workdir', None, 'Folder of a run of fedin, or several.')
  flags.DEFINE_string('out', 'attack', 'Folder of the results.')
  flags.DEFINE_list(
      'noise', None, "Levels of noise; 0 and the run's own by default."
  )
  flags.DEFINE_integer('client', 0, 'Id of the client that is attacked.')
  flags.DEFINE_integer('num_images', 16, "The client's images in the batch.")
  flags.DEFINE_integer('steps', 2000, 'Steps of the adversary.')
  flags.DEFINE_float('learning_rate', 0.05, "Of the adversary's Adam.")
  flags.DEFINE_float(
      'tv', 0.0, 'Weight of the total variation; 0 in the paper.'
  )
  flags.DEFINE_integer('seed', 0, 'Of noise and first pixels.')
  flags.DEFINE_string('lpips', None, 'File of weights, to measure LPIPS.')
  stored_runs.define_flags()


def read_target(run, client: int, num_images: int) -> Target:
  """Reads what the attack needs from a run.

  Args:
    run: The run, as `load_run` returns it.
    client: Id of the client.
    num_images: Largest number of its images.

  Returns:
    The target.

  Raises:
    ValueError: If its clients upload no features or keep their extractors, or
      its data are not images; or as `Run.model`.
    FileNotFoundError: If data or checkpoints are missing.
  """
  import jax
  import numpy as np

  from fedjax_het.algorithms.fedin.passes import Features

  options = run.config.algorithm
  if options.name != 'fedin' or not options.in_training:
    what = options.name
    what += ' without IN training' if options.name == 'fedin' else ''
    raise ValueError(
        f'{run.workdir} is a run of {what}, whose clients upload no features '
        'of an extractor; attack a run of fedin.'
    )
  if options.aggregation == 'none':
    raise ValueError(
        f'{run.workdir} has algorithm.aggregation=none: its extractors stay on '
        'the clients, and the server cannot invert them.'
    )
  variables = run.model(client=client).variables
  experiment = run.experiment
  images = experiment.dataset.train_images
  if images.dtype != np.uint8 or images.ndim != 4:
    raise ValueError(
        f'{run.workdir}: an attack needs images [N, H, W, C] of uint8, got '
        f'{images.dtype} of shape {images.shape}.'
    )
  federation = experiment.federation
  model = federation.groups[federation.places()[0][client]].model
  chosen = experiment.parts[client][:num_images]

  def extract(pixels):
    x = experiment.preprocess(255 * pixels)
    return model.apply(
        variables, x, stop=model.cut[0], train=True, key=jax.random.key(0)
    )[0]

  def protect(noise):
    features = Features(options.clip, noise, options.sigma)
    return lambda key, feature: features(key, feature, None)

  guess = np.mean(images, axis=0, dtype=np.float64) / 255
  originals = images[chosen].astype(np.float32) / 255
  return Target(
      originals, guess, extract, protect, options.noise, options.sigma
  )


def attack_run(
    target: Target,
    levels: Sequence[float] | None,
    *,
    steps: int,
    learning_rate: float,
    tv: float,
    seed: int,
    workdir: str = '',
    name: str = '',
    lpips=None,
) -> list[Result]:
  """Attacks a client at some levels of noise.

  Args:
    target: The client.
    levels: Levels of noise; None for 0 and the run's own.
    steps: Steps of the adversary.
    learning_rate: See `make_attack`.
    tv: See `make_attack`.
    seed: Seed of noise and first pixels, the same at all levels.
    workdir: The run's folder, for the results.
    name: Prefix of the labels.
    lpips: Function from `read_lpips`; None to leave LPIPS out.

  Returns:
    A result for each level.

  Raises:
    ValueError: If an option is out of its range.
    FloatingPointError: If the attack diverges.
  """
  import jax
  import numpy as np

  from fedjax_het.analysis import image_quality
  from fedjax_het.analysis.reconstruction import make_attack

  if levels is None:
    levels = dict.fromkeys((0.0, target.own_noise))
  run_attack = make_attack(
      target.extract, target.originals.shape[1:], steps=steps,
      learning_rate=learning_rate, tv=tv, num_snapshots=min(20, steps),
  )  # fmt: skip
  noise_key, key = jax.random.split(jax.random.key(seed))
  feature = jax.jit(target.extract)(target.originals)
  results = []
  for level in levels:
    received = target.protect(level)(noise_key, feature)
    images, error, step = map(np.asarray, run_attack(received, key))
    if not np.isfinite(error[-1]):
      raise FloatingPointError(
          'The attack has diverged; give a smaller --learning_rate.'
      )
    psnr, ssim = (
        np.stack([measure(found, target.originals) for found in images])
        for measure in (image_quality.psnr, image_quality.ssim)
    )
    label = f'{name}noise {level:g}' if level else f'{name}no noise'
    if target.sigma:
      label += f' but sigma {target.sigma:g}'
    learned = lpips and lpips(images[-1], target.originals)
    results.append(Result(
        label, workdir, level, step, error, psnr, ssim, learned, images[-1]
    ))  # fmt: skip
  return results


def as_table(
    target: Target, results: Sequence[Result], lpips=None
) -> list[list[str]]:
  """The table of results, with a last row for the mean image as a guess."""
  import numpy as np

  from fedjax_het.analysis import image_quality
  from fedjax_het.analysis.pictures.style import deviation

  def spread(values, digits):
    text = f'{np.mean(values):.{digits}f}'
    if len(values) > 1:
      text += f' ± {deviation(values):.{digits}f}'
    return text

  def line(label, psnr, ssim, learned, error):
    cells = [(psnr, 1), (ssim, 3), *([(learned, 3)] if lpips else [])]
    return [
        label,
        *(spread(values, digits) for values, digits in cells),
        error,
    ]

  table = [[
      'features', 'PSNR (dB)', 'SSIM', *['LPIPS'] * bool(lpips),
      'error of the features',
  ]]  # fmt: skip
  for one in results:
    error = f'{one.error[-1]:.2e}'
    table.append(line(one.label, one.psnr[-1], one.ssim[-1], one.lpips, error))
  guess = np.broadcast_to(target.guess, target.originals.shape)
  psnr, ssim, learned = (
      measure and measure(guess, target.originals)
      for measure in (image_quality.psnr, image_quality.ssim, lpips)
  )
  return [*table, line('mean image', psnr, ssim, learned, '-')]


def draw(target: Target, results: Sequence[Result], out: pathlib.Path) -> None:
  """Draws the images, and their quality by the adversary's steps."""
  from fedjax_het.analysis import pictures

  rows = {'original': target.originals[:_MOST_SHOWN]}
  captions = {}
  for one in results:
    rows[one.label] = one.images[:_MOST_SHOWN]
    captions[one.label] = [
        f'{psnr:.1f} dB, {ssim:.2f}'
        for psnr, ssim in zip(one.psnr[-1], one.ssim[-1], strict=True)
    ][:_MOST_SHOWN]
  pictures.draw_images(rows, out / 'images.png', captions=captions)
  for name, title in (('psnr', 'PSNR (dB)'), ('ssim', 'SSIM')):
    curves = {r.label: (r.step, getattr(r, name).T) for r in results}
    pictures.draw_curves(
        {'': curves}, out / f'{name}.png', title, xlabel='Step of the adversary'
    )


def _write(out, target, results, setting, lpips) -> str:
  """Writes all files and returns the table as Markdown."""
  from fedjax_het.files import write_atomically
  from fedjax_het.reporting.report_pictures import NO_MATPLOTLIB
  from fedjax_het.reporting.tables import as_markdown

  out.mkdir(parents=True, exist_ok=True)
  # The attack takes as many steps for each of its snapshots.
  setting = dict(setting, steps=int(results[0].step[-1]))
  text = as_markdown(as_table(target, results, lpips))
  rows = [
      dict(
          workdir=one.workdir, noise=one.noise, error=float(one.error[-1]),
          psnr=one.psnr[-1].tolist(), ssim=one.ssim[-1].tolist(),
          **(dict(lpips=one.lpips.tolist()) if lpips else {}),
      )
      for one in results
  ]  # fmt: skip
  write_atomically(
      out / 'attack.json', json.dumps(dict(setting, results=rows), indent=1)
  )
  shown = (
      '![Originals and reconstructions](images.png)\n\n'
      '![PSNR by step](psnr.png)\n\n![SSIM by step](ssim.png)'
  )
  try:
    draw(target, results, out)
  except ImportError:
    shown = f'{NO_MATPLOTLIB}.'
  number = len(target.originals)
  write_atomically(
      out / 'attack.md',
      f'# Images from features\n\n{number} training image'
      f'{"s" * (number > 1)} of client {setting["client"]}, '
      f'{setting["steps"]} steps. Mean and standard deviation over images.\n\n'
      f'{text}\n\n{shown}\n',
  )
  return text


def _levels(texts: Sequence[str] | None) -> list[float] | None:
  """The levels that the flag lists."""
  from fedjax_het.options import not_negative

  if texts is None:
    return None
  try:
    levels = [float(text) for text in texts]
  except ValueError:
    levels = []
  if not levels:
    raise CommandError(
        f'--noise takes numbers such as 0,0.8, got {",".join(texts)!r}.'
    )
  for level in levels:
    not_negative(**{'--noise': level})
  return list(dict.fromkeys(levels))


def _check_same_images(targets: Sequence[Target], runs) -> None:
  """Raises ValueError if the client holds other images in some run."""
  import numpy as np

  for target, run in zip(targets, runs, strict=True):
    if not np.array_equal(target.originals, targets[0].originals):
      raise ValueError(
          f'{run.workdir}: the client holds other images than in '
          f'{runs[0].workdir}; compare runs of one data set and split.'
      )


def main(argv: Sequence[str]) -> None:
  """Runs the attack that the flags describe."""
  del argv
  options = flags.FLAGS
  if not options.workdir:
    fail('Name a run of fedin: python -m launch.attack --workdir=DIR.')
  from fedjax_het.analysis.lpips import read_lpips
  from fedjax_het.options import at_least, integer_between

  try:
    levels = _levels(options.noise)
    for name in ('num_images', 'steps'):
      at_least(1, **{f'--{name}': options[name].value})
    integer_between(0, None, **{'--seed': options.seed})
    out = folder('--out', options.out)
    stored_runs.register()
    setting = {
        name: options[name].value
        for name in ('client', 'num_images', 'steps', 'learning_rate', 'tv',
                     'seed')
    }  # fmt: skip
    lpips = None
    if options.lpips is not None:
      lpips = read_lpips(expanded(options.lpips, '--lpips'))
    runs = open_runs(
        options.workdir,
        options.data_dir,
        options.data_file,
        options.partition_file,
    )
    targets = [
        read_target(run, options.client, options.num_images) for run in runs
    ]
    _check_same_images(targets, runs)
    results = []
    for run, name, target in zip(runs, names_of(runs), targets, strict=True):
      results += attack_run(
          target, levels, steps=options.steps,
          learning_rate=options.learning_rate, tv=options.tv,
          seed=options.seed, workdir=str(run.workdir),
          name=f'{name}, ' if len(runs) > 1 else '', lpips=lpips,
      )  # fmt: skip
    text = _write(out, targets[0], results, setting, lpips)
  except (ValueError, FileNotFoundError, ImportError) as e:
    fail(e)
  except (FloatingPointError, OSError) as e:
    fail(e, 1)
  print(text)
  print(f'\nAttack: {out / "attack.md"}')


def run() -> None:
  """Runs the program."""
  define_flags()
  terminal.run(main, terminal.parse_flags, __doc__)


if __name__ == '__main__':
  run()
