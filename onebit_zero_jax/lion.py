"""1-bit Lion as an optax chain on :func:`onebit_zero_jax.zero_shard`."""

from typing import Any

import jax
import optax

from onebit_zero_jax.adam import Mask, ScalarOrSchedule, nonnegative
from onebit_zero_jax.config import ZeroConfig, check_decay
from onebit_zero_jax.shard import zero_shard


def onebit_lion(
    learning_rate: ScalarOrSchedule,
    b1: Any = 0.9,
    b2: Any = 0.99,
    weight_decay: Any = 1e-3,
    mask: Mask | None = None,
    *,
    zero: ZeroConfig,
    warmup_steps: Any = 100,
    refresh: Any = 32,
) -> optax.GradientTransformationExtraArgs:
    r"""Lion with ZeRO-sharded state that sends about one bit per parameter and leg.

    On device i, and for the owner of a chunk::

        c_i <- b1 m_i + (1 - b1) g_i;   m_i <- b2 m_i + (1 - b2) g_i
        C <- mean_i decode(encode(c_i, weight w));   x <- x - lr * ( sign(C) + weight_decay * x )

    There is no worker error: only the sign of C is used, and error feedback makes sums over
    steps right by adding noise to each. While all steps are dense and
    ``gather_bits="dense"`` this is ``optax.lion``, to rounding (a sign may differ where C
    cancels to nothing).

    Supports every stage, with ``gather="params"``. ``gather="momentum"`` (the default of
    stages 0 and 1) is refused: its momentum restarts from what was sent, which is c.

    Args:
      learning_rate: a float, or an optax schedule of the number of applied steps.
      b1: weight of the momentum in what is sent and applied, in [0, b2].
      b2: decay of the momentum, in [0, 1).
      weight_decay: decoupled, multiplied by the learning rate as in ``optax.lion``.
      mask: which leaves decay, as in :func:`onebit_adamw`.
      zero: axis, stage and codes.
      warmup_steps: dense steps at the start, at least 1. The variance that they
        measure shapes the codes (4 bytes per parameter, sharded); it is not in the update.
      refresh: steps between dense variance refreshes, doubling after every 16; or None.

    Returns:
      An optax transformation, see :func:`zero_shard`.

    Raises:
      ValueError: a hyperparameter is out of range, or ``gather="momentum"``; the message
        names it.

    Example:
      >>> tx = onebit_lion(1e-4, weight_decay=1.0, zero=ZeroConfig(stage=2), warmup_steps=200)

    Source: Lion (Chen et al. 2023); Distributed Lion (Liu et al. 2024) for local momenta.
      Deviations from the latter: signs carry block scales and are weighted by the
      variance, so votes have weights; the parameter leg sends what changed.
    """
    if not callable(learning_rate):
        learning_rate = nonnegative("learning_rate", learning_rate)
    weight_decay = nonnegative("weight_decay", weight_decay)
    b1 = check_decay("b1", b1)
    b2 = check_decay("b2", b2)
    if not isinstance(b1, jax.Array) and not isinstance(b2, jax.Array) and b1 > b2:
        raise ValueError(
            f"b1 must be at most b2, got b1={b1} and b2={b2}: what is sent holds at least the "
            "share of new gradients that the momentum keeps."
        )
    if isinstance(zero, ZeroConfig) and zero.gather_mode == "momentum":
        raise ValueError(
            "onebit_lion needs gather='params', got 'momentum' (the default of stages 0 and 1), "
            "where the momentum restarts from what was sent and would not decay by b2. Use "
            f"ZeroConfig(stage={zero.stage}, gather='params')."
        )
    inner = optax.chain(
        optax.scale_by_sign(),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )
    return zero_shard(
        inner,
        zero=zero,
        b1=b1,
        warmup_steps=warmup_steps,
        refresh=refresh,
        learning_rate=learning_rate if callable(learning_rate) else None,
        momentum_decay=b2,
        bias_correction=False,
        error_feedback=False,
    )
