"""Tables of the results of `benchmarks.engine`, with totals."""

from benchmarks import common
from benchmarks.workloads import WORKLOADS


def together(results: dict[str, dict]) -> dict[str, object]:
  """Combines cases with equal numbers of images into one row per form."""
  first, *_ = results.values()
  names = [n for n in first['forms']
           if all(n in r['forms'] for r in results.values())]  # fmt: skip
  forms = {}
  for name in names:
    rows = [r['forms'][name] for r in results.values()]

    def gather(key, reduce, rows=rows):
      values = [row[key] for row in rows]
      return None if None in values else reduce(values)

    seconds = gather('seconds_per_round', sum)
    images = sum(r['images_per_round'] for r in results.values())
    forms[name] = {
        'images_per_second': images / seconds,
        'seconds_per_round': seconds,
        'compile_seconds': gather('compile_seconds', sum),
        'compilations_after_round_2': gather('compilations_after_round_2', sum),
        'peak_megabytes': gather('peak_megabytes', max),
        'share_of_product_peak': sum(
            row['share_of_product_peak'] * row['seconds_per_round']
            for row in rows
        )
        / seconds,
    }
  return {'forms': forms, 'auto': first['auto']}


def table(results: dict[str, dict]) -> str:
  """A Markdown table with a row per case and form."""
  header = [
      'workload', 'form', 'images/s', 's a round', 'compile, s',
      'compilations after round 2', 'peak MB', '% of product peak',
      'auto : form',
  ]  # fmt: skip
  lines = []
  for name, result in results.items():
    best = result['forms'][result['auto']]['images_per_second']
    for form, row in result['forms'].items():
      cells = [
          row['images_per_second'],
          row['seconds_per_round'],
          row['compile_seconds'],
          row['compilations_after_round_2'],
          row['peak_megabytes'],
          100 * row['share_of_product_peak'],
          best / row['images_per_second'],
      ]
      form += ' (auto)' if form == result['auto'] else ''
      lines.append([name, form, *('-' if c is None else c for c in cells)])
  return common.markdown(header, lines)


def with_totals(measured: dict[str, dict]) -> dict[str, dict]:
  """Adds 'workload/all' for workloads whose cases are all present."""
  out = dict(measured)
  for name, workload in WORKLOADS.items():
    cases = [f'{name}/{case}' for case in workload.cases]
    if len(cases) > 1 and all(case in measured for case in cases):
      out[f'{name}/all'] = together({case: measured[case] for case in cases})
  return out


def _chosen(name: str, result: dict) -> str:
  """What a run takes by itself, beside the fastest form of the library."""
  ours = {
      form: row['images_per_second']
      for form, row in result['forms'].items()
      if form.startswith(('map', 'vmap', 'shard_map'))
  }
  best = max(ours, key=ours.__getitem__)
  words = [
      f'{how}: {form}, {ours[form] / ours[best]:.3f} of the fastest ({best})'
      for how, form in result.get('chosen', {}).items()
      if form in ours
  ]
  return f'{name}, as a run chooses: {"; ".join(words)}.' if words else ''


def report(results: dict[str, dict], workloads: set[str]) -> str:
  """The table of some workloads, and the memory of large cohorts."""
  shown = {
      name: result
      for name, result in with_totals(results).items()
      if name.partition('/')[0] in workloads
  }
  lines = [table(shown), *filter(None, map(_chosen, shown, shown.values()))]
  for name, result in shown.items():
    if 'cohort_peak_ratio' in result:
      small, large = result['cohort_megabytes']
      ratio = result['cohort_peak_ratio']
      lines.append(
          f'{name}: the peak memory of a cohort of {large} clients is '
          f'{ratio:.3f} times that of a cohort of {small}.'
      )
  return '\n\n'.join(lines)
