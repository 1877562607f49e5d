"""Codes of 1 to 8 bits with block scales: arrays in, arrays out, no mesh.

Values are seen as blocks of 8 rows x ``lanes`` columns (128 columns unless the
array is small), shape ``(..., 8, lanes)``. The values of a block share one float32
scale. Bit j of row k travels in bit k of byte plane j, so a plane is ``lanes``
bytes and packing never crosses a vector lane. Code l of b bits stands for
``(2 l / (2^b - 1) - 1) scale``, so its highest bit is the sign: 1 is +.

A *weight* (same shape as the values, >= 0) multiplies values before signs and
scales are taken and divides them when decoded. Where it is 0 the value takes no
part at all: not in the scale, not in the error, and it decodes to 0. Padding is
nothing but weight 0.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

ROWS = 8
LANES = 128
BLOCK = ROWS * LANES
# Above this waste a small array gets narrower blocks instead of more padding.
_MAX_PADDING = 1 / 16
# Decoding unrolls over this many senders, then loops: more streams at once are slower.
_UNROLL = 8
# Weights and scales below the smallest normal float32 count as 0: 1 / x must be finite.
TINY = float(jnp.finfo(jnp.float32).tiny)


class Packed(NamedTuple):
    """Codes of blocks, as they travel.

    Attributes:
      planes: uint8 ``(..., bits, lanes)``, one byte plane per bit.
      scale: float32 ``(..., 1, 1)``, one per block.
    """

    planes: jax.Array
    scale: jax.Array


# ---------------------------------------------------------------- blocks


def block_shape(size: int, parts: int = 1) -> tuple[int, int]:
    """Returns ``(blocks, lanes)`` of each of ``parts`` equal parts of ``size`` values.

    Blocks are 8 x 128 unless padding to them would waste more than 1/16 of the
    array; then they are as narrow as needed and a part wastes less than 8 values a
    block.

    Args:
      size: number of values, 0 or more.
      parts: number of equal parts they are cut into, 1 or more.

    Returns:
      Blocks of one part, and their width (128 at most).

    Example:
      >>> block_shape(16 * 1024, parts=8), block_shape(16 * 1024, parts=7)
      ((2, 128), (3, 98))
    """
    if size == 0:
        return 0, LANES
    part = -(-size // parts)
    blocks = -(-part // BLOCK)
    if blocks * BLOCK * parts <= size * (1 + _MAX_PADDING):
        return blocks, LANES
    return blocks, -(-part // (blocks * ROWS))


def is_tiled(shape: tuple[int, ...], lanes: int) -> bool:
    """Whether an array divides into tiles of 8 rows and 128 columns, and blocks are as wide.

    Example:
      >>> [is_tiled(s, 128) for s in ((12, 16, 256), (16, 100), (2048,))]
      [True, False, False]
    """
    if lanes != LANES or len(shape) < 2 or not math.prod(shape):
        return False
    return shape[-2] % ROWS == 0 and shape[-1] % LANES == 0


def to_blocks(x: jax.Array, parts: int = 1, tiles: bool = False) -> jax.Array:
    """``x`` in blocks, padded with zeros at the end to ``(parts * blocks, 8, lanes)``.

    Args:
      x: any shape and dtype.
      parts: see :func:`block_shape`.
      tiles: blocks are tiles of the last two axes where these divide into such
        (:func:`is_tiled`). Else a block holds consecutive values of the flattened array.

    Returns:
      The blocks, dtype of ``x``; in row-major order, values or tiles.

    Example:
      >>> to_blocks(jnp.arange(10.0))[0, :, 0].tolist(), to_blocks(jnp.arange(10.0)).shape
      ([0.0, 2.0, 4.0, 6.0, 8.0, 0.0, 0.0, 0.0], (1, 8, 2))
      >>> to_blocks(jnp.arange(16.0 * 256).reshape(16, 256), tiles=True)[:, 0, 0].tolist()
      [0.0, 128.0, 2048.0, 2176.0]
    """
    blocks, lanes = block_shape(x.size, parts)
    if tiles and is_tiled(x.shape, lanes):
        rows, cols = x.shape[-2:]
        x = x.reshape(-1, rows // ROWS, ROWS, cols // LANES, LANES)
        x = jnp.swapaxes(x, 2, 3).reshape(-1, ROWS, LANES)
        return jnp.pad(x, ((0, parts * blocks - len(x)), (0, 0), (0, 0)))
    flat = jnp.ravel(x)
    padding = parts * blocks * ROWS * lanes - x.size
    if padding:
        flat = jnp.pad(flat, (0, padding))
    return flat.reshape(parts * blocks, ROWS, lanes)


def from_blocks(blocks: jax.Array, shape: tuple[int, ...], tiles: bool = False) -> jax.Array:
    """Inverse of :func:`to_blocks` for an array of shape ``shape``.

    Args:
      blocks: ``(parts * blocks, 8, lanes)``, any dtype.
      shape: shape of the array; what exceeds its size is dropped.
      tiles: as for :func:`to_blocks`.

    Returns:
      An array of shape ``shape`` and the dtype of ``blocks``.

    Example:
      >>> from_blocks(to_blocks(jnp.arange(6).reshape(2, 3)), (2, 3)).tolist()
      [[0, 1, 2], [3, 4, 5]]
    """
    if tiles and is_tiled(shape, blocks.shape[-1]):
        rows, cols = shape[-2:]
        x = blocks[: math.prod(shape) // BLOCK]
        x = x.reshape(-1, rows // ROWS, cols // LANES, ROWS, LANES)
        return jnp.swapaxes(x, 2, 3).reshape(shape)
    return blocks.reshape(-1)[: math.prod(shape)].reshape(shape)


def padding_mask(size: int, parts: int = 1) -> jax.Array | None:
    """Weight of the blocks of ``size`` values: 1, and 0 on padding; None if there is none.

    Args:
      size: number of values.
      parts: see :func:`block_shape`.

    Returns:
      float32 ``(parts * blocks, 8, lanes)``, or None.

    Example:
      >>> padding_mask(1024), padding_mask(10)[0, :, 0].tolist()
      (None, [1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0])
    """
    blocks, lanes = block_shape(size, parts)
    if parts * blocks * ROWS * lanes == size:
        return None
    return to_blocks(jnp.ones(size, jnp.float32), parts)


# ---------------------------------------------------------------- codes


def _powers(shape: tuple[int, ...], axis: int) -> jax.Array:
    """uint8 of shape ``shape``: 2 to the index along ``axis`` (negative)."""
    return jnp.uint8(1) << lax.broadcasted_iota(jnp.uint8, shape, len(shape) + axis)


def pack_bits(bits: jax.Array) -> jax.Array:
    """Packs bool ``(..., 8, lanes)`` to uint8 ``(..., lanes)``, row k in bit k.

    Example:
      >>> pack_bits(jnp.array([[True], [False], [True], [False]] * 2)).tolist()
      [85]
    """
    powers = jnp.where(bits, _powers(bits.shape, -2), jnp.uint8(0))
    return jnp.sum(powers, axis=-2, dtype=jnp.uint8)


def unpack_bits(plane: jax.Array) -> jax.Array:
    """Inverse of :func:`pack_bits`: uint8 ``(..., lanes)`` to bool ``(..., 8, lanes)``.

    Example:
      >>> unpack_bits(jnp.array([85], jnp.uint8))[:, 0].astype(int).tolist()
      [1, 0, 1, 0, 1, 0, 1, 0]
    """
    shape = (*plane.shape[:-1], ROWS, plane.shape[-1])
    spread = lax.broadcast_in_dim(plane, shape, (*range(plane.ndim - 1), plane.ndim))
    return (spread & _powers(shape, -2)) > 0


def _reduce_blocks(
    operands: tuple[jax.Array, jax.Array],
    ops: tuple[Callable[[jax.Array, jax.Array], jax.Array], ...],
) -> list[jax.Array]:
    """Two reductions over the last two axes, kept as 1, starting from 0, in one pass.

    XLA fuses the reduction of a pair with what computes the pair. A single one it hands
    to a library on CPU, which wants its operand written out: 4 bytes a value.
    """
    results = lax.reduce(
        operands,
        (jnp.float32(0), jnp.float32(0)),
        lambda a, b: tuple(op(x, y) for op, x, y in zip(ops, a, b, strict=True)),
        (operands[0].ndim - 2, operands[0].ndim - 1),
    )
    return [jnp.expand_dims(result, (-2, -1)) for result in results]


def max_abs(x: jax.Array) -> jax.Array:
    """max |x| over the last two axes, kept as 1."""
    high, low = _reduce_blocks((x, x), (lax.max, lax.min))
    return jnp.maximum(high, -low)


def inverse(weight: jax.Array) -> jax.Array:
    """1 / weight, and 0 where the weight is 0 (or below the smallest normal float32).

    Example:
      >>> inverse(jnp.array([4.0, 0.0])).tolist()
      [0.25, 0.0]
    """
    alive = weight >= TINY
    return jnp.where(alive, 1.0 / jnp.where(alive, weight, 1.0), 0.0)


def encode(
    x: jax.Array,
    error: jax.Array | None = None,
    *,
    bits: int = 1,
    weight: jax.Array | None = None,
    limit: float = math.inf,
) -> tuple[Packed, jax.Array]:
    r"""Encodes ``c = x + error`` and returns the code and what it lost.

    With ``u = weight * c``, per block: 1 bit sends ``sign(c)`` (sign(0) = +1) and
    the scale ``mean |u|``, the least-squares choice; b bits send
    ``round((u / max|u| + 1) (2^b - 1) / 2)`` and the scale ``max |u|``, so the levels
    are uniform on ``[-max, max]`` and none of them is 0. The new error is
    ``c - decode(code)`` rounded to float32, and 0 where the weight is 0.

    Args:
      x: float ``(..., 8, lanes)``, any float dtype; computed in float32.
      error: float32 of the same shape, or None for zero.
      bits: 1 to 8.
      weight: float32 >= 0 of the same shape, or None for ones.
      limit: with 1 bit and a weight, ``|u|`` counts as ``limit`` at most in the scale, so
        that a few outliers do not drown a block: what they lose stays in the error.

    Returns:
      The code, and the new error (float32, shape of ``x``).

    Raises:
      ValueError: ``bits`` is not in 1 to 8.

    Example:
      >>> x = jnp.full((1, 8, 128), -2.0).at[0, 0, 0].set(4.0)
      >>> code, error = encode(x)
      >>> code.planes.shape, code.planes.dtype, bool(jnp.all(decode(code) + error == x))
      ((1, 1, 128), dtype('uint8'), True)

    Source: 1-bit SGD (Seide et al. 2014); scales per block: Zheng et al. 2019.
    """
    if not 1 <= bits <= 8:
        raise ValueError(f"bits must be 1 to 8, got {bits}")
    c = x.astype(jnp.float32)
    if error is not None:
        c = c + error
    u = c if weight is None else c * weight
    positive = c >= 0
    if bits > 1:
        scale = max_abs(u)
        # Of the levels of its sign, counted from 0.
        level = jnp.floor((jnp.abs(u) * inverse(scale)) * ((2**bits - 1) / 2))
        half = 2 ** (bits - 1)
        number = jnp.where(positive, half + level, half - 1 - level).astype(jnp.uint8)
        shape = (*number.shape[:-2], bits, *number.shape[-2:])
        planes = pack_bits((jnp.expand_dims(number, -3) & _powers(shape, -3)) > 0)
    else:
        if weight is None:
            scale = jnp.mean(jnp.abs(u), axis=(-2, -1), keepdims=True)
        else:
            alive = (weight >= TINY).astype(jnp.float32)
            size = jnp.abs(u) if limit == math.inf else jnp.minimum(jnp.abs(u), limit)
            total, count = _reduce_blocks((size, alive), (lax.add, lax.add))
            scale = total / jnp.maximum(count, 1.0)
        level = None
        planes = jnp.expand_dims(pack_bits(positive), -2)
    # Planes first: then the error can take the memory of c.
    code = lax.optimization_barrier(Packed(planes, scale))
    new_error = c - _decode(positive, level, bits, code.scale, weight)
    return code, new_error if weight is None else jnp.where(weight >= TINY, new_error, 0.0)


def _decode(
    positive: jax.Array,
    level: jax.Array | None,
    bits: int,
    scale: jax.Array,
    weight: jax.Array | None,
) -> jax.Array:
    """Signs and levels to values. The same arithmetic for sender and receiver, to the bit.

    The sign comes last because a product next to the subtraction of the error would be
    contracted into one rounding (FMA) there and not at the receiver.
    """
    magnitude = scale * (1 / (2**bits - 1))
    if level is not None:
        magnitude = (2.0 * level + 1.0) * magnitude
    if weight is not None:
        magnitude = magnitude * inverse(weight)
    return jnp.where(positive, magnitude, -magnitude)


def decode(code: Packed, weight: jax.Array | None = None) -> jax.Array:
    """Decodes to float32 ``(..., 8, lanes)``; 0 where the weight is 0.

    Args:
      code: what :func:`encode` returned; the number of planes is the number of bits.
      weight: float32 ``(..., 8, lanes)``, the weight it was encoded with, or None.

    Returns:
      float32 ``(..., 8, lanes)``.

    Example:
      >>> code, _ = encode(jnp.array([[[1.0], [-3.0], [2.0], [0.0], [-4.0], [2.0], [1.0], [3.0]]]))
      >>> decode(code)[0, :, 0].tolist()
      [2.0, -2.0, 2.0, 2.0, -2.0, 2.0, 2.0, 2.0]
    """
    bits = code.planes.shape[-2]
    *low, positive = (unpack_bits(code.planes[..., j, :]) for j in range(bits))
    level = None
    if low:
        powers = [jnp.where(bit, jnp.uint8(2**j), 0) for j, bit in enumerate(low)]
        level = sum(powers[1:], powers[0])
        level = jnp.where(positive, level, jnp.uint8(2 ** (bits - 1) - 1) - level)
        level = level.astype(jnp.float32)
    return _decode(positive, level, bits, code.scale, weight)


def decode_mean(code: Packed, weight: jax.Array | None = None) -> jax.Array:
    """Mean over the leading axis (the senders) of the decoded blocks.

    Senders are added one after the other, so that no decoded copy of all of them
    ever exists: unrolled by 8, a loop beyond.

    Args:
      code: planes ``(senders, ..., bits, lanes)``, scales ``(senders, ..., 1, 1)``.
      weight: float32 ``(..., 8, lanes)``, the weight all senders used, or None.

    Returns:
      float32 ``(..., 8, lanes)``.

    Example:
      >>> code = Packed(jnp.array([[[255]], [[0]], [[15]]], jnp.uint8), jnp.full((3, 1, 1), 6.0))
      >>> decode_mean(code)[:, 0].tolist()
      [2.0, 2.0, 2.0, 2.0, -2.0, -2.0, -2.0, -2.0]
    """
    senders = code.planes.shape[0]
    unrolled = senders % _UNROLL or min(senders, _UNROLL)
    code = code._replace(scale=code.scale * (1 / senders))

    def sender(i: jax.Array | int) -> jax.Array:
        return decode(Packed(code.planes[i], code.scale[i]))

    def add(i: jax.Array, total: jax.Array) -> jax.Array:
        for k in range(_UNROLL):
            total = total + sender(unrolled + i * _UNROLL + k)
        return total

    total = sender(0)
    for i in range(1, unrolled):
        total = total + sender(i)
    if senders > unrolled:
        total = lax.fori_loop(0, (senders - unrolled) // _UNROLL, add, total)
    return total if weight is None else total * inverse(weight)
