"""How a run computes on a CPU: its convolutions, and over how many devices.

`auto` takes the form that is predicted to end first, by the speeds of
`experiment.tuned`. A run that goes on keeps the form with which it began,
since forms differ in rounding.
"""

import contextlib
import dataclasses
import json
import logging
import pathlib
from typing import Any

import jax
import ml_collections

from fedjax_het.engine.driver_kinds import driver_kind
from fedjax_het.engine.types import Federation
from fedjax_het.experiment import tuned
from fedjax_het.experiment.config import cohort_size
from fedjax_het.experiment.predict import PLAIN, Form, fastest, predict
from fedjax_het.files import read_json, write_atomically
from fedjax_het.kernels import libraries
from fedjax_het.kernels.libraries import AUTO

_log = logging.getLogger(__name__)
_FILE = 'form.json'
# Predicted seconds of a run before which this machine is measured.
LONG = 600.0


class Chooser:
  """What a run chooses; `build` calls it.

  Before the first long run on a machine the speeds of that machine are
  measured, in a process of its own.

  Attributes:
    form: The form; None before, and where there is nothing to choose: not on a
      CPU, of several processes, or if the config says both entries.
    line: The form and why it was chosen, in words; '' if there is none.
  """

  def __init__(
      self,
      config,
      folder: pathlib.Path | None,
      stack: contextlib.ExitStack,
      measures: bool = False,
  ):
    """Has JAX start with the devices that a form may use, if it has not.

    Args:
      config: The config, maybe a wrong one.
      folder: The workdir, or None for a new one.
      stack: Where the compilation cache is left out until the run ends, if the
        programs of the form cannot be stored there.
      measures: Whether to measure this machine before a long run.
    """
    self.form: Form | None = None
    self.line = ''
    self._stack = stack
    self._measures = measures
    self._begun: Form | None = None
    self._table: tuned.Table | None = None
    if not _is_open(config):
      begun = folder is not None and _stored(folder)
      if begun and jax.distributed.is_initialized():
        _warn(begun, 'there are several processes')
      return
    table = tuned.read() or tuned.reference()
    devices = (table or PLAIN).devices
    if folder is not None and (folder / 'config.json').exists():
      self._begun = _stored(folder) or PLAIN
      # One on a single device goes on there, but a later run of this process,
      # as in a sweep, may take several.
      if self._begun.devices > 1:
        devices = self._begun.devices
    else:
      self._table = table
    if config.get('backend') == AUTO and devices > 1:
      tuned.start_devices(devices)

  def __call__(self, config, federation: Federation):
    """The config with a form that was measured in place of `auto`."""
    if _is_open(config) and jax.default_backend() == 'cpu':
      self.form = self._settle(config, federation)
    if self.form is None or not self.form.date:
      return config
    made = ml_collections.ConfigDict(config.to_dict())
    with made.ignore_type():
      if self.form.devices > 1:
        made.backend = 'shard_map'
      made.conv_backend = self.form.conv_backend
    self._stack.enter_context(libraries.allowed_cache(made.conv_backend))
    return made

  def _settle(self, config, federation: Federation) -> Form:
    """The form, and its line, which is logged, too."""
    if self._begun is not None:
      form = _goes_on(self._begun)
    else:
      if self._measures:
        self._table = _measured(config, federation, self._table)
      form = _choose(config, federation, self._table)
    if config.conv_backend != AUTO:
      form = form._replace(conv_backend=config.conv_backend)
    self.line = _line(
        form,
        devices=config.backend == AUTO,
        begun=self._begun is not None,
        dense=not _convolves(federation),
    )
    if self.line:
      _log.info('%s', self.line)
    return form

  def store(self, folder: pathlib.Path) -> None:
    """Stores the form of a new run, if measurements chose it.

    Args:
      folder: The workdir.

    Raises:
      OSError: If it cannot be written.
    """
    path = folder / _FILE
    if self.form is None or not self.form.date:
      path.unlink(missing_ok=True)
    else:
      write_atomically(path, json.dumps(self.form._asdict()) + '\n')

  def facts(self) -> dict[str, dict[str, Any]]:
    """The form, for facts.json; nothing where none was chosen."""
    return {} if self.form is None else dict(form=self.form._asdict())


def _is_open(config) -> bool:
  """Whether a config leaves something to choose, in a run of one process."""
  asked = config.get('backend'), config.get('conv_backend')
  if AUTO not in asked or asked[0] not in (AUTO, 'map', 'shard_map'):
    return False
  return not jax.distributed.is_initialized()


