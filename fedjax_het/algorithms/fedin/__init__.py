"""FedIN: federated intermediate-layers learning.

A client's network is an extractor e, intermediate layers in, and a classifier
c. All clients have the same e and c; in differs by architecture. Besides its
parameters a client uploads pairs (s_in, s_out) = (input, output of in). One
round:

  1. The server sends the shared parameters and pairs S of other clients.
  2. For each minibatch the client computes
       G_loc = grad of CE + (mu/2) ||w - w_start||^2        (all layers)
       G_in  = grad of mean (f(s_in; w_in) - s_out)^2       (in only)
     It steps with G_loc on e and c, and on in with the combination
       exact:  Z = G_in if <G_in, G_loc> >= 0, else G_in - (b/a) G_loc
       fixed:  Z = G_in + (lam/2) G_loc
  3. It uploads parameters and pairs. The server averages the parameters and
     stores the pairs.

Without pairs (in the first round) a step is local training alone. With the
fixed rule, minibatch and pairs share one pass through the layers of in. The
defaults are those of the later version of the paper ('v2'). The first version
('v1') has `aggregation='ends'`, `mu=0`, `lam=2`, `capture='training'` and more
pairs.

References:
  Chan, Jiang, Deng, Ngai, `FedIN: Federated Intermediate Layers Learning for
  Model Heterogeneity <https://arxiv.org/abs/2304.00759>`_ (v1, Algorithm 1,
  Eq. 4-16), and the later journal version of the same title (v2, Eq. 3-21).
"""

from typing import NamedTuple

import jax.numpy as jnp
import optax

from fedjax_het.aggregation.exchange import make_exchange
from fedjax_het.aggregation.server import takes_server_options
from fedjax_het.algorithms.fedin.capture import pair_sizes
from fedjax_het.algorithms.fedin.client import pairs_to_upload, train
from fedjax_het.algorithms.fedin.pairs import (
  PairStore,
  after_update,
  check_pair_shapes,
  draw_pairs,
  empty_store,
)
from fedjax_het.algorithms.fedin.passes import (
  PLAIN,
  Features,
  clipped_logits,
)
from fedjax_het.algorithms.fedin.steps import (
  RULES,
  SCOPES,
  Setting,
  takes_one_pass,
)
from fedjax_het.engine.needs import requires
from fedjax_het.engine.types import (
  FederatedAlgorithm,
  Federation,
  Maybe,
  Uplink,
)
from fedjax_het.models.blocks import Variables
from fedjax_het.options import (
  at_least,
  not_negative,
  one_of,
  positive,
)


class Server(NamedTuple):
  """FedIN's server: the shared blocks and the latest pairs per client."""

  model: Variables
  store: PairStore


class Downlink(NamedTuple):
  """The downlink of a client; `pairs` is a `Maybe` of `Pairs`."""

  model: Variables
  pairs: Maybe


