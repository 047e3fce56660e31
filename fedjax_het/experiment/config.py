"""What an experiment's config holds, its defaults, and what is refused."""

from collections.abc import Mapping
import dataclasses
import re
from typing import Any, NamedTuple

import ml_collections
from ml_collections import config_dict

from fedjax_het.algorithms import ALGORITHMS, KEEP_OPTIMIZER
from fedjax_het.data.partition import PARTITIONS
from fedjax_het.data.sources import DATASETS
from fedjax_het.engine import clock as clock_lib
from fedjax_het.engine.asynchronous import check_backend
from fedjax_het.engine.mapping import BACKENDS, TRACEABLE, resolve_backend
from fedjax_het.engine.options import INT32_MAX
from fedjax_het.experiment import options as opt
from fedjax_het.kernels.lowering import CONV_BACKENDS
from fedjax_het.kernels.matmul_dtype import MATMUL_DTYPES
from fedjax_het.models import MODELS, onednn
from fedjax_het.names import check_name, did_you_mean, shown


class Field(NamedTuple):
  """One plain entry of a config.

  Attributes:
    default: Its default.
    kind: Its type, maybe a union with None.
    low: Smallest value allowed.
    above: A value that it must exceed.
    choices: All values allowed.
    high: Largest value allowed; None for what int32 or float32 hold.
  """

  default: Any
  kind: Any
  low: float | None = None
  above: float | None = None
  choices: tuple[str, ...] = ()
  high: float | None = None


# JAX's keys hold 32 bits of a seed: 2^32 would silently be seed 0.
SEED = Field(0, int, low=0, high=2**32 - 1)
MAYBE_SEED = SEED._replace(default=None, kind=int | None)
AUGMENTATIONS = ('none', 'crop_flip', 'crop_flip_cutout')
SCHEDULES = ('constant', 'step', 'cosine')
OPTIMIZERS = ('adam', 'adamw', 'sgd')

# How clients train; learning rates follow the round.
LOCAL = dict(
    epochs=Field(2, int, low=1),
    # Minibatches a visit instead of whole epochs; None for epochs.
    steps=Field(None, int | None, low=1),
    batch_size=Field(16, int, low=1),
    optimizer=Field('adam', str, choices=OPTIMIZERS),
    learning_rate=Field(1e-3, float, above=0),
    # 'step' multiplies the rate by lr_factor from each of lr_rounds on, rounds
    # counted from 1; 'cosine' falls to zero over num_rounds.
    schedule=Field('constant', str, choices=SCHEDULES),
    lr_rounds=Field((), tuple),
    lr_factor=Field(0.1, float, above=0),
    # For 'sgd' only.
    momentum=Field(0.0, float, low=0),
    nesterov=Field(False, bool),
    # Added to the gradient ('adam', 'sgd') or decoupled ('adamw').
    weight_decay=Field(0.0, float, low=0),
    # Largest global norm of a gradient; None for no clipping.
    clip_norm=Field(None, float | None, above=0),
    # Leave out an epoch's last partial batch instead of masking its padding,
    # unless it is all that a client has.
    drop_last=Field(False, bool),
    augment=Field('none', str, choices=AUGMENTATIONS),
    # Whether 'crop_flip_cutout' cuts its square out 'after' images are
    # normalised, which gives it the mean colour, or 'before', in black.
    cutout=Field('after', str, choices=('after', 'before')),
    # Whether clients keep their optimisers between visits, else they begin
    # anew. The default is the method's, see `KEEP_OPTIMIZER`.
    keep_optimizer=Field(False, bool),
)
# Who waits for whom. Times are virtual: they follow from `devices`. Without
# rounds that all share, a client's learning rate follows its own visits.
CLOCK = dict(
    # 'synchronous' rounds; 'async', every client at its own pace; or
    # 'sequential', one client after another. A round of the latter two is
    # `cohort_size` uploads.
    mode=Field(
        'synchronous', str, choices=('synchronous', *clock_lib.MODES)
    ),
    # Of jitter, pauses, losses, and the order of 'sequential'.
    seed=SEED,
    # None deals devices to clients in order, a seed at random.
    device_seed=MAYBE_SEED,
)
FIELDS = dict(
    # Seeds of training, and of who takes part; the partition has its own.
    seed=SEED,
    sampling_seed=SEED,
    dataset=Field('digits', str, choices=tuple(DATASETS)),
    data_dir=Field(None, str | None),
    # Images are resized to this height and width; None leaves them.
    image_size=Field(None, int | None, low=1),
    # What images are normalised by: the training set's mean and deviation, or
    # 0.5 and 0.5, as pretrained vision transformers expect.
    normalise=Field('dataset', str, choices=('dataset', 'half')),
    # Training examples that there are, in the classes' proportions; None for
    # all of the data set's.
    train_size=Field(None, int | None, low=1),
    # Share of the training labels that are wrong, each another class at random.
    label_noise=Field(0.0, float, low=0),
    # Training examples set aside as a public set, in the classes' proportions,
    # before the others are dealt to clients; None for no public set.
    public_size=Field(None, int | None, low=1),
    # Share of each client's examples, the same of every class, that it does
    # not train on: the best round is chosen on them. None chooses it on the
    # test set, which flatters.
    validation=Field(None, float | None, above=0),
    # None deals clients to groups in order, a seed at random.
    group_seed=MAYBE_SEED,
    # Whether running norm statistics stay on the client (FedBN).
    local_stats=Field(False, bool),
    # Clients a round; None for all.
    cohort_size=Field(None, int | None, low=1),
    num_rounds=Field(20, int, low=1),
    eval_every=Field(1, int, low=1),
    eval_batch_size=Field(500, int, low=1),
    # How many personal models of a group are evaluated; None for all.
    eval_clients_per_group=Field(None, int | None, low=1),
    # Mean accuracy whose first round is reported; None for none.
    target_accuracy=Field(None, float | None, above=0),
    checkpoint_every=Field(5, int, low=1),
    keep_checkpoints=Field(3, int, low=2),
    # Type of the operands of the models' products; their sums, the weights and
    # all else are float32.
    matmul_dtype=Field('float32', str, choices=MATMUL_DTYPES),
    # Whose convolutions models call on a CPU. Programs with oneDNN's are not
    # kept in the compilation cache.
    conv_backend=Field('xla', str, choices=CONV_BACKENDS),
    backend=Field('auto', str, choices=BACKENDS),
    chunk=Field(None, int | None, low=1),
    # Rounds that are run without asking the host, but for evaluations and
    # checkpoints, and 1,000 at most. Their lines are written together.
    rounds_per_dispatch=Field(1, int, low=1),
    # Where clients' states lie between their visits: on the device, or in the
    # host's memory, from which those of a cohort are brought.
    client_store=Field('device', str, choices=('device', 'host')),
    # What to do about a client whose update holds NaN or infinity.
    nonfinite=Field('raise', str, choices=('raise', 'drop')),
    tensorboard=Field(False, bool),
    compilation_cache=Field(True, bool),
)
SECTIONS = (
    'partition', 'groups', 'model', 'algorithm', 'local', 'clock', 'devices'
)  # fmt: skip
# Names that would be mistaken for another key of a metrics line.
_RESERVED = ('worst', 'mean')