def with_conv_backend(federation: Federation, name: str) -> Federation:
  """The federation with all models on one library of convolutions."""

  def change(model):
    return model and dataclasses.replace(model, conv_backend=name)

  groups = tuple(
      dataclasses.replace(
          group, model=change(group.model), partner=change(group.partner)
      )
      for group in federation.groups
  )
  return dataclasses.replace(
      federation, groups=groups, server_model=change(federation.server_model)
  )


def _stored(folder: pathlib.Path) -> Form | None:
  """The form with which the run in a folder began; None for an unmeasured."""
  path = folder / _FILE
  try:
    found = Form(**read_json(path, 'the run goes on with the plain form'))
    if isinstance(found.devices, int):
      return found
  except FileNotFoundError:
    return None
  except (TypeError, ValueError) as e:
    _log.warning('%s: %s', path, e)
  return None


def _goes_on(form: Form) -> Form:
  """A run's form if this process can have it, else the plain one."""
  reason = libraries.why_not(form.conv_backend)
  if form.devices not in (1, len(jax.local_devices())):
    reason = f'there are {len(jax.local_devices())} devices'
  if reason is None:
    return form
  _warn(form, reason)
  return PLAIN


def _warn(form: Form, reason: str) -> None:
  """Says that a run goes on in another form than it was begun."""
  _log.warning(
      'The run was begun with %s, and goes on without (%s): last bits may '
      'differ.', _title(form), reason,
  )  # fmt: skip


def _title(form: Form) -> str:
  return f'{_library(form)} on {_where(form)}'


def _library(form: Form) -> str:
  return f"{libraries.title(form.conv_backend)}'s convolutions"


def _where(form: Form) -> str:
  return f'{form.devices} CPU devices' if form.devices > 1 else 'one device'


def _convolves(federation: Federation) -> bool:
  """Whether a group's model has a kernel of a convolution over images."""
  return any(
      len(leaf.shape) == 4
      for group in federation.groups
      for leaf in jax.tree.leaves(group.model.abstract_variables.params)
  )


def _line(form: Form, *, devices: bool, begun: bool, dense: bool) -> str:
  """What was chosen, and why.

  Args:
    form: The form.
    devices: Whether the number of devices was chosen, too.
    begun: Whether it is the form of a run that goes on.
    dense: Whether no model has convolutions.

  Returns:
    One sentence; '' if nothing was chosen that the models use.
  """
  if dense and not devices:
    return ''
  how = 'Dense layers' if dense else _library(form)
  if devices:
    how += f' on {_where(form)}'
  if begun:
    how += ', as the run was begun.'
  elif form.date and not form.machine:
    how += f': measured on this machine on {form.date}.'
  elif form.date:
    how += (
        f' follow measurements on another machine ({form.machine}); '
        '`fedjax-het tune` measures this one in a minute or two.'
    )
  else:
    how += ': not measured here; `fedjax-het tune` measures in a minute or two.'
  return how[0].upper() + how[1:]


def _seconds(
    config, federation: Federation, table: tuned.Table
) -> dict[Form, float]:
  """`predict` for a config."""
  return predict(
      federation,
      cohort_size(config),
      config.num_rounds,
      table,
      cached=config.compilation_cache,
  )


def _measured(
    config, federation: Federation, table: tuned.Table | None
) -> tuned.Table | None:
  """The speeds of this machine, measured now if a run is long; else `table`."""
  from fedjax_het.experiment import tune  # It imports this module.

  if table is None or not table.machine:
    return table
  seconds = max(_seconds(config, federation, table).values(), default=0.0)
  if seconds < LONG:
    return table
  how = f'This run may take {seconds / 60:,.0f} minutes or more'
  if load := tune.busy():
    _log.info(
        '%s. This machine was never measured, and is not now, as other '
        'processes run (load %.1f).', how, load,
    )  # fmt: skip
    return table
  _log.info(
      '%s: measuring this machine first, once, for a minute or two ...', how
  )
  return tune.measure_apart() or table


def _choose(
    config, federation: Federation, table: tuned.Table | None
) -> Form:
  """The form of a new run."""
  if table is None:
    return PLAIN
  fixed = None if config.conv_backend == AUTO else config.conv_backend
  seconds = _seconds(config, federation, table)
  return fastest(seconds, _devices(config, table), fixed)


def _devices(config, table: tuned.Table) -> set[int]:
  """The numbers of devices over which a run's clients may be divided."""
  several = table.devices == len(jax.local_devices())
  if config.backend == 'shard_map' and several:
    return {table.devices}
  kind = driver_kind(config.clock.mode, config.client_store)
  if (
      config.backend == AUTO
      and several
      and config.chunk is None
      and kind.over_devices
  ):
    return {1, table.devices}
  return {1}
