"""The trained models of a run, from its state."""

from collections.abc import Callable
import dataclasses
import functools
import os
import pathlib
from typing import Any, NamedTuple

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.analysis.similarity import block_features
from fedjax_het.engine.types import Group
from fedjax_het.engine.visits import check_inputs
from fedjax_het.experiment.build import Experiment
from fedjax_het.files import check_local, write_atomically
from fedjax_het.models import Variables
from fedjax_het.names import check_name
from fedjax_het.options import integer_between


class Model(NamedTuple):
  """A trained model.

  Attributes:
    apply: `(variables, x) -> outputs [B, C]`, compiled. `x` are examples as the
      data set holds them, such as [B, H, W, C] uint8 images; `apply` includes
      the run's preprocessing.
    variables: Its parameters and running statistics, a pytree.
  """

  apply: Callable[[Any, Any], jax.Array]
  variables: Any

  def __repr__(self) -> str:
    count = sum(leaf.size for leaf in jax.tree.leaves(self.variables))
    return f'Model(apply, variables of {count:,} numbers)'

  def save(self, path: str | os.PathLike) -> None:
    """Writes the variables in flax's msgpack format.

    `flax.serialization.msgpack_restore(data)` reads them as nested dicts, and
    `flax.serialization.from_bytes(variables, data)` as the same pytree.

    Args:
      path: The file.

    Raises:
      ValueError: If it is of a cloud folder.
      OSError: If it cannot be written.
    """
    check_local(path, 'path')
    data = flax.serialization.to_bytes(jax.device_get(self.variables))
    write_atomically(pathlib.Path(path), data)


class Reader:
  """Reads models from states of one run, and keeps its compiled functions."""

  def __init__(self, experiment: Experiment):
    """Compiles nothing yet."""
    self.experiment = experiment
    self.apply = {
        group.name: _apply(experiment, group)
        for group in experiment.federation.groups
    }
    calibrate = experiment.algorithm.calibrate
    self._calibrate = calibrate and jax.jit(calibrate)

  def server(self, state: Any) -> Any:
    """The server state for an evaluation, calibrated if the method does so."""
    if self._calibrate is None:
      return state.server
    return self._calibrate(state.server, self.experiment.data)

  def __call__(self, rounds: int, state: Any) -> 'Trained':
    """The models of a state.

    Args:
      rounds: Rounds that it has done.
      state: A state of the run's driver.

    Returns:
      The models, which are computed only on request.
    """
    return Trained(self, rounds, state)


@dataclasses.dataclass(frozen=True)
class Trained:
  """The models of one state.

  Attributes:
    reader: The reader that computes the models.
    rounds: Rounds that they have been trained for.
    state: The state.
  """

  reader: Reader
  rounds: int
  state: Any

  @property
  def experiment(self) -> Experiment:
    """The groups, the algorithm and the data."""
    return self.reader.experiment

  @functools.cached_property
  def _server(self) -> Any:
    return self.reader.server(self.state)

  @property
  def groups(self) -> dict[str, list[int]]:
    """{group: ids of its clients}."""
    return {
        group.name: group.client_ids.tolist()
        for group in self.experiment.federation.groups
    }

  def model(
      self, group: str | None = None, *, client: int | None = None
  ) -> Model:
    """The trained model of a group or of a client.

    Args:
      group: Name of a group whose clients share one model.
      client: Id of a client, of any group; instead of `group`.

    Returns:
      The model, which unpacks as `apply, variables`.

    Raises:
      ValueError: If neither or both are given, one is unknown, or the group's
        clients have models of their own.
    """
    chosen, row = self._place(group, client)
    of_group = self.state.clients[chosen.name]
    own = jax.tree.map(lambda leaf: jnp.asarray(leaf[row]), of_group)
    return Model(
        self.reader.apply[chosen.name],
        self.experiment.algorithm.client_model(self._server, own, chosen),
    )

  def _place(self, group, client) -> tuple[Group, int]:
    """The group and the row of a model, see `model`."""
    federation = self.experiment.federation
    if (group is None) == (client is None):
      raise ValueError('Name either a group or a client, as model(client=0).')
    if client is not None:
      integer_between(0, federation.num_clients - 1, client=client)
      group_of, row_of = federation.places()
      return federation.groups[group_of[client]], int(row_of[client])
    found = {one.name: one for one in federation.groups}
    check_name('group', group, found)
    if self.experiment.algorithm.personal:
      raise ValueError(
          f'The clients of group {group!r} have models of their own; name '
          f'one of the clients {found[group].client_ids.tolist()!r:.80}.'
      )
    return found[group], 0

  def features(
      self, x: Any, group: str | None = None, *, client: int | None = None
  ) -> dict[str, np.ndarray]:
    """The outputs of all blocks of a model, in inference mode.

    Args:
      x: [n, ...] examples as the data set holds them.
      group: As for `model`.
      client: As for `model`.

    Returns:
      {block: [n, d] float32}, averaged over pixels or tokens.

    Raises:
      ValueError: As `model`; if the examples do not fit it, or if it is not
        one network.
    """
    variables = self.model(group, client=client).variables
    chosen, _ = self._place(group, client)
    if not isinstance(variables, Variables):
      raise ValueError(
          f'The models of {self.experiment.config.algorithm.name} are not one '
          'network each, so they have no features by block.'
      )
    preprocess, x = self.experiment.preprocess, jnp.asarray(x)
    check_inputs(chosen, preprocess, x)
    return block_features(chosen.model, variables, preprocess(x))

  def models(self) -> dict[str | int, Model]:
    """All trained models: of each client, or of groups that share theirs.

    Returns:
      {client id or group name: model}.
    """
    experiment = self.experiment
    groups = experiment.federation.groups
    if not experiment.algorithm.personal:
      return {group.name: self.model(group.name) for group in groups}
    ids = range(experiment.federation.num_clients)
    return {client: self.model(client=client) for client in ids}


def _apply(experiment: Experiment, group: Group):
  """Builds `Model.apply` of a group."""
  preprocess = experiment.preprocess
  predict = jax.jit(
      lambda variables, x: experiment.algorithm.predict(
          group, variables, preprocess(x)
      )
  )

  def apply(variables, x):
    x = jnp.asarray(x)
    check_inputs(group, preprocess, x)
    return predict(variables, x)

  return apply
