"""The picture of the parts of training memory."""

import math

from fedjax_het.analysis import pictures
from launch import plan_memory


def test_shares_add_up_to_table_1_and_are_drawn(tmp_path):
  net = plan_memory._preresnet(1)
  shares = plan_memory.shares_of_memory(
      net, plan_memory._papers_training(), measure=False
  )
  assert [*shares] == ['whole', *map(str, range(1, 10))]
  totals = [round(math.fsum(of['paper']), 2) for of in shares.values()]
  assert totals[0] == 116.04
  assert tuple(totals[1:]) == plan_memory._DEPTH
  assert shares['1']['paper'][0] == 4 * 4672 / 2**20
  parts = dict(paper=('parameters', 'activations'))
  path = pictures.draw_stacks(
      {'net': shares}, tmp_path / 'a.png', parts, xlabel='x', ylabel='y'
  )
  assert path.stat().st_size > 5000
