"""Panels, looks and costs of a results table's pictures."""

import ml_collections
import numpy as np

from fedjax_het.algorithms import ALGORITHMS
from fedjax_het.reporting import table_costs, table_pictures
from fedjax_het.reporting.looks import method_looks
from fedjax_het.reporting.results_table import Table

ENDINGS = 'png', 'svg'


def config(method, split='iid', **groups):
  return ml_collections.ConfigDict(
      dict(
          algorithm=dict(name=method),
          dataset='digits',
          partition=dict(name=split, seed=0),
          groups=groups or dict(mlp2=2, mlp3=1),
      )
  )


def cell(row, last, **more):
  settings = dict(groups=dict(mlp2=2, mlp3=dict(clients=3, model='mlp')))
  return dict(
      row=row, last=last, bytes_up=15, bytes_down=20, config=settings, **more
  )


def table(**rows):
  return Table('T', 'S', rows, {}, (0,))


def test_a_method_has_one_colour_and_marker_in_every_picture():
  alone = method_looks({'A': 'fedin'})['A']
  looks = method_looks({'FedAvg': 'fedavg', 'X': 'fedin', 'Y': 'fedin'})
  assert alone == looks['X'] != looks['Y']
  assert alone[:2] == looks['Y'][:2] != looks['FedAvg'][:2]
  every = method_looks({name: name for name in ALGORITHMS})
  assert every['fedin'] == alone
  assert len({look[:2] for look in every.values()}) == len(ALGORITHMS)
  # If all rows have one method, they differ in colour.
  rates = method_looks({'lr 1': 'fedin', 'lr 2': 'fedin'})
  assert rates['lr 1'].colour != rates['lr 2'].colour
  # In different panels, rows of one method look alike.
  panels = method_looks(
      {'A': 'fedin', 'A (b)': 'fedin', 'C': 'fedavg'}, {'A': 'a', 'A (b)': 'b'}
  )
  assert panels['A'] == panels['A (b)']
  assert method_looks({'Old': 'removed', 'New': 'fedavg'})['Old']


def test_rows_of_other_data_splits_or_models_have_panels_of_their_own():
  found = table(
      A=config('fedin'),
      B=config('fedin', 'classes'),
      C=config('fedin', m1=dict(model='mlp', clients=3)),
      D=config('private'),
  )
  cells = [cell(row, 0.5) for row in 'ABCD']
  splits = {'': table_pictures._splits(found, '')}
  panels = table_pictures._panels(
      found, cells, splits, lambda *args: dict.fromkeys('ABCD', 1)
  )
  assert {title: ''.join(series) for title, series in panels.items()} == {
      'iid, different models': 'AD',
      'classes, different models': 'B',
      'iid, one model': 'C',
  }
  plain = table(A=config('fedin'), D=config('private'))
  assert table_pictures._splits(plain, '') == {'A': '', 'D': ''}


def test_rows_that_the_first_column_lacks_look_different():
  one = config('fedavg')
  rows = dict(A=dict(a=one, b=one), B=dict(b=one), C=dict(a=config('fedin')))
  found = Table('T', 'S', rows, {}, (0,), columns=('a', 'b'))
  splits = {c: table_pictures._splits(found, c) for c in found.columns}
  panels = table_pictures._first_panels(splits)
  assert panels == dict(A='', B='', C='')
  looks = method_looks(dict(A='fedavg', B='fedavg', C='fedin'), panels)
  assert looks['A'] != looks['B']


def test_costs_are_bytes_of_a_client_both_ways_and_memory_by_group():
  found = table(A=config('fedin'), B=config('private'), C=config('fedavg'))
  memory = dict(mlp2=10, mlp3=30)
  cells = [
      cell('A', 0.5, client_memory=memory),
      cell('A', 0.7, client_memory=memory),
      cell('B', 0.4, client_memory=memory),
      cell('C', None),
  ]
  assert table_pictures.bytes_of(found, cells, '') == {
      'A': ([7, 7], [0.5, 0.7]), 'B': ([7], [0.4]),  # 15 + 20 by 5 clients.
  }  # fmt: skip
  assert table_pictures.memory_of(found, cells, '')['A'][0] == [[10, 30]] * 2
  assert table_pictures.memory_of(found, cells[:2], '') == {}  # One row.
  assert table_pictures.flops_of(found, cells, '') == {}  # Older cells.


def test_costs_are_of_a_client():
  found = table(A=config('fedin'), B=config('private'))
  costs = dict(
      client_memory=dict(mlp2=1.5e6, mlp3=3e6),
      client_flops=dict(mlp2=2e9, mlp3=2e9),
  )
  settings = dict(groups=dict(mlp2=2, mlp3=dict(clients=1, model='mlp')))
  cells = [
      dict(row='A', last=0.5, bytes_up=3e6, bytes_down=6e6, config=settings,
           **costs),
      cell('B', 0.4),
  ]  # fmt: skip
  text = table_costs.render(found, cells, '')
  assert '| A | 50.0 | 1.00 | 2.00 | 1.50 to 3.00 | 2.00 |' in text
  assert '| B |' not in text
  assert table_costs.render(found, cells[1:], '') == ''
  # An older cell without costs counts for the accuracy and the bytes.
  old = dict(row='A', last=0.7, bytes_up=9e6, bytes_down=6e6, config=settings)
  text = table_costs.render(found, [*cells, old], '')
  assert '| A | 60.0 ± 14.1 | 2.00 | 2.00 | 1.50 to 3.00 | 2.00 |' in text
  assert 'Of 1 of 2 runs memory or operations are not known;' in text
  # Each cost is shown where it is known.
  held = dict(cells[0], client_memory=costs['client_memory'])
  del held['client_flops'], held['bytes_up']
  text = table_costs.render(found, [held], '')
  assert '| A | 50.0 | - | 2.00 | 1.50 to 3.00 | - |' in text
  # The picture shows the sum of the two columns.
  sent, _ = table_pictures.bytes_of(found, [*cells, old], '')['A']
  assert sum(sent) / 2 == 4e6


