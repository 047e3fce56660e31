"""The command `fedjax-het`: one name for all programs.

  fedjax-het train --config=configs/fedin.py:quick
  fedjax-het train --help
"""

import importlib
import sys

COMMANDS = {
    'train': 'Run one experiment, or resume it.',
    'sweep': "Run the cells of a results table, or of a user's grid.",
    'report': 'Renew a report, compare runs, or render a results table.',
    'tune': "Measure this machine's speeds, which `auto` follows.",
    'evaluate': "Test a run's models again, also on clients' own examples.",
    'export': 'Write the trained models of a run to files.',
    'prepare-data': 'Prepare a data set once, in the format of tfds.',
    'plan-memory': 'Print training memory, and schedules for a budget.',
    'communication': 'Print the numbers that methods exchange.',
    'similarity': "Compare the layers of clients' models.",
    'privacy': "Print the privacy loss of noise on FedIN's features.",
    'tsne': 'Draw the features of stored runs by class and by client.',
    'attack': 'Reconstruct images from the features that FedIN uploads.',
}


def usage() -> str:
  """The help text: one line per command."""
  width = max(map(len, COMMANDS))
  lines = [f'  {name:<{width}}  {what}' for name, what in COMMANDS.items()]
  return '\n'.join([
      'Usage: fedjax-het COMMAND [--flag=value ...]', '', *lines, '',
      'fedjax-het COMMAND --help explains a command.',
  ])  # fmt: skip


def main() -> None:
  """Runs the command that the arguments name; exit code 2 for none."""
  name, *rest = sys.argv[1:] or ['']
  if name in ('-h', '--help', 'help'):
    print(usage())
    return
  if name == '--version':
    from fedjax_het import __version__

    print(__version__)
    return
  name = name.replace('_', '-')
  if name not in COMMANDS:
    from fedjax_het.names import suggest

    if name:
      print(
          f'Error: Unknown command {name!r}{suggest(name, COMMANDS)}',
          file=sys.stderr,
      )
    else:
      print(f'Error: No command.\n\n{usage()}', file=sys.stderr)
    sys.exit(2)
  try:
    program = importlib.import_module(
        f'.{name.replace("-", "_")}', __package__
    )
    sys.argv = [f'fedjax-het {name}', *rest]
    program.run()
  except KeyboardInterrupt:  # During imports; `run` answers later ones.
    print('Interrupted.', file=sys.stderr)
    sys.exit(130)


if __name__ == '__main__':
  main()
