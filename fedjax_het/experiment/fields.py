"""The plain entries of a config: their defaults, types and ranges."""

from typing import Any, NamedTuple

import ml_collections
from ml_collections import config_dict

from fedjax_het.engine.mapping import BACKENDS
from fedjax_het.engine.tiers import UPLOAD_MODES
from fedjax_het.experiment.optimizers import SCHEDULES
from fedjax_het.kernels.libraries import AUTO, CONV_BACKENDS
from fedjax_het.kernels.matmul_dtype import MATMUL_DTYPES
from fedjax_het.names import check_name
from fedjax_het.options import check_range, check_type, shown


class Field(NamedTuple):
  """One plain entry of a config.

  Attributes:
    default: Its default.
    kind: Its type, maybe a union with None.
    low: Smallest value allowed.
    above: A value that it must exceed.
    choices: All values allowed.
    high: Largest value allowed; None for the limit of int32 or float32.
    below: A value that it must stay below.
    share: Whether it is a share, at most 1.
  """

  default: Any
  kind: Any
  low: float | None = None
  above: float | None = None
  choices: tuple[str, ...] = ()
  high: float | None = None
  below: float | None = None
  share: bool = False


# JAX's keys hold 32 bits of a seed: 2^32 would silently be seed 0.
SEED = Field(0, int, low=0, high=2**32 - 1)
MAYBE_SEED = SEED._replace(default=None, kind=int | None)
AUGMENTATIONS = ('none', 'crop_flip', 'crop_flip_once', 'crop_flip_cutout')