@requires()
@takes_server_options()
def fedin(
    federation: Federation,
    *,
    in_training: bool = True,
    mu: float = 0.1,
    rule: str = 'fixed',
    lam: float = 1.0,
    scope: str = 'leaf',
    aggregation: str = 'layerwise',
    weights: str = 'uniform',
    num_pairs: int | None = None,
    max_pair_age: int | None = None,
    capture: str = 'final',
    noise: float = 0.0,
    noise_at: str = 'forward',
    clip: float | None = None,
    sigma: float = 0.0,
    tx: optax.GradientTransformation,
) -> FederatedAlgorithm:
  """FedIN in both published versions, with their ablations.

  Args:
    federation: Groups and local training. Extractors and classifiers must
      agree in shape where they are shared, features always.
    in_training: False leaves the IN loss (and the pairs) out: 'w/o IN'.
    mu: Strength of the proximal term, the factor in the gradient (the paper
      prints mu/2 = 0.05); 0 is 'w/o Prox' and v1.
    rule: 'fixed' or 'exact' combination of the gradients, see
      `project_gradient`; 'sequential' is 'w/o Opt': a full step with G_loc,
      then one on the intermediate layers alone with G_in.
    lam: lambda of the fixed rule: 1 in v2, 2 in v1.
    scope: 'leaf' or 'tree', the scope of the inner products of 'exact'.
    aggregation: 'layerwise' (v2 Eq. 19), 'architecture' (v2 Eq. 20), 'ends'
      (v1: extractor and classifier), 'none' (v1's 'w/o aggregation').
    weights: The averaging coefficients: 'uniform', or 'data' for the number of
      examples (Eq. 21).
    num_pairs: Pairs that a client uploads and receives; at most one batch, or
      whole batches, which local steps take in turn. None for one batch (v2).
    max_pair_age: Server updates after which a client's pairs are no longer
      sent: 1 for pairs of the last round only, None for pairs of any age (the
      papers). A client that receives no pairs trains on its own data alone, as
      all do in the first round. A synchronous round is one server update; in
      an asynchronous run each upload is one.
    capture: 'final' computes the pairs of one draw of examples with the
      trained model (v2); 'training' keeps the last pairs of the training
      forward passes (v1).
    noise: Feature noise in units of the features' standard deviation; v2's
      '+Noise' is 0.8. In a model of texts it also falls on padding, which
      later layers then take for tokens; so does `sigma`.
    noise_at: 'forward' clips and adds noise in the client's own forward passes
      (v2), 'upload' in the uploaded pairs only. With 'forward' clipping is a
      part of the net, in tests as well; noise is for training alone.
    clip: Largest L2 norm of an example's feature, before noise.
    sigma: Standard deviation of noise in absolute units, such as
      `privacy.gaussian_sigma` gives for a `clip`; see there what it guarantees
      and what not.
    tx: The server's optimiser, with the options of `fedavg`.

  Returns:
    The algorithm.

  Raises:
    ValueError: If an option is out of range, or shapes that must agree differ.
  """
  one_of('rule', rule, RULES)
  one_of('scope', scope, SCOPES)
  one_of('capture', capture, ('final', 'training'))
  one_of('noise_at', noise_at, ('forward', 'upload'))
  not_negative(mu=mu, lam=lam, noise=noise, sigma=sigma)
  if clip is not None:
    positive(clip=clip)
  if max_pair_age is not None:
    at_least(1, max_pair_age=max_pair_age)
  local = federation.local
  if num_pairs is None:
    num_pairs = local.batch_size
  sizes = pair_sizes(num_pairs, local.batch_size)
  pair_shapes = check_pair_shapes(federation)
  exchange = make_exchange(federation, aggregation, weights, tx=tx)
  protect = Features(clip, noise, sigma)
  one_pass = takes_one_pass(rule, lam, num_pairs, local.batch_size)
  setting = Setting(
      in_training=in_training,
      mu=mu,
      rule=rule,
      lam=lam,
      scope=scope,
      protect=protect if noise_at == 'forward' else PLAIN,
      one_pass=in_training and one_pass,
      sizes=sizes,
      captured=pair_shapes if capture == 'training' else None,
  )
  at_upload = protect if noise_at == 'upload' else PLAIN

  def init(key):
    store = empty_store(
        federation.num_clients if in_training else 0,
        num_pairs,
        pair_shapes,
        with_age=max_pair_age is not None,
    )
    return Server(exchange.init(key), store)

  def init_client(group, client_id, key):
    del client_id
    return exchange.init_client(group, key)

  def downlink(server, group, visit):
    sent = exchange.download(server.model, group)
    if not in_training:
      return Downlink(sent, Maybe((), jnp.zeros((0,), bool)))
    pairs = draw_pairs(
        server.store, visit.client_id, num_pairs, visit.key,
        max_age=max_pair_age,
    )  # fmt: skip
    return Downlink(sent, pairs)

  def client_update(group, client, sent, data, visit):
    model = group.model
    whole = exchange.assemble(group, client, sent.model)
    start = model.trim(whole) if local.drop_unused_weights else whole
    # 2. Local steps with G_loc, and with Z on `in`.
    trained, metrics, num_steps = train(
        model, local, start, sent.pairs, data, visit, setting
    )
    # 3. Upload the parameters and pairs.
    end = model.fill(trained.variables, whole)
    own, delta = exchange.upload(group, whole, end, data.size, num_steps)
    if not in_training:
      return own, Uplink(delta), metrics
    pairs = pairs_to_upload(model, trained, data, visit, setting, at_upload)
    return own, Uplink(delta, pairs), metrics

  def server_update(server, received, turn):
    del turn
    store = server.store
    if in_training:
      store = after_update(store, received.values())
    return Server(exchange.collect(server.model, received), store), {}

  def client_model(server, client, group):
    sent = exchange.download(server.model, group)
    return exchange.assemble(group, client, sent)

  algorithm = FederatedAlgorithm(
      init=init,
      init_client=init_client,
      downlink=downlink,
      client_update=client_update,
      server_update=server_update,
      client_model=client_model,
      personal=exchange.personal,
      one_model=exchange.one_model,
  )
  if setting.protect.clip is None:
    return algorithm
  return algorithm._replace(
      predict=lambda group, variables, x: clipped_logits(
          group.model, variables, x, clip
      )
  )
