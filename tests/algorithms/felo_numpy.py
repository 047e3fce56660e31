"""Rounds of Felo and Velo for dense nets in NumPy.

Written from the paper and from the description of its authors' code. A net is a
list of (kernel, bias); all layers but the last are followed by ReLU. A client
takes one step on all of its examples in each epoch, and so does the CVAE. The
server stores single features, as the code does.
"""

import numpy as np


def forward(net, x):
  """Inputs of all layers, of which the last are the features; and logits."""
  inputs = [x]
  for kernel, bias in net[:-1]:
    inputs.append(np.maximum(inputs[-1] @ kernel + bias, 0))
  return inputs, inputs[-1] @ net[-1][0] + net[-1][1]


def local_step(net, x, y, targets, alpha, lr):
  """The new net, features, logits, and the three losses."""
  inputs, z = forward(net, x)
  f, num = inputs[-1], len(y)
  p = np.exp(z - z.max(axis=1, keepdims=True))
  p /= p.sum(axis=1, keepdims=True)
  losses = [-np.mean(np.log(p[range(num), y])), 0.0, 0.0]
  p[range(num), y] -= 1
  dz, df = p / num, np.zeros_like(f)
  for i in range(num):
    if y[i] in targets:
      f_bar, z_bar = targets[y[i]]
      losses[1] += np.mean((f[i] - f_bar) ** 2) / num
      losses[2] += np.mean((z[i] - z_bar) ** 2) / num
      df[i] = alpha * 2 * (f[i] - f_bar) / f.size
      dz[i] += alpha * 2 * (z[i] - z_bar) / z.size
  grads, delta = [], dz
  for i in reversed(range(len(net))):
    grads.append((inputs[i].T @ delta, delta.sum(axis=0)))
    delta = delta @ net[i][0].T
    if i == len(net) - 1:
      delta = delta + df
    delta = delta * (inputs[i] > 0)
  net = [
      (kernel - lr * dk, bias - lr * db)
      for (kernel, bias), (dk, db) in zip(net, grads[::-1])
  ]
  return net, f, z, losses


def visit(net, x, y, targets, alpha, lr, epochs):
  """The new net, {class: features}, {class: mean logits}, mean losses."""
  features, logits, losses = [], [], []
  for _ in range(epochs):
    net, f, z, terms = local_step(net, x, y, targets, alpha, lr)
    features.append(f)
    logits.append(z)
    losses.append(terms)
  y = np.tile(y, epochs)
  features, logits = np.concatenate(features), np.concatenate(logits)
  return (
      net,
      {j: features[y == j] for j in set(y)},
      {j: logits[y == j].mean(axis=0) for j in set(y)},
      np.mean(losses, axis=0),
  )


def decode(w, u, y):
  """The CVAE's decoder, and its hidden layer."""
  h = np.concatenate([u, w['label'][y]], axis=1) @ w['W3'] + w['b3']
  return h @ w['W4'] + w['b4'], h


