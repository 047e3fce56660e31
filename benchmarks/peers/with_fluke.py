"""fluke: a program of `rows.programs`, run in fluke-fl's environment."""

from fluke import DDict, FlukeENV
from fluke.algorithms.fedavg import FedAVG
from fluke.data import DataSplitter, DummyDataContainer, FastDataLoader
from fluke.server import EarlyStopping
from fluke.utils import FederationObserver

from benchmarks.peers import meter, torch_nets


class Timed(FederationObserver):
  """Records the end of every round."""

  def __init__(self, clock: meter.Meter):
    self._clock, self._before = clock, 0

  def end_round(self, round: int) -> None:
    images = torch_nets.Inputs.images - self._before
    self._before = torch_nets.Inputs.images
    if self._clock.round(images):
      raise EarlyStopping(round)


def main() -> None:
  task = meter.this_task()
  local = task.local
  FlukeENV().set_eval_cfg(server=False)
  loaders = [
      FastDataLoader(
          *part,
          num_labels=10,
          batch_size=local['batch_size'],
          shuffle=True,
          skip_singleton=False,
      )
      for part in torch_nets.clients(task.path)
  ]
  none = [None] * len(loaders)
  (net,) = torch_nets.nets(task)
  sgd = dict(
      name='SGD',
      lr=local['learning_rate'],
      momentum=local['momentum'],
      weight_decay=local['weight_decay'],
  )
  algorithm = FedAVG(
      task.clients,
      DataSplitter(DummyDataContainer(loaders, none, None, num_classes=10)),
      DDict(
          model=net,
          client=DDict(
              batch_size=local['batch_size'],
              local_epochs=local['epochs'],
              loss='CrossEntropyLoss',
              optimizer=DDict(sgd),
              scheduler=DDict(name='StepLR', step_size=1, gamma=1),
          ),
          server=DDict(weighted=False),
      ),
  )
  algorithm.set_callbacks([Timed(meter.Meter(task, torch_nets.count(net)))])
  share = (task.cohort + 0.5) / task.clients  # fluke rounds down.
  algorithm.run(task.max_rounds, min(share, 1))


if __name__ == '__main__':
  main()
