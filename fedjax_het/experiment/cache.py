"""The persistent cache of compiled programs."""

import os
import pathlib

import jax


def user_folder(name: str) -> pathlib.Path:
  """The folder `fedjax_het/name` in `$XDG_CACHE_HOME`, by default `~/.cache`.

  Args:
    name: Its name.

  Returns:
    Its path; nothing is created.

  Raises:
    RuntimeError: If there is no home folder.
  """
  parent = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
  return pathlib.Path(parent) / 'fedjax_het' / name


def enable_compilation_cache() -> pathlib.Path | None:
  """Stores compiled programs on disk, so that the next run can reuse them.

  A folder that the user has chosen (`JAX_COMPILATION_CACHE_DIR`, or jax's
  config) is kept; the default is `user_folder('xla')`.

  Returns:
    The folder, or None if it cannot be written; then nothing is cached.
  """
  if jax.config.jax_compilation_cache_dir:
    return pathlib.Path(jax.config.jax_compilation_cache_dir)
  try:
    folder = user_folder('xla')
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / f'.probe-{os.getpid()}'
    probe.touch()
    probe.unlink()
  except (OSError, RuntimeError):  # RuntimeError: there is no home folder.
    return None
  jax.config.update('jax_compilation_cache_dir', str(folder))
  # Many small programs take long together, so store them all.
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
  return folder