def _plain(field: Field) -> Any:
  """A ConfigDict value: None needs a placeholder that keeps the type."""
  if field.default is None:
    return config_dict.placeholder(_not_none(field.kind))
  return field.default


def _not_none(kind: Any) -> type:
  kinds = getattr(kind, '__args__', (kind,))
  return next(k for k in kinds if k is not type(None))


def algorithm_config(name: str, **options) -> ml_collections.ConfigDict:
  """The `algorithm` section: a method and all of its options.

  Args:
    name: A key of `ALGORITHMS`.
    **options: Those that differ from the method's defaults.

  Returns:
    The section, in which each option can be overridden.

  Raises:
    ValueError: If the name or an option is unknown.
  """
  check_name('algorithm', name, ALGORITHMS)
  known = opt.keyword_options(ALGORITHMS[name])
  opt.check_options('algorithm', options, known, f'algorithm {name!r}')
  values = {k: _plain(Field(d, kind)) for k, (kind, d) in known.items()}
  section = ml_collections.ConfigDict(dict(name=name, **values))
  section.update(options)
  return section


def default_config(algorithm: str = 'fedin') -> ml_collections.ConfigDict:
  """The default experiment: a method on the embedded digits, 10 clients.

  Args:
    algorithm: A key of `ALGORITHMS`.

  Returns:
    A locked config. `groups` maps each group's name to its number of clients,
    the name being the model, or to a section of `model`, `clients` and model
    options; `model` holds the options of all models that have them;
    `partition` holds a form's name, its own seed and its options; `devices`
    maps the name of each kind of device to a section of `clients` and fields
    of `Device`, and is empty for equal ones.
  """
  config = {name: _plain(field) for name, field in FIELDS.items()}
  config['local'] = {name: _plain(field) for name, field in LOCAL.items()}
  config['local']['keep_optimizer'] = KEEP_OPTIMIZER.get(algorithm, False)
  config['clock'] = {name: _plain(field) for name, field in CLOCK.items()}
  config['devices'] = {}
  config['partition'] = dict(name='dirichlet', seed=0, alpha=0.5, min_size=16)
  config['groups'] = dict(mini_resnet6=4, mini_resnet8=3, mini_resnet10=3)
  config['model'] = dict(width=1.0, norm='batch')
  config['algorithm'] = algorithm_config(algorithm)
  return ml_collections.ConfigDict(config).lock()


