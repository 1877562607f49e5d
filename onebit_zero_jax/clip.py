"""Gradient norms and clipping that all devices agree on."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from onebit_zero_jax import collectives as coll
from onebit_zero_jax.config import ZeroConfig, check_number
from onebit_zero_jax.layout import is_shard

# A prime: no stride of a matrix divides it, so every row and every column of a leaf
# spreads over all buckets.
SKETCH_SIZE = 1031


# Rows of a folded matrix: enough for a column that holds all of the norm.
_FOLDED_ROWS = range(512, SKETCH_SIZE, 8)


def _signs(shape: tuple[int, ...], seed: jax.Array) -> jax.Array:
    """Fixed pseudo-random signs: the top bit of a hash of the index (murmur3's finalizer)."""
    index, stride = jnp.zeros(shape, jnp.uint32), 1
    for axis in reversed(range(len(shape))):
        index += lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride % 2**32)
        stride *= shape[axis]
    h = index ^ (seed * jnp.uint32(0x9E3779B9) + jnp.uint32(0x7F4A7C15))
    h = (h ^ (h >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    h = h ^ (h >> jnp.uint32(16))
    return jnp.where(h >> jnp.uint32(31) == 1, 1.0, -1.0).astype(jnp.float32)


def _folded_rows(shape: tuple[int, ...]) -> int | None:
    """Rows to which those of a large leaf are summed up before they fill buckets; None for no sum.

    Groups of rows are added up as they lie in memory. To fill buckets moves every value on
    TPU; so it moves fewer. The same row of stacked matrices becomes different ones, as far
    as ``rows`` allows: a norm that sits in one place of every matrix is known less well.
    """
    if len(shape) < 2 or shape[-2] % 8 or not math.prod(shape):
        return None
    rows = math.prod(shape[:-1])
    options = [(n // math.gcd(n, shape[-2]), n) for n in _FOLDED_ROWS if rows % n == 0]
    return max(options)[1] if options else None


def _sketch(leaf: jax.Array, seed: int, first: int, piece: jax.Array | int = 0) -> jax.Array:
    """Linear map to ``SKETCH_SIZE`` values whose square norm is, on average, the leaf's.

    Values, or sums of :func:`_folded_rows`, fill the buckets in turn, from bucket
    ``first + piece * leaf.size`` on.
    """
    mixed = jnp.uint32(seed) + jnp.uint32(1 << 20) * jnp.asarray(piece, jnp.uint32)
    rows = _folded_rows(leaf.shape)
    x = leaf[None] if rows is None else leaf.reshape(-1, rows, leaf.shape[-1])
    flat = jnp.ravel(jnp.sum(x.astype(jnp.float32) * _signs(x.shape, mixed), axis=0))
    flat = jnp.pad(flat, (0, -flat.size % SKETCH_SIZE))
    start = (first + piece * (leaf.size % SKETCH_SIZE)) % SKETCH_SIZE
    return jnp.roll(jnp.sum(flat.reshape(-1, SKETCH_SIZE), axis=0), start)


def global_norm(grads: Any, axis_name: coll.AxisName) -> jax.Array:
    r"""Norm of the mean over devices of local gradients, from 4 KB per device.

    The norm of the mean cannot be told from the local norms (their root mean square
    is several times larger). Every device sends a random projection of its
    gradient to 1031 values, ``s_i = A g_i``; the projections' mean is that of the
    mean gradient, and ``|mean s|`` estimates ``|mean g|`` without bias in the
    square, within about 2.2 % (one standard deviation, ``1 / sqrt(2 * 1031)``). On
    one device, and for 1031 values in all, it is exact.

    Args:
      grads: tree of local gradients, float.
      axis_name: data-parallel mesh axis, or a tuple of them.

    Returns:
      float32 scalar, equal on all devices.

    Example:
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> jax.shard_map(lambda g: global_norm(g, "data"), mesh=mesh, in_specs=jax.P(),
      ...     out_specs=jax.P())(jnp.array([3.0, 4.0])).item()
      5.0

    Source: AMS sketch (Alon, Matias & Szegedy 1996).
    """
    coll.check_model_axes(axis_name)
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    model = coll.model_axes(names)
    parts = coll.axis_size(axis_name)
    exact = parts == 1 and not model
    values = jnp.zeros(0 if exact else SKETCH_SIZE, jnp.float32)
    # Leaves follow each other: a few small ones share no buckets, and the norm is exact.
    first = 0
    for i, g in enumerate(jax.tree.leaves(grads, is_leaf=is_shard)):
        x = (g.value if is_shard(g) else g).astype(jnp.float32)
        if exact:
            values = jnp.concatenate([values, jnp.ravel(x)])
            continue
        # Axes over which devices hold different pieces of one gradient.
        pieces = coll.model_axes_of(x, names)
        scale = coll.share(x, names)
        if is_shard(g) and set(g.over) != set(names):
            # The mean over g.over already.
            pieces, scale = pieces + g.over, scale * coll.axis_size(g.over)
        piece = lax.axis_index(pieces) if pieces else 0
        values = values + scale * _sketch(x, i, first, piece)
        first = (first + x.size * (coll.axis_size(pieces) if pieces else 1)) % SKETCH_SIZE
    with jax.named_scope("metrics"):
        values = coll.psum(values, names, model) / parts
    # Squares of values near the end of float32 overflow.
    top = jnp.max(jnp.abs(values), initial=0.0)
    unit = values / jnp.where(top > 0, top, 1.0)
    return top * jnp.sqrt(jnp.sum(jnp.square(unit)))


def clip_by_global_norm(max_norm: Any, *, zero: ZeroConfig) -> optax.GradientTransformation:
    """Scales gradients so that the norm of their mean is at most ``max_norm``.

    To be put in front: ``optax.chain(clip_by_global_norm(1.0, zero=zero),
    onebit_adamw(...))``. All devices use the same factor,
    ``min(1, max_norm / global_norm)`` with :func:`global_norm`, so ``max_norm`` means
    what it means in ``optax.clip_by_global_norm`` on the mean gradient, which there
    would be a different local norm on each device. In front only: inside ``zero_shard``
    it would see chunks.

    Args:
      max_norm: positive.
      zero: names the axis.

    Returns:
      A stateless optax transformation for use inside ``shard_map``. A gradient whose
      norm is not finite passes unchanged, for ``zero_shard`` to skip.

    Raises:
      ValueError: ``max_norm`` is not positive; the axis is not bound.

    Example:
      >>> tx = optax.chain(clip_by_global_norm(1.0, zero=ZeroConfig()), optax.identity())
    """
    if not isinstance(zero, ZeroConfig):
        raise ValueError(f"zero must be a ZeroConfig, got {zero!r}.")
    max_norm = check_number("max_norm", max_norm, lambda x: x > 0, "positive")

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        if not jax.tree.leaves(updates):
            return updates, state
        norm = global_norm(updates, zero.axis_name)
        factor = jnp.where(norm > max_norm, max_norm / norm, 1.0)
        factor = jnp.where(jnp.isfinite(norm), factor, 1.0).astype(jnp.float32)
        return jax.tree.map(
            lambda g: (g.astype(jnp.float32) * factor).astype(g.dtype), updates
        ), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
