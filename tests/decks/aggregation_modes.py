"""The modes by which trainers of text models aggregate the losses of tokens.

The names are tunix's (0.1.7, and `google/tunix` at 0340b3b9); verl has most of them.
Each mode is a sum over rows and a weight, written here from its description.
"""

import jax.numpy as jnp
import numpy as np

LENGTH = 5
DRAW = np.random.default_rng(0)
W = np.float32([0.4, -0.3, 0.7])
X = DRAW.normal(size=(8, LENGTH, 3)).astype(np.float32)
COUNTS = np.array([5, 1, 0, 3, 5, 2, 4, 1])  # one row has no token
MASK = (np.arange(LENGTH) < COUNTS[:, None]).astype(np.float32)


def losses_of(w, x):
    """The losses of tokens, ``[rows, LENGTH]``."""
    return (x @ w - 1) ** 2


def token_mean(losses, mask):
    return (losses * mask).sum(), mask.sum()


def sequence_mean_token_mean(losses, mask):
    tokens = mask.sum(-1)
    means = (losses * mask).sum(-1) / jnp.maximum(tokens, 1)
    return means.sum(), (tokens > 0).sum()


def sequence_mean_token_scale(losses, mask):
    """A row's losses are divided by the greatest length."""
    sums = (losses * mask).sum(-1) / losses.shape[-1]
    return sums.sum(), (mask.sum(-1) > 0).sum()


def seq_mean_token_sum(losses, mask):
    has_tokens = mask.sum(-1) > 0
    return ((losses * mask).sum(-1) * has_tokens).sum(), has_tokens.sum()


def sequence_mean_token_sum_norm(losses, mask):
    """The weight is the number of rows, those without tokens included."""
    return (losses * mask).sum(), jnp.float32(len(losses))


def of_a_norm(losses, mask):
    """The weight is a number that the user gives, such as ``norm=8``."""
    return (losses * mask).sum(), jnp.float32(8)


MODES = {
    "token-mean": token_mean,
    "sequence-mean-token-mean": sequence_mean_token_mean,
    "sequence-mean-token-scale": sequence_mean_token_scale,
    "seq-mean-token-sum": seq_mean_token_sum,
    "sequence-mean-token-sum-norm": sequence_mean_token_sum_norm,
    "sequence-mean-token-sum-norm, norm=8": of_a_norm,
}


def quotient(total, weight):
    return total / jnp.maximum(weight, 1e-6)
