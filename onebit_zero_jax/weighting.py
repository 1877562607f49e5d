"""Weights of the codec, shaped by the variance and kept as factors of a few values."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from onebit_zero_jax.codec import TINY, inverse

# Weights above this are clipped: the square of a gradient below 1e-18 underflows.
_MAX_WEIGHT = 1e18


class Factors(NamedTuple):
    """A weight as an outer product, ``weight = row * col`` by broadcasting.

    Attributes:
      row: float32, the leaf's shape with its column axis of size 1.
      col: float32, the leaf's shape with its row axis of size 1.
    """

    row: jax.Array
    col: jax.Array


def factored_axes(shape: tuple[int, ...]) -> tuple[int, int]:
    """The (row, column) axes of a leaf seen as matrices: its two largest axes.

    Equal sizes go to the later axes, every other axis stacks independent matrices
    (optax's rule for Adafactor). So stacked layers ``(layers, in, out)``, convolutions
    ``(h, w, in, out)`` and head axes ``(embed, heads, head_dim)`` factor as one expects.

    Args:
      shape: shape of the leaf.

    Returns:
      Two axes, the row axis before the column axis.

    Raises:
      ValueError: the leaf has fewer than two axes.

    Example:
      >>> [factored_axes(s) for s in ((24, 512, 2048), (3, 3, 64, 128), (512, 8, 64))]
      [(1, 2), (2, 3), (0, 2)]

    Source: Adafactor (Shazeer and Stern 2018).
    """
    if len(shape) < 2:
        raise ValueError(f"a leaf of shape {shape} has no rows and columns")
    order = sorted(range(len(shape)), key=lambda axis: (shape[axis], axis))
    row, col = sorted(order[-2:])
    return row, col


def mean_factors(v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Row and column means of ``v``, each with the other axis kept as 1.

    Args:
      v: float32, a leaf of two axes or more.

    Returns:
      ``R_i``, the shape of ``v`` with its column axis of size 1, and ``C_j``, with its
      row axis of size 1.

    Raises:
      ValueError: the leaf has fewer than two axes.

    Example:
      >>> row, col = mean_factors(jnp.array([[1.0, 3.0], [5.0, 7.0]]))
      >>> row.tolist(), col.tolist()
      ([[2.0], [6.0]], [[3.0, 5.0]])

    Source: Adafactor (Shazeer and Stern 2018).
    """
    # Divided before they are summed: the sum of squares of 1e18 would overflow.
    row, col = (
        jnp.sum(v * (1 / max(1, v.shape[axis])), axis=axis, keepdims=True)
        for axis in reversed(factored_axes(v.shape))
    )
    return row, col


def weight_factors(row_mean: jax.Array, col_mean: jax.Array, shape: tuple[int, ...]) -> Factors:
    r"""Factors of the variance-shaped weight, ``w_ij = (R_i C_j / mean R)^(-1/2)``.

    Args:
      row_mean: float32, the first of :func:`mean_factors` of the variance.
      col_mean: float32, the second.
      shape: shape of the leaf.

    Returns:
      Factors whose product is w. A factor is 0 where its mean is 0 (or below the
      smallest normal float32) or not finite; such means count as 0 in ``mean R``.

    Raises:
      ValueError: the leaf has fewer than two axes.

    Example:
      >>> v = jnp.outer(jnp.array([4.0, 16.0, 0.0]), jnp.array([1.0, 4.0]))
      >>> jnp.round(weight_of(weight_factors(*mean_factors(v), v.shape)), 4).tolist()
      [[0.5, 0.25], [0.25, 0.125], [0.0, 0.0]]

    Source: the variance of Adafactor (Shazeer and Stern 2018) as a weight of the codec.
    """
    row_axis, _ = factored_axes(shape)

    def alive(mean: jax.Array) -> jax.Array:
        return (mean >= TINY) & jnp.isfinite(mean)

    def rsqrt(mean: jax.Array) -> jax.Array:
        return jnp.where(alive(mean), lax.rsqrt(jnp.where(alive(mean), mean, 1.0)), 0.0)

    # The sum of the row means may overflow where their mean does not.
    rows = jnp.where(alive(row_mean), row_mean, 0.0)
    peak = jnp.max(rows, axis=row_axis, keepdims=True, initial=0.0)
    mean = peak * jnp.mean(rows * inverse(peak), axis=row_axis, keepdims=True)
    return Factors(rsqrt(row_mean), rsqrt(col_mean) * jnp.sqrt(mean))


def mean_variance(factors: Factors) -> jax.Array:
    r"""Mean of the variance that factors came from, ``mean_i R_i``.

    Args:
      factors: from :func:`weight_factors`.

    Returns:
      float32 scalar.

    Example:
      >>> v = jnp.outer(jnp.array([4.0, 16.0, 0.0]), jnp.array([1.0, 4.0]))
      >>> factors = weight_factors(*mean_factors(v), v.shape)
      >>> [round(x.item(), 3) for x in (mean_variance(factors), jnp.mean(v))]
      [16.667, 16.667]
    """
    row = factors.row
    means = jnp.where(row > 0, 1 / jnp.square(jnp.where(row > 0, row, 1.0)), 0.0)
    return jnp.mean(means) if means.size else jnp.zeros((), jnp.float32)


def weight_of(factors: Factors) -> jax.Array:
    """The weight of a leaf: the product of its factors, 1e18 at most.

    Args:
      factors: float32, see :class:`Factors`.

    Returns:
      float32 of the leaf's shape.

    Example:
      >>> weight_of(Factors(jnp.array([[1.0], [2.0]]), jnp.array([[3.0, 4.0]]))).tolist()
      [[3.0, 4.0], [6.0, 8.0]]
    """
    return jnp.minimum(factors.row * factors.col, _MAX_WEIGHT)
