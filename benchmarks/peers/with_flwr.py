"""Flower's simulation: a program of `rows.programs`, run in flwr's environment.

The client app is the eager local training of `torch_local`, as in Flower's
PyTorch quickstart; all else is Flower's, with its defaults.
"""

from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from benchmarks import torch_local
from benchmarks.peers import meter, torch_nets


def client_app(path: str) -> ClientApp:
  """The app of all clients; a worker process reads the task and data once."""
  app = ClientApp()

  @app.train()
  def train(msg, context):
    task = meter.read(path)
    (net,) = torch_nets.nets(task)
    net.load_state_dict(msg.content['arrays'].to_torch_state_dict())
    number = context.node_config['partition-id']
    images, labels = torch_nets.clients(path)[number]
    before = torch_nets.Inputs.images
    torch_local.train(
        torch_local.CrossEntropy(net),
        list(net.parameters()),
        torch_nets.optimizer(task, net.parameters()),
        images,
        labels,
        task.local['batch_size'],
        task.local['epochs'],
    )
    trained = torch_nets.Inputs.images - before
    metrics = {'num-examples': len(labels), 'trained': trained}
    content = RecordDict({
        'arrays': ArrayRecord(net.state_dict()),
        'metrics': MetricRecord(metrics),
    })
    return Message(content=content, reply_to=msg)

  return app


class Timed(FedAvg):
  """FedAvg with a clock; it samples no clients once the clock stops it."""

  def __init__(self, clock: meter.Meter, **kwargs):
    super().__init__(**kwargs)
    self._clock, self._enough = clock, False

  def configure_train(self, server_round, arrays, config, grid):
    if self._enough:
      return []
    return super().configure_train(server_round, arrays, config, grid)

  def aggregate_train(self, server_round, replies):
    replies = list(replies)
    for reply in replies:
      if reply.has_error():
        raise RuntimeError(f'A client failed: {reply.error.reason}')
    trained = [reply.content['metrics']['trained'] for reply in replies]
    found = super().aggregate_train(server_round, replies)
    if replies:
      self._enough = self._clock.round(sum(trained))
    return found


def main() -> None:
  task = meter.this_task()
  (net,) = torch_nets.nets(task)
  server_app = ServerApp()

  @server_app.main()
  def serve(grid, context):
    del context
    Timed(
        meter.Meter(task, torch_nets.count(net)),
        # The strategy rounds down the share of the nodes that are connected,
        # so the first round also needs the minimum.
        fraction_train=(task.cohort + 0.5) / task.clients,
        min_train_nodes=task.cohort,
        fraction_evaluate=0.0,
        min_available_nodes=task.clients,
    ).start(
        grid=grid,
        initial_arrays=ArrayRecord(net.state_dict()),
        num_rounds=task.max_rounds,
    )

  run_simulation(
      server_app=server_app,
      client_app=client_app(task.path),
      num_supernodes=task.clients,
      # Uses only local connections.
      backend_config={'init_args': {'_node_ip_address': '127.0.0.1'}},
  )


if __name__ == '__main__':
  main()
