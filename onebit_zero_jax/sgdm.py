"""1-bit SGD with momentum as an optax chain on :func:`onebit_zero_jax.zero_shard`."""

from typing import Any

import optax

from onebit_zero_jax.adam import Mask, ScalarOrSchedule, nonnegative
from onebit_zero_jax.config import ZeroConfig, check_decay
from onebit_zero_jax.shard import zero_shard


def onebit_sgdm(
    learning_rate: ScalarOrSchedule,
    momentum: Any = 0.9,
    weight_decay: Any = 0.0,
    mask: Mask | None = None,
    *,
    zero: ZeroConfig,
    warmup_steps: Any = 100,
    refresh: Any = 32,
) -> optax.GradientTransformationExtraArgs:
    r"""SGD with momentum and ZeRO-sharded state that sends about one bit per parameter and leg.

    The owner of a chunk, with M from :func:`zero_shard`, an average of gradients::

        x <- x - lr * ( M / (1 - momentum) + weight_decay * x )

    ``M / (1 - momentum)`` is the sum of decayed gradients of ``optax.sgd``, so learning
    rates are the same. While all steps are dense and ``gather_bits="dense"`` this is
    ``optax.sgd(learning_rate, momentum)``, to rounding. Nesterov's momentum needs the mean
    gradient, which compressed steps do not know.

    Supports every stage and gather leg.

    Args:
      learning_rate: a float, or an optax schedule of the number of applied steps.
      momentum: decay of the momentum, in [0, 1).
      weight_decay: decoupled, multiplied by the learning rate as in ``optax.adamw``. For L2
        in the gradient put ``optax.add_decayed_weights`` in front.
      mask: which leaves decay, as in :func:`onebit_adamw`.
      zero: axis, stage and codes.
      warmup_steps: dense steps at the start, at least 1. The variance that they
        measure shapes the codes (4 bytes per parameter, sharded); it is not in the update.
      refresh: steps between dense variance refreshes, doubling after every 16; or None.

    Returns:
      An optax transformation, see :func:`zero_shard`.

    Raises:
      ValueError: a hyperparameter is out of range; the message names it.

    Example:
      >>> tx = onebit_sgdm(0.1, momentum=0.9, zero=ZeroConfig(stage=2), warmup_steps=200)

    Source: dist-EF-SGDM (Zheng et al. 2019), with local momentum and block scales.
      Deviations: errors are fed back in units of momentum, not of the step; values are
      weighted by the variance; the parameter leg sends what changed, not momentum.
    """
    if not callable(learning_rate):
        learning_rate = nonnegative("learning_rate", learning_rate)
    momentum = check_decay("momentum", momentum)
    weight_decay = nonnegative("weight_decay", weight_decay)
    inner = optax.chain(
        optax.scale(1 / (1 - momentum)),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )
    return zero_shard(
        inner,
        zero=zero,
        b1=momentum,
        warmup_steps=warmup_steps,
        refresh=refresh,
        learning_rate=learning_rate if callable(learning_rate) else None,
        bias_correction=False,
    )