# Local training; the learning rate depends on the round.
LOCAL = dict(
    epochs=Field(2, int, low=1),
    # Minibatches per visit instead of whole epochs; None for epochs.
    steps=Field(None, int | None, low=1),
    batch_size=Field(16, int, low=1),
    # An optimiser of optax, or FILE.py:FUNCTION, a function of the learning
    # rate. `optimizer_args` holds those of its arguments without an entry here.
    optimizer=Field('adam', str),
    optimizer_args=Field({}, ml_collections.ConfigDict),
    learning_rate=Field(1e-3, float, above=0),
    # 'step' multiplies the rate by lr_factor from each of lr_rounds on, rounds
    # counted from 1; 'cosine' falls to zero over num_rounds; others are those
    # of optax, which count rounds from 0 and take schedule_args.
    schedule=Field('constant', str, choices=SCHEDULES),
    schedule_args=Field({}, ml_collections.ConfigDict),
    lr_rounds=Field((), tuple),
    lr_factor=Field(0.1, float, above=0),
    # For 'sgd' only.
    momentum=Field(0.0, float, low=0, below=1),
    nesterov=Field(False, bool),
    # An argument of some optimisers, such as 'adamw' or 'lion'. For the others,
    # such as 'adam' or 'sgd', the decay is added to the gradient.
    weight_decay=Field(0.0, float, low=0),
    # Largest global norm of a gradient; None for no clipping.
    clip_norm=Field(None, float | None, above=0),
    # Leave out an epoch's last partial batch instead of masking its padding,
    # unless it is all that a client has.
    drop_last=Field(False, bool),
    # 'crop_flip_once' does so once for each image that a client trains on,
    # before the first round; the others anew for each batch.
    augment=Field('none', str, choices=AUGMENTATIONS),
    # Whether 'crop_flip_cutout' cuts out its square 'after' images are
    # normalised, which leaves the mean colour, or 'before', which leaves black.
    cutout=Field('after', str, choices=('after', 'before')),
    # Whether clients keep the optimiser state between visits instead of
    # resetting it. The default is the method's, see `Needs`.
    keep_optimizer=Field(False, bool),
)
# Synchronous or asynchronous rounds. Times are virtual: they follow from
# `devices`. In asynchronous rounds a client has the learning rate of the round
# in which it downloads.
CLOCK = dict(
    # 'synchronous' rounds; 'async', every client at its own pace;
    # 'sequential', one client after another; or 'tiers', every group at its own
    # pace. A round of the latter three is `cohort_size` uploads, with 'tiers'
    # those of one group.
    mode=Field('synchronous', str, choices=('synchronous', *UPLOAD_MODES)),
    # Seed of jitter, pauses, losses, the order of 'sequential', and the cohorts
    # of 'tiers'.
    seed=SEED,
    # None assigns devices to clients in the order of the devices' names; a seed
    # assigns them at random.
    device_seed=MAYBE_SEED,
    # Whether the groups with the most operations of a visit get the first
    # devices; for `device_seed=None`.
    device_by_work=Field(False, bool),
)
# Callbacks, which do not change the training; see docs/callbacks.md.
CALLBACKS = dict(
    # Evaluations without an improvement after which the run stops; None for
    # no early stopping.
    patience=Field(None, int | None, low=1),
    # The metric of early stopping and of the best checkpoint, in the names of
    # metrics.jsonl, and whether 'max' or 'min' is better.
    metric=Field('accuracy', str),
    mode=Field('max', str, choices=('max', 'min')),
    # Whether the models of the best evaluation are kept in the folder `best`.
    best_checkpoint=Field(False, bool),
    # First and last round of a JAX profiler trace; empty for none.
    profile=Field((), tuple),
    csv=Field(False, bool),
    wandb=Field(False, bool),
    mlflow=Field(False, bool),
)
FIELDS = dict(
    # Seeds of training and of client sampling; the partition has its own.
    seed=SEED,
    sampling_seed=SEED,
    # A key of `DATASETS`, or the user's own: 'npz' reads `data_file`,
    # 'image_folder', 'hf' and 'tfds:NAME' read `data_dir`.
    dataset=Field('digits', str),
    data_dir=Field(None, str | None),
    data_file=Field(None, str | None),
    # Whether data must be the official ones, by checksum and size; False
    # accepts a part of a data set.
    verify=Field(True, bool),
    # Images are resized to this height and width; None leaves them.
    image_size=Field(None, int | None, low=1),
    # Images are normalised by the mean and standard deviation of the training
    # set, or for 'half' by 0.5 and 0.5, as pretrained vision transformers
    # expect.
    normalise=Field('dataset', str, choices=('dataset', 'half')),
    # Number of training examples to use, in the classes' proportions; None for
    # the whole training set, whose mean and deviation are taken in any case,
    # unless images are resized.
    train_size=Field(None, int | None, low=1),
    # Share of training labels that are replaced by a random other class.
    label_noise=Field(0.0, float, low=0, below=1),
    # Number of training examples set aside as a public set, in the classes'
    # proportions, before the others are assigned to clients; None for no public
    # set.
    public_size=Field(None, int | None, low=1),
    # Share of each client's examples, equal in every class, that is held out to
    # choose the best round. None chooses it on the test set, which is
    # optimistic.
    validation=Field(None, float | None, above=0),
    # Whether each client's model is also tested on test examples of its own:
    # those of the partition's file, or the test set divided in the proportions
    # of the training partition.
    personal_test=Field(False, bool),
    # None assigns clients to groups in the order of the groups' names as
    # strings ('a10' before 'a2'), in whatever order they are written; a seed
    # assigns them at random.
    group_seed=MAYBE_SEED,
    # The server's own model, for methods with one: a model's name, or a
    # section of `model` and its options.
    server_model=Field(None, str | ml_collections.ConfigDict | None),
    # Whether running norm statistics stay on the client (FedBN).
    local_stats=Field(False, bool),
    # Clients per round; None for all, with `clock.mode='tiers'` for as many as
    # the smallest group has.
    cohort_size=Field(None, int | None, low=1),
    num_rounds=Field(20, int, low=1),
    eval_every=Field(1, int, low=1),
    eval_batch_size=Field(500, int, low=1),
    # How many personal models of a group are evaluated; None for all.
    eval_clients_per_group=Field(None, int | None, low=1),
    # The first round with this mean accuracy, a share, is reported; None for no
    # target.
    target_accuracy=Field(None, float | None, above=0, share=True),
    checkpoint_every=Field(5, int, low=1),
    keep_checkpoints=Field(3, int, low=2),
    # Dtype to which the operands of convolutions and dense layers are rounded;
    # sums, parameters and all else are float32.
    matmul_dtype=Field('float32', str, choices=MATMUL_DTYPES),
    # Library of the models' convolutions on a CPU, and how clients are mapped.
    # 'auto' follows measured speeds, see `experiment.tuned`.
    # Programs with oneDNN are not kept in the compilation cache.
    conv_backend=Field(AUTO, str, choices=(AUTO, *CONV_BACKENDS)),
    backend=Field('auto', str, choices=BACKENDS),
    chunk=Field(None, int | None, low=1),
    # Rounds that one dispatch runs on the device, at most 1,000 and only up to
    # the next evaluation or checkpoint. Their lines are written together.
    rounds_per_dispatch=Field(1, int, low=1),
    # Where clients' states are stored between their visits: on the device, or
    # in the host's memory, from which those of a cohort are copied.
    client_store=Field('device', str, choices=('device', 'host')),
    # What to do about NaN or infinity in an update, a client's or a server's.
    nonfinite=Field('raise', str, choices=('raise', 'drop')),
    tensorboard=Field(False, bool),
    compilation_cache=Field(True, bool),
)
SECTIONS = (
    'partition', 'groups', 'model', 'algorithm', 'local', 'clock', 'devices',
    'callbacks',
)  # fmt: skip


def plain(field: Field) -> Any:
  """A default for a ConfigDict; None becomes a placeholder with its type."""
  if field.kind is ml_collections.ConfigDict:
    return ml_collections.ConfigDict(field.default)
  if ml_collections.ConfigDict in getattr(field.kind, '__args__', ()):
    # The entry may become a name or a section, so its type stays open.
    return config_dict.FieldReference(field.default, field_type=object)
  if field.default is None:
    return config_dict.placeholder(_not_none(field.kind))
  return field.default


def _not_none(kind: Any) -> type:
  kinds = getattr(kind, '__args__', (kind,))
  return next(k for k in kinds if k is not type(None))


def check_field(name: str, value: Any, field: Field) -> None:
  """Raises ValueError if a value has the wrong type or is out of range.

  Args:
    name: The entry's full name, for the message.
    value: Its value.
    field: Its type and range.

  Raises:
    ValueError: In one line that names the entry, its value and what is allowed.
  """
  check_type(name, value, field.kind, field.high)
  if value is None:
    return
  if field.share and value > 1:
    raise ValueError(
        f'{name} must be a share of at most 1, got {shown(value)}; for percent '
        'divide by 100.'
    )
  if field.choices:
    check_name(name, value, field.choices)
  check_range(name, value, field.low, field.above, field.below)
