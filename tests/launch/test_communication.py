"""The communication command: FedHe's Tables III and IV, number by number."""

import pathlib
import subprocess
import sys

import jax
import pytest

from launch import communication
from tests.fuzz import forks

ROOT = pathlib.Path(communication.__file__).resolve().parents[1]


@pytest.fixture(scope='module')
def tables():
  """{title: {method: row}} for ten public examples."""
  with jax.default_prng_impl('threefry2x32'):  # The users' seed, sent too.
    return {
        title: {row.method: row for row in communication.rows(*rest, 10)}
        for title, *rest in communication.TABLES
    }


@pytest.mark.parametrize(
    ('title', 'twenty', 'ten'),
    [
        ('Table III, MNIST', 324_672, 307_392),
        ('Table IV, CIFAR-10', 326_976, 309_696),
    ],
)
def test_fedavg_sends_model_9_and_a_weight(tables, title, twenty, ten):
  paper = tables[title]['FedAvg, 20 outputs']
  assert (paper.down, paper.up) == (twenty, twenty + 1)
  assert paper.paper == f'{twenty:,}'
  honest = tables[title]['FedAvg, 10 outputs']
  assert (honest.down, honest.up) == (ten, ten + 1)


def test_class_means_are_the_same_on_both_data_sets(tables):
  for table in tables.values():
    assert (table['FedHe'].down, table['FedHe'].up) == (110, 110)
    assert (table['FD'].down, table['FD'].up) == (100, 100)


@pytest.mark.parametrize(
    ('title', 'each'),
    [('Table III, MNIST', 794), ('Table IV, CIFAR-10', 3082)],
)
def test_fedmd_grows_with_the_public_set(tables, title, each):
  logits = tables[title]['FedMD, logits']
  images = tables[title]['FedMD, logits and images']
  # The subset's number besides; down also the seed that it is drawn from.
  assert (logits.down, logits.up) == (103, 101)
  assert images.up == 10 * each + 1
  assert images.paper == f'n x {each} = {10 * each:,}'


@pytest.mark.parametrize('title', [table[0] for table in communication.TABLES])
def test_reduced_rates_are_the_papers(tables, title):
  """97.6% and 90.6% for ten public examples, above 99.9% for FedHe."""
  table = tables[title]
  base = table['FedAvg, 20 outputs'].up
  fedmd = table['FedMD, logits and images']
  assert f'{100 * (1 - fedmd.up / base):.1f}%' == fedmd.paper_rate
  assert 1 - table['FedHe'].up / base > 0.999
  text = communication.render(title, list(table.values()), 10)
  rates = {line.split('|')[1].strip(): line.split('|')[5:7]
           for line in text.splitlines()[2:]}  # fmt: skip
  assert rates['FedHe'] == [' 99.97% ', ' 99.96% ']
  assert rates['FedAvg, 20 outputs'] == [' 0.00% ', ' - ']


def test_the_command_prints_both_tables():
  done = subprocess.run(
      [sys.executable, '-m', 'launch.communication', '--num_public=5000'],
      cwd=ROOT,
      capture_output=True,
      text=True,
      timeout=120,
  )
  assert done.returncode == 0, done.stderr
  assert 'Table III, MNIST: ' in done.stdout
  assert 'Table IV, CIFAR-10: ' in done.stdout
  assert '| FedMD, logits and images | 50,003 | 3,970,001 |' in done.stdout


def test_mistakes_take_one_line():
  done = forks.run('communication', ['--num_public=0'], ROOT)
  assert done.code == 2
  assert done.err == (
      'Error: num_public must be at least 1 and at most 1000000, got 0.\n'
  )
