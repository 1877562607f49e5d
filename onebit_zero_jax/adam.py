"""1-bit Adam and AdamW as optax chains on :func:`onebit_zero_jax.zero_shard`."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from onebit_zero_jax.config import ZeroConfig, check_decay, check_number
from onebit_zero_jax.shard import zero_shard

ScalarOrSchedule = float | jax.Array | Callable[[Any], Any]
Mask = Any | Callable[[Any], Any]

# The largest step in units of the learning rate, unless Adam itself can take a larger one.
MAX_STEP = 10.0


def scale_by_rms(eps: Any, max_step: Any) -> optax.GradientTransformationExtraArgs:
    """Divides updates by ``rms + eps``, to at most ``max_step``.

    ``rms`` is the extra argument of ``zero_shard``. Its variance is frozen between refreshes:
    where the gradient has grown a thousandfold since (a unit that was dead during warm-up),
    the quotient would be a thousand.
    """

    def update(
        updates: Any, state: Any, params: Any = None, *, rms: Any, **extra_args: Any
    ) -> tuple[Any, Any]:
        del params, extra_args

        def divide(u: jax.Array, r: jax.Array) -> jax.Array:
            bottom = r + eps
            step = jnp.where(bottom > 0, u / jnp.where(bottom > 0, bottom, 1.0), 0.0)
            return jnp.clip(step, -max_step, max_step)

        return jax.tree.map(divide, updates, rms), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def largest_step(b1: Any, b2: Any) -> Any:
    """Adam's own bound is ``(1 - b1) / sqrt(1 - b2)`` (Kingma & Ba 2015, section 2.1)."""
    if isinstance(b1, jax.Array) or isinstance(b2, jax.Array):
        return jnp.maximum(MAX_STEP, (1 - b1) / jnp.sqrt(1 - b2))
    return max(MAX_STEP, (1 - b1) / math.sqrt(1 - b2))


def nonnegative(name: str, value: Any) -> Any:
    """A hyperparameter that is finite and at least 0, validated."""
    return check_number(name, value, lambda x: 0 <= x < math.inf, "finite and at least 0")


def onebit_adamw(
    learning_rate: ScalarOrSchedule,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    weight_decay: Any = 1e-4,
    mask: Mask | None = None,
    *,
    zero: ZeroConfig,
    warmup_steps: Any = 100,
    refresh: Any = 32,
) -> optax.GradientTransformationExtraArgs:
    r"""AdamW with ZeRO-sharded state that sends about one bit per parameter and leg.

    The owner of a chunk, with M and v from :func:`zero_shard`::

        u = (M / bc1) / (max(sqrt(v / bc2), 0.1 / w) + eps), within [-10, 10]
        x <- x - lr * ( u + weight_decay * x )

    The bound on u is Adam's own, ``(1 - b1) / sqrt(1 - b2)``, where that is larger. v
    moves on dense steps only (``warmup_steps`` at the start, then refreshes). While all
    steps are dense and ``gather_bits="dense"`` this is ``optax.adamw``, to rounding.

    Args:
      learning_rate: a float, or an optax schedule of the number of applied steps.
      b1: decay of the momentum, in [0, 1).
      b2: decay of the variance, in [0, 1).
      eps: added to the denominator.
      weight_decay: decoupled, multiplied by the learning rate as in ``optax.adamw``.
      mask: tree of bools of the parameters' structure, or a function of the parameters
        (it sees chunks of 3 axes in place of matrices), that says which leaves decay.
      zero: axis, stage and codes.
      warmup_steps: dense steps at the start, at least 1; 15-25 % of a short run, never
        fewer than the learning-rate warm-up. ``"auto"``: until the variance has settled
        and the schedule no longer rises, see :func:`zero_shard`.
      refresh: steps between dense variance refreshes, doubling after every 16, and anew
        where the schedule of the learning rate begins to rise again; or None.

    Returns:
      An optax transformation, see :func:`zero_shard`.

    Raises:
      ValueError: a hyperparameter is out of range; the message names it.

    Example:
      >>> tx = onebit_adamw(1e-3, weight_decay=0.1, zero=ZeroConfig(stage=2), warmup_steps=200)

    Source: 1-bit Adam (Tang et al. 2021, algorithm 1); AdamW (Loshchilov & Hutter 2019).
      Deviations: momentum is local and weighted by the variance, v is refreshed, both
      moments are bias-corrected.
    """
    if not callable(learning_rate):
        learning_rate = nonnegative("learning_rate", learning_rate)
    b1, b2 = check_decay("b1", b1), check_decay("b2", b2)
    eps = nonnegative("eps", eps)
    weight_decay = nonnegative("weight_decay", weight_decay)
    inner = optax.chain(
        scale_by_rms(eps, largest_step(b1, b2)),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )
    return zero_shard(
        inner,
        zero=zero,
        b1=b1,
        b2=b2,
        warmup_steps=warmup_steps,
        refresh=refresh,
        learning_rate=learning_rate if callable(learning_rate) else None,
    )


def onebit_adam(
    learning_rate: ScalarOrSchedule,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    *,
    zero: ZeroConfig,
    warmup_steps: Any = 100,
    refresh: Any = 32,
) -> optax.GradientTransformationExtraArgs:
    """Adam with ZeRO-sharded state and 1-bit momentum: :func:`onebit_adamw` without decay.

    Args:
      learning_rate, b1, b2, eps, zero, warmup_steps, refresh: as in :func:`onebit_adamw`.

    Returns:
      An optax transformation, see :func:`zero_shard`.

    Raises:
      ValueError: a hyperparameter is out of range; the message names it.

    Example:
      >>> tx = onebit_adam(1e-3, zero=ZeroConfig(stage=1, gather_bits=2), warmup_steps=200)

    Source: 1-bit Adam (Tang et al. 2021, algorithm 1).
    """
    return onebit_adamw(
        learning_rate,
        b1,
        b2,
        eps,
        weight_decay=0.0,
        zero=zero,
        warmup_steps=warmup_steps,
        refresh=refresh,
    )