def cvae_gradient(w, x, y, eps, mean_kl):
  """Gradient of the CVAE's loss, and its terms."""
  d, e = x.shape[1], w['label'][y]
  first = np.concatenate([x, e], axis=1)
  a = first @ w['W1'] + w['b1']
  std = np.sqrt(a.var(axis=0) + 1e-5)
  a_hat = (a - a.mean(axis=0)) / std
  n = w['g'] * a_hat + w['b']
  r = np.maximum(n, 0)
  mu, s = np.split(r @ w['W2'] + w['b2'], 2, axis=1)
  sigma = np.exp(s / 2)
  u = mu + sigma * eps
  out, h = decode(w, u, y)
  scale = 1 / mu.size if mean_kl else 1.0
  terms = (
      np.mean((out - x) ** 2),
      -0.5 * scale * np.sum(1 + s - mu**2 - np.exp(s)),
  )
  grads = {}
  do = 2 * (out - x) / x.size
  grads['W4'], grads['b4'] = h.T @ do, do.sum(axis=0)
  dh = do @ w['W4'].T
  grads['W3'] = np.concatenate([u, e], axis=1).T @ dh
  grads['b3'] = dh.sum(axis=0)
  dcat = dh @ w['W3'].T
  du, de = dcat[:, :d], dcat[:, d:]
  dmu = du + scale * mu
  ds = du * eps * sigma / 2 + scale * 0.5 * (np.exp(s) - 1)
  dms = np.concatenate([dmu, ds], axis=1)
  grads['W2'], grads['b2'] = r.T @ dms, dms.sum(axis=0)
  dn = (dms @ w['W2'].T) * (n > 0)
  grads['g'], grads['b'] = (dn * a_hat).sum(axis=0), dn.sum(axis=0)
  da = dn * w['g']
  da = (da - da.mean(axis=0) - a_hat * (da * a_hat).mean(axis=0)) / std
  grads['W1'], grads['b1'] = first.T @ da, da.sum(axis=0)
  de = de + (da @ w['W1'].T)[:, d:]
  grads['label'] = np.zeros_like(w['label'])
  np.add.at(grads['label'], y, de)
  return grads, terms


def train_cvae(w, features, eps, epochs, lr, mean_kl=False):
  """Steps of Adam on all stored features at once; and the mean losses."""
  x = np.concatenate([features[j] for j in sorted(features)])
  y = np.repeat(sorted(features), [len(features[j]) for j in sorted(features)])
  m = {name: np.zeros_like(v) for name, v in w.items()}
  v = {name: np.zeros_like(v) for name, v in w.items()}
  losses = []
  for t in range(1, epochs + 1):
    grads, terms = cvae_gradient(w, x, y, eps, mean_kl)
    losses.append(terms)
    for name, g in grads.items():
      m[name] = 0.9 * m[name] + 0.1 * g
      v[name] = 0.999 * v[name] + 0.001 * g**2
      step = m[name] / (1 - 0.9**t)
      step /= np.sqrt(v[name] / (1 - 0.999**t)) + 1e-8
      w = {**w, name: w[name] - lr * step}
  return w, np.mean(losses, axis=0)


def run(nets, data, num_rounds, first, window=None, velo=None, **training):
  """All rounds.

  `window` is the number of uploads of a class whose features Felo averages.
  `velo` is None, or a dict of the CVAE's weights `w`, `every`, `eps` of its
  training, `draws` (eps_y of all classes), `epochs` and `lr`.

  Returns nets, {class: (f_bar, z_bar)} and losses [rounds, clients, 3].
  """
  logits, uploads, targets, losses = {}, {}, {}, []
  w, trained = velo and velo['w'], False
  for t in range(num_rounds):
    done = [
        visit(net, x, y, targets if t >= first else {}, **training)
        for net, (x, y) in zip(nets, data)
    ]
    nets, losses = [one[0] for one in done], [*losses, [o[3] for o in done]]
    for _, features, means, _ in done:
      for j in features:
        logits.setdefault(j, []).append(means[j])
        uploads.setdefault(j, []).append(features[j])
    if velo is None:
      f_bar = {
          j: np.concatenate(parts[-window:]).mean(axis=0)
          for j, parts in uploads.items()
      }
    else:
      after = t + 1 - first
      if after >= 0 and after % velo['every'] == 0:
        stored = {j: np.concatenate(parts) for j, parts in uploads.items()}
        w, _ = train_cvae(w, stored, velo['eps'], velo['epochs'], velo['lr'])
        trained = True
      draws = velo['draws']
      f, _ = decode(w, draws, np.arange(len(draws)))
      f_bar = {j: f[j] for j in uploads} if trained else {}
    targets = {j: (f_bar[j], np.mean(logits[j], axis=0)) for j in f_bar}
  return nets, targets, np.array(losses)
