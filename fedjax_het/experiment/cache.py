"""The persistent cache of compiled programs."""

import os
import pathlib

import jax


def enable_compilation_cache() -> pathlib.Path | None:
  """Keeps XLA's programs on disk, so that the next start compiles nothing.

  A folder that the user has already chosen (`JAX_COMPILATION_CACHE_DIR`, or
  jax's config) stays. Else it is `fedjax_het/xla` in `$XDG_CACHE_HOME`, by
  default `~/.cache`.

  Returns:
    The folder, or None if it cannot be written; then nothing is cached.
  """
  if jax.config.jax_compilation_cache_dir:
    return pathlib.Path(jax.config.jax_compilation_cache_dir)
  try:
    parent = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
    folder = pathlib.Path(parent) / 'fedjax_het' / 'xla'
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / f'.probe-{os.getpid()}'
    probe.touch()
    probe.unlink()
  except (OSError, RuntimeError):  # RuntimeError: there is no home folder.
    return None
  jax.config.update('jax_compilation_cache_dir', str(folder))
  # Many small programs add up: keep them all.
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
  return folder
