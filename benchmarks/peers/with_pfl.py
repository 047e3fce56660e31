"""pfl-research: a program of `rows.programs`, run in pfl's environment."""

import functools

from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
import torch
from torch.nn import functional

from benchmarks.peers import meter, torch_nets


class Net(torch.nn.Module):
  """A network with the functions that pfl requires."""

  def __init__(self, net):
    super().__init__()
    self.net = net

  def loss(self, x, y):
    self.train()
    return functional.cross_entropy(self.net(x), y)

  @torch.no_grad()
  def metrics(self, x, y):
    self.eval()
    loss = functional.cross_entropy(self.net(x), y, reduction='sum')
    return {'loss': Weighted(loss.item(), len(y))}


class Timed(TrainingProcessCallback):
  """Records the end of every round."""

  def __init__(self, clock: meter.Meter):
    self._clock, self._before = clock, 0

  def after_central_iteration(
      self, aggregate_metrics, model, *, central_iteration
  ):
    del aggregate_metrics, model, central_iteration
    images = torch_nets.Inputs.images - self._before
    self._before = torch_nets.Inputs.images
    return self._clock.round(images), Metrics()


def main() -> None:
  task = meter.this_task()
  local, parts = task.local, torch_nets.clients(task.path)
  (net,) = torch_nets.nets(task)
  model = PyTorchModel(
      Net(net),
      functools.partial(
          torch.optim.SGD,
          momentum=local['momentum'],
          weight_decay=local['weight_decay'],
      ),
      torch.optim.SGD(net.parameters(), lr=1.0),
  )
  data = FederatedDataset(
      lambda k: PyTorchTensorDataset(parts[k], user_id=str(k)),
      get_user_sampler('minimize_reuse', list(range(task.clients))),
  )
  FederatedAveraging().run(
      NNAlgorithmParams(
          central_num_iterations=task.max_rounds,
          # After the first round nothing is evaluated.
          evaluation_frequency=task.max_rounds + 1,
          train_cohort_size=task.cohort,
          val_cohort_size=0,
      ),
      SimulatedBackend(training_data=data, val_data=data),
      model,
      NNTrainHyperParams(
          local_num_epochs=local['epochs'],
          local_learning_rate=local['learning_rate'],
          local_batch_size=local['batch_size'],
      ),
      NNEvalHyperParams(local_batch_size=None),
      callbacks=[Timed(meter.Meter(task, torch_nets.count(net)))],
  )


if __name__ == '__main__':
  main()