def group_spec(config, name: str) -> tuple[str, int, dict[str, Any]]:
  """One group as (model, number of clients, options of the model).

  Args:
    config: The config.
    name: A key of `config.groups`.

  Returns:
    The model's options are those of `config.model` that it has, and the
    group's own.
  """
  entry = config.groups[name]
  entry = dict(entry) if isinstance(entry, Mapping) or hasattr(
      entry, 'to_dict'
  ) else dict(clients=entry)
  model, clients = entry.pop('model', name), entry.pop('clients', None)
  if model not in [*MODELS]:  # A list: what is no name may not be hashable.
    return model, clients, entry
  known = opt.keyword_options(MODELS[model])
  common = {k: v for k, v in config.model.items() if k in known}
  return model, clients, {**common, **entry}


def device_spec(config, name: str) -> tuple[clock_lib.Device, int]:
  """One kind of device and its number of clients.

  Args:
    config: The config.
    name: A key of `config.devices`.

  Returns:
    The device and the number.

  Raises:
    ValueError: If an entry is unknown or out of its range, naming it.
  """
  where = f'devices.{name}'
  if not hasattr(config.devices[name], 'items'):
    raise ValueError(
        f'{where} must be a section, got {shown(config.devices[name])}.'
    )
  entry = dict(config.devices[name])
  clients = entry.pop('clients', None)
  _check_field(f'{where}.clients', clients, Field(1, int, low=1))
  known = {f.name: (f.type, f.default) for f in _DEVICE_FIELDS}
  opt.check_options(where, entry, known, 'a device')
  try:
    return clock_lib.Device(**entry), clients
  except ValueError as e:
    raise ValueError(f'{where}: {e}') from e


_DEVICE_FIELDS = dataclasses.fields(clock_lib.Device)


def check(config: ml_collections.ConfigDict) -> None:
  """Refuses a config that cannot be run, before any data is read.

  Args:
    config: The config.

  Raises:
    ValueError: In one line that names the entry, its value and what is right.
  """
  _check_keys(config, (*FIELDS, *SECTIONS), '')
  for name, field in FIELDS.items():
    _check_field(name, config[name], field)
  for name in SECTIONS:
    if not hasattr(config[name], 'items'):
      raise ValueError(f'{name} must be a section, got {shown(config[name])}.')
  _check_keys(config.local, LOCAL, 'local.')
  for name, field in LOCAL.items():
    _check_field(f'local.{name}', config.local[name], field)
  _check_local(config.local)
  _check_section(config.algorithm, 'algorithm', ALGORITHMS)
  name = config.algorithm.name
  if config.local.keep_optimizer and name not in KEEP_OPTIMIZER:
    raise ValueError(
        f'local.keep_optimizer=True: {name} begins the '
        'optimiser anew in each visit; the methods that can keep it are '
        f'{", ".join(KEEP_OPTIMIZER)}.'
    )
  _check_section(config.partition, 'partition', PARTITIONS)
  _check_field('partition.seed', config.partition.get('seed'), SEED)
  _check_groups(config)
  if config.conv_backend == 'onednn':
    onednn.check()
  if config.label_noise >= 1:
    raise ValueError(
        f'label_noise must be a share below 1, got {config.label_noise}.'
    )
  if config.target_accuracy is not None and config.target_accuracy > 1:
    raise ValueError(
        'target_accuracy must be a share of at most 1, got '
        f'{config.target_accuracy}; for percent divide by 100.'
    )
  total = sum(group_spec(config, name)[1] for name in config.groups)
  if config.cohort_size is not None and config.cohort_size > total:
    raise ValueError(
        f'cohort_size={config.cohort_size} is larger than the population of '
        f'{total} clients; it must be between 1 and {total}.'
    )
  _check_clock(config, total)
  _check_dispatch(config)


def _check_keys(section, known, prefix: str) -> None:
  for name in section:
    if name not in known:
      raise ValueError(
          f'Unknown config key {prefix}{name}{did_you_mean(name, known)}; '
          f'known are {", ".join(known)}.'
      )
  for name in known:
    if name not in section:
      raise ValueError(
          f'The config lacks {prefix}{name}; begin with default_config().'
      )


