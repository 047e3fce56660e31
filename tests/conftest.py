"""Strict settings for every test, and the fixtures that tests share."""

import gc
import os
import pathlib

import jax
import pytest

# The nets of tests are tiny: compiling them takes longer than running them,
# and half as long with the older code for fused loops. An unknown flag ends a
# process, so it is set for the versions that are known to have it, and where
# no other flags are set. Two processes run tests, so one thread each is to
# compile. The tests of a file run in one of them (`--dist loadfile`), and share
# what they compile.
# Programs that tests start take these settings from the environment.
if jax.__version_info__[:2] == (0, 10):
  os.environ.setdefault(
      'XLA_FLAGS',
      '--xla_cpu_use_fusion_emitters=false '
      '--xla_cpu_parallel_codegen_split_count=1',
  )
os.environ['JAX_DISABLE_MOST_OPTIMIZATIONS'] = '1'
jax.config.update('jax_disable_most_optimizations', True)
jax.config.update('jax_numpy_rank_promotion', 'raise')
jax.config.update('jax_num_cpu_devices', 4)
# Tracing makes many objects and little garbage, and no test reads the lines
# that programs note of where they come from: together a fifth of the time.
gc.set_threshold(200_000, 50, 100)
os.environ['JAX_TRACEBACK_IN_LOCATIONS_LIMIT'] = '0'
jax.config.update('jax_traceback_in_locations_limit', 0)
# Compiled programs are kept between test runs; delete the folder to start anew.
# Operations that run by themselves are not: most take longer to write.
_CACHE = pathlib.Path(
    os.environ.get('XDG_CACHE_HOME', pathlib.Path.home() / '.cache')
)
jax.config.update(
    'jax_compilation_cache_dir', str(_CACHE / 'fedjax_het' / 'xla_tests')
)
jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.1)
# Tests choose what users without measured speeds have, also where there are
# some.
os.environ['FEDJAX_HET_TUNED'] = str(_CACHE / 'fedjax_het' / 'not_tuned')
# Of programs in a process that runs tests.
_MOST_BYTES = 3 << 30


# Half of the operations of a round of tiny nets are those of JAX's default
# generator of random numbers. Tests compare what is made of the same numbers,
# so that one with less to compile serves as well, also in the programs that
# tests start. All have the one that the environment names. Not all versions of
# JAX have this one.
if jax.__version_info__ >= (0, 10, 2):
  os.environ.setdefault('JAX_DEFAULT_PRNG_IMPL', 'philox2x32')
  jax.config.update(
      'jax_default_prng_impl', os.environ['JAX_DEFAULT_PRNG_IMPL']
  )


def pytest_configure(config):
  """Files are not sorted by their number of tests: a few may take minutes."""
  if config.option.markexpr == 'slow':
    config.option.loadscopereorder = False


def pytest_collection_modifyitems(config, items):
  """Slow tests from the last file: those of whole programs come first."""
  if config.option.markexpr == 'slow':
    files = list(dict.fromkeys(item.path for item in items))
    place = {path: -number for number, path in enumerate(files)}
    items.sort(key=lambda item: place[item.path])


def _resident_bytes() -> int:
  """Memory of this process; 0 where the system does not say."""
  status = pathlib.Path('/proc/self/statm')
  if not status.is_file():
    return 0
  return int(status.read_text().split()[1]) * os.sysconf('SC_PAGE_SIZE')


_after_forgetting = [0]


@pytest.fixture(autouse=True)
def bounded_memory():
  """Forgets compiled programs whenever they have taken gigabytes."""
  yield
  if _resident_bytes() > _after_forgetting[0] + _MOST_BYTES:
    jax.clear_caches()
    gc.collect()
    _after_forgetting[0] = _resident_bytes()


@pytest.fixture
def optimised():
  """Compiles as users do, for tests of what XLA makes of a program."""
  jax.config.update('jax_disable_most_optimizations', False)
  yield
  jax.config.update('jax_disable_most_optimizations', True)


@pytest.fixture
def users_generator():
  """JAX's default generator; XLA compiles no other for several devices."""
  with jax.default_prng_impl('threefry2x32'):
    yield


@pytest.fixture
def not_stored():
  """For programs with oneDNN's calls, which the cache cannot store."""
  from fedjax_het.kernels.onednn import no_compilation_cache

  with no_compilation_cache():
    yield


@pytest.fixture(scope='module')
def undrawn():
  """Reports of runs without pictures."""
  from tests.experiment.tiny_runs import without_pictures

  with without_pictures():
    yield


@pytest.fixture(scope='session')
def real_data() -> pathlib.Path:
  """Folder with real raw data sets; skips where there is none."""
  folder = os.environ.get('FEDJAX_HET_DATA')
  if not folder:
    pytest.skip('real data: set FEDJAX_HET_DATA to a folder that holds it')
  path = pathlib.Path(folder)
  if not path.is_dir():
    pytest.skip(f'real data: FEDJAX_HET_DATA={folder} is not a folder')
  return path
