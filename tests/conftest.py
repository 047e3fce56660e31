"""Strict settings for every test, and the fixtures that tests share."""

import gc
import os
import pathlib
import time

import jax
import pytest

# The nets of tests are tiny: compiling them takes longer than running them, and
# half as long with XLA's older emitter of fused loops. An unknown flag ends a
# process, so the flags are set only for JAX versions that are known to have
# them, and only if no other flags are set. Two processes run the tests, so each
# compiles in one thread. The tests of a file run in one process
# (`--dist loadfile`) and share what they compile.
# Programs that tests start inherit these settings from the environment.
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
# Tracing creates many objects and little garbage, and no test reads the source
# locations in compiled programs. Both settings together save a fifth of the
# time.
gc.set_threshold(200_000, 50, 100)
os.environ['JAX_TRACEBACK_IN_LOCATIONS_LIMIT'] = '0'
jax.config.update('jax_traceback_in_locations_limit', 0)
# Compiled programs are kept between test runs; delete the folder to start anew.
# Programs that compile in less than 0.1 s, such as single operations, are not
# stored: writing most of them takes longer than compiling.
_CACHE = pathlib.Path(
    os.environ.get('XDG_CACHE_HOME', pathlib.Path.home() / '.cache')
)
jax.config.update(
    'jax_compilation_cache_dir', str(_CACHE / 'fedjax_het' / 'xla_tests')
)
jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.1)
# Tests ignore the user's measured speeds, and so choose the same form on every
# machine.
os.environ['FEDJAX_HET_TUNED'] = str(_CACHE / 'fedjax_het' / 'not_tuned')
# Growth of a test process, in bytes, after which its compiled programs are
# dropped.
_MOST_BYTES = 3 << 30
# When no further test begins, in seconds since 1970; `.ci/run` sets it for slow
# tests, so that it ends in time on a slow machine.
_END = float(os.environ.get('FEDJAX_HET_TESTS_END', 'inf'))


# JAX's default random number generator makes up half of the operations of a
# round of tiny nets. Tests compare results of the same numbers, so a generator
# with less to compile serves as well, also in the programs that tests start.
# JAX_DEFAULT_PRNG_IMPL overrides this choice. Not all versions of JAX have this
# generator.
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
  """Reverses the files of slow tests, so that whole programs run first.

  If they may not all begin before `_END`, another file is the first each day.
  """
  if config.option.markexpr == 'slow':
    files = list(dict.fromkeys(item.path for item in reversed(items)))
    if _END < float('inf'):
      # Seven files further each day; all test processes read the same day.
      first = 7 * int(_END // 86_400) % max(1, len(files))
      files = files[first:] + files[:first]
    place = {path: number for number, path in enumerate(files)}
    items.sort(key=lambda item: place[item.path])


def pytest_runtest_setup(item):
  """Skips what would begin after `_END`."""
  del item
  if time.time() > _END:
    pytest.skip('the time of the tests is over, see FEDJAX_HET_TESTS_END')


def _resident_bytes() -> int:
  """Resident memory of this process in bytes; 0 if it is unknown."""
  status = pathlib.Path('/proc/self/statm')
  if not status.is_file():
    return 0
  return int(status.read_text().split()[1]) * os.sysconf('SC_PAGE_SIZE')


_after_forgetting = [0]


@pytest.fixture(autouse=True)
def bounded_memory():
  """Clears JAX's caches whenever the process has grown by `_MOST_BYTES`."""
  yield
  if _resident_bytes() > _after_forgetting[0] + _MOST_BYTES:
    jax.clear_caches()
    gc.collect()
    _after_forgetting[0] = _resident_bytes()


@pytest.fixture
def optimised():
  """Compiles with all optimisations, for tests of the optimised program."""
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
  """Disables the cache, which cannot store programs that call oneDNN."""
  from fedjax_het.kernels.onednn import no_compilation_cache

  with no_compilation_cache():
    yield


@pytest.fixture(scope='module')
def undrawn():
  """Omits the pictures of reports."""
  from tests.experiment.tiny_runs import without_pictures

  with without_pictures():
    yield


@pytest.fixture(scope='session')
def real_data() -> pathlib.Path:
  """Folder with real raw data sets; skips the test if there is none."""
  folder = os.environ.get('FEDJAX_HET_DATA')
  if not folder:
    pytest.skip('real data: set FEDJAX_HET_DATA to a folder that holds it')
  path = pathlib.Path(folder)
  if not path.is_dir():
    pytest.skip(f'real data: FEDJAX_HET_DATA={folder} is not a folder')
  return path