def _check_field(name: str, value: Any, field: Field) -> None:
  opt.check_type(name, value, field.kind, field.high)
  if value is None:
    return
  if field.choices:
    check_name(name, value, field.choices)
  if field.low is not None and value < field.low:
    raise ValueError(
        f'{name} must be at least {field.low}, got {shown(value)}.'
    )
  if field.above is not None and value <= field.above:
    raise ValueError(f'{name} must be above {field.above}, got {value}.')


def _check_local(local) -> None:
  """What entries of `local` demand of each other."""
  for item in local.lr_rounds:
    _check_field('local.lr_rounds', item, Field(1, int, low=1))
  if bool(local.lr_rounds) != (local.schedule == 'step'):
    raise ValueError(
        f'local.lr_rounds={tuple(local.lr_rounds)} does not fit '
        f'local.schedule={local.schedule!r}; step needs rounds, the others '
        'none.'
    )
  if local.optimizer != 'sgd' and (local.momentum or local.nesterov):
    raise ValueError(
        'local.momentum and local.nesterov are for the optimizer sgd, got '
        f'{local.optimizer!r}.'
    )
  if local.momentum >= 1:
    raise ValueError(f'local.momentum must be below 1, got {local.momentum}.')
  if local.nesterov and not local.momentum:
    raise ValueError('local.nesterov needs local.momentum above 0.')


def _check_clock(config, num_clients: int) -> None:
  """The entries of `clock` and `devices`, and whether they can run."""
  _check_keys(config.clock, CLOCK, 'clock.')
  for name, field in CLOCK.items():
    _check_field(f'clock.{name}', config.clock[name], field)
  fleet = {name: device_spec(config, name) for name in config.devices}
  number = sum(clients for _, clients in fleet.values())
  if fleet and number != num_clients:
    raise ValueError(
        f'devices are for {number} clients, but groups hold {num_clients}.'
    )
  if fleet and all(device.drop_out == 1 for device, _ in fleet.values()):
    raise ValueError(
        'devices: drop_out is 1 for every client, so no upload would arrive.'
    )
  if config.clock.mode != 'synchronous':
    check_backend(config.backend)
    uploads = config.num_rounds * (config.cohort_size or num_clients)
    if uploads > INT32_MAX:
      raise ValueError(
          f'num_rounds={config.num_rounds} makes {uploads} uploads, more than '
          f'the {INT32_MAX} that clock.mode={config.clock.mode!r} can count.'
      )
    if config.client_store == 'host':
      raise ValueError(
          "client_store='host' is for synchronous rounds: what is in flight "
          f'between clients and server under clock.mode={config.clock.mode!r} '
          'lies on the device.'
      )


def _check_dispatch(config) -> None:
  """Whether several rounds fit into one program."""
  if config.rounds_per_dispatch == 1:
    return
  if config.client_store == 'host':
    raise ValueError(
        f'rounds_per_dispatch={config.rounds_per_dispatch} does not fit '
        "client_store='host', which brings clients from the host every round."
    )
  if resolve_backend(config.backend) not in TRACEABLE:
    raise ValueError(
        f'rounds_per_dispatch={config.rounds_per_dispatch} does not fit '
        f'backend={config.backend!r}, which runs from Python; use auto or one '
        f'of {", ".join(TRACEABLE)}.'
    )


def _check_section(section, where: str, table) -> None:
  """A section of a name out of `table` and the options of that entry."""
  name = section.get('name')
  check_name(where, name, table)
  known = opt.keyword_options(table[name])
  given = {k: v for k, v in section.items() if k != 'name'}
  if 'seed' in known:  # It has a range of its own.
    given.pop('seed', None)
  opt.check_options(where, given, known, f'{where} {name!r}')


def _check_groups(config) -> None:
  """Names, models, client counts and model options."""
  if not config.groups:
    raise ValueError('groups is empty; name at least one model.')
  used = set()
  for name in config.groups:
    if not re.fullmatch(r'[\w.-]+', name) or name in _RESERVED:
      raise ValueError(
          f'A group cannot be called {name!r}; use letters, digits and _.-, '
          f'and not {" or ".join(_RESERVED)}.'
      )
    model, clients, given = group_spec(config, name)
    check_name(f'model of groups.{name}', model, MODELS)
    _check_field(f'groups.{name}', clients, Field(1, int, low=1))
    known = opt.keyword_options(MODELS[model])
    opt.check_options(f'groups.{name}', given, known, f'model {model!r}')
    used |= set(known)
  for name in config.model:
    if name not in used:
      raise ValueError(
          f'model.{name}: none of the models has an option {name!r}'
          f'{did_you_mean(name, used)}; they take '
          f'{", ".join(sorted(used))}.'
      )