def test_a_cell_without_a_cost_counts_for_the_accuracy():
  found = table(A=config('fedin'), B=config('private'))
  flops = dict(client_flops=dict(a=1.0, b=2.0))
  cells = [cell('A', 0.1), cell('A', 0.3, **flops), cell('B', 0.5, **flops)]
  costs, accuracies = table_pictures.flops_of(found, cells, '')['A']
  assert costs == [[1.0, 2.0]] and accuracies == [0.1, 0.3]


def test_a_picture_that_lacks_its_numbers_says_so(tmp_path):
  found = table(A=config('fedin'), B=config('private'))
  curve = dict(rounds=[1], accuracy=[0.5], column='', seed=0)
  cells = [cell(row, 0.5, **curve) for row in 'AB']
  text = table_pictures.draw(found, cells, tmp_path, ('csv', 'svg'))
  files = {f'{name}.{end}' for name in ('curves', 'bytes') for end in ENDINGS}
  assert {path.name for path in tmp_path.iterdir()} == files
  for path in tmp_path.glob('*.svg'):
    assert path.read_text().startswith('<?xml') and path.name not in text
  line = 'No picture of memory: 2 of 2 stored cells lack client_memory.'
  assert line in text and 'bytes.png' in text
  assert 'No picture of flops: 2 of 2 stored cells lack client_flops.' in text
  # With some, it says how many it lacks.
  known = dict(client_memory=dict(a=1.0))
  cells += [cell(row, 0.5, **curve, **known) for row in 'AB']
  text = table_pictures.draw(found, cells, tmp_path)
  shown = '(memory.png)\n\n2 of 4 stored cells lack client_memory.'
  assert shown in text
  # A single row is not compared.
  text = table_pictures.draw(table(A=config('fedin')), cells[:1], tmp_path)
  assert 'No picture' not in text


def test_virtual_times_are_means_over_seeds_of_runs_that_have_a_clock():
  found = table(A=config('fedin'), B=config('private'))
  cells = [
      cell('A', 0.5, rounds=[0, 2], accuracy=[0.1, 0.5],
           virtual_times=[0.0, 2.0]),
      cell('A', 0.7, rounds=[0, 2], accuracy=[0.3, 0.7],
           virtual_times=[0.0, 4.0]),
      cell('B', 0.4, rounds=[0, 2], accuracy=[0.2, 0.4]),
  ]  # fmt: skip
  curves = table_pictures.times_of(found, cells, '')
  assert [*curves] == ['A'] and curves['A'][0] == [0.0, 3.0]
  assert curves['A'][1].tolist() == [[0.1, 0.5], [0.3, 0.7]]


def test_curves_end_with_the_seed_that_stopped_first():
  found = table(A=config('fedin'))
  cells = [
      cell('A', 0.5, rounds=[0, 2, 4], accuracy=[0.1, 0.4, 0.5],
           virtual_times=[0.0, 2.0, 5.0]),
      cell('A', 0.7, rounds=[0, 2], accuracy=[0.3, 0.7],
           virtual_times=[0.0, 4.0]),
  ]  # fmt: skip
  rounds, values = table_pictures.curves_of(found, cells, '')['A']
  assert rounds == [0, 2] and values.tolist() == [[0.1, 0.4], [0.3, 0.7]]
  times, values = table_pictures.times_of(found, cells, '')['A']
  assert times == [0.0, 3.0] and values.tolist() == [[0.1, 0.4], [0.3, 0.7]]


def test_accuracy_over_the_axis_of_a_sweep():
  configs = {'a': config('fedin'), 'b': config('fedin'), 'c': config('fedin')}
  axis = ('Batch size', dict(c=32, a=8, b=16))  # In any order.
  found = Table(
      'T', 'S', dict(A=configs, B=configs), {}, (0, 1), columns=tuple(configs),
      axis=axis,
  )  # fmt: skip
  cells = [
      cell('A', 0.1, column='a', seed=0, best=0.9),
      cell('A', 0.2, column='a', seed=1, best=0.9),
      cell('A', 0.3, column='c', seed=1), cell('B', 0.4, column='b', seed=0),
  ]  # fmt: skip
  sweep = table_pictures.sweep_of(found, cells)
  assert sweep['A'][0] == [8, 32] and sweep['B'][0] == [16]
  # The seed of both columns.
  assert sweep['A'][1].tolist() == [[0.2, 0.3]]
  # Without one, the columns' means.
  others = [*cells[:2], cell('A', 0.3, column='c', seed=2)]
  means = table_pictures.sweep_of(found, others)['A'][1]
  np.testing.assert_allclose(means, [[0.15, 0.3]])
  # The title says which row, where others have no result.
  assert [*table_pictures.sweep_panel(found, cells)] == ['']
  assert [*table_pictures.sweep_panel(found, cells[:3])] == ['A']
