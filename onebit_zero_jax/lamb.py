"""1-bit LAMB as an optax chain on :func:`onebit_zero_jax.zero_shard`."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from onebit_zero_jax.adam import Mask, ScalarOrSchedule, largest_step, nonnegative, scale_by_rms
from onebit_zero_jax.config import ZeroConfig, check_decay, check_number
from onebit_zero_jax.shard import zero_shard


def scale_by_trust_ratio(max_ratio: Any) -> optax.GradientTransformationExtraArgs:
    """Multiplies updates by ``|params| / |updates|`` of the whole leaf, at most ``max_ratio``.

    The ratio is 1 where a norm is 0. Square norms of pieces travel in one ``psum``, two
    floats a leaf.
    """

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        leaf_sums: Callable[[Any], Any],
        **extra_args: Any,
    ) -> tuple[Any, Any]:
        del extra_args

        def squares(u: jax.Array, x: jax.Array) -> jax.Array:
            return jnp.stack([jnp.sum(jnp.square(a.astype(jnp.float32))) for a in (x, u)])

        def scale(u: jax.Array, squares: jax.Array) -> jax.Array:
            norm, length = jnp.sqrt(squares[0]), jnp.sqrt(squares[1])
            ratio = jnp.minimum(norm / jnp.where(length > 0, length, 1.0), max_ratio)
            return u * jnp.where((norm > 0) & (length > 0), ratio, 1.0)

        sums = leaf_sums(jax.tree.map(squares, updates, params))
        return jax.tree.map(scale, updates, sums), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def onebit_lamb(
    learning_rate: ScalarOrSchedule,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-6,
    weight_decay: Any = 0.0,
    mask: Mask | None = None,
    *,
    zero: ZeroConfig,
    warmup_steps: Any = 100,
    refresh: Any = 32,
    max_ratio: Any = math.inf,
) -> optax.GradientTransformationExtraArgs:
    r"""LAMB with ZeRO-sharded state that sends about one bit per parameter and leg.

    With M and v from :func:`zero_shard`, and norms over a whole leaf::

        u = (M / bc1) / (max(sqrt(v / bc2), 0.1 / w) + eps), within [-10, 10] as in onebit_adamw
        u <- u + weight_decay * x
        x <- x - lr * min(|x| / |u|, max_ratio) * u

    The ratio is 1 where a norm is 0. Otherwise no step moves a leaf by more than ``lr * |x|``,
    however far gradients outgrow a frozen v: so there is no lower bound of the ratio. While
    all steps are dense and ``gather_bits="dense"`` this is ``optax.lamb``, to rounding.

    Supports every stage and gather leg. With ``gather="params"`` the norms of the pieces add
    one ``psum`` of 8 bytes for each compressed leaf to a step (``"metrics"`` in
    ``bytes_sent``). Stacked layers are one leaf and share a ratio.

    Args:
      learning_rate: a float, or an optax schedule of the number of applied steps.
      b1, b2, eps: as in :func:`onebit_adamw`.
      weight_decay: added to the update before the ratio is taken, as in ``optax.lamb``.
      mask: which leaves decay, as in :func:`onebit_adamw`.
      zero: axis, stage and codes.
      warmup_steps, refresh: as in :func:`onebit_adamw`.
      max_ratio: upper bound of the trust ratio.

    Returns:
      An optax transformation, see :func:`zero_shard`.

    Raises:
      ValueError: a hyperparameter is out of range; the message names it.

    Example:
      >>> tx = onebit_lamb(2e-3, weight_decay=0.01, zero=ZeroConfig(stage=2), warmup_steps=200)

    Source: LAMB (You et al. 2020); 1-bit LAMB (Li et al. 2021).
      Deviations from the latter: the ratio is taken in every step from the parameters and
      the update at hand, not frozen and corrected by a variance rebuilt from compressed
      momentum (v is refreshed from dense gradients instead); weights take the place
      of a scale for each leaf; and what :func:`onebit_adamw` lists.
    """
    if not callable(learning_rate):
        learning_rate = nonnegative("learning_rate", learning_rate)
    b1, b2 = check_decay("b1", b1), check_decay("b2", b2)
    eps = nonnegative("eps", eps)
    weight_decay = nonnegative("weight_decay", weight_decay)
    max_ratio = check_number("max_ratio", max_ratio, lambda x: x > 0, "above 0")
    inner = optax.chain(
        scale_by_rms(eps, largest_step(b1, b2)),
        optax.add_decayed_weights(weight_decay, mask),
        scale_by_trust_ratio(max_ratio),
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
