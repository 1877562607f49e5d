"""Codes of 1 to 8 bits with block scales: arrays in, arrays out, no mesh.

Values are seen as blocks of 8 rows x ``lanes`` columns (128 columns unless the
array is small), shape ``(..., 8, lanes)``. The values of a block share one float32
scale. Bit j of row k travels in bit k of byte plane j, so a plane is ``lanes``
bytes and packing never crosses a vector lane.

A *weight* (same shape as the values, >= 0) multiplies values before signs and
scales are taken and divides them when decoded. Where it is 0 the value takes no
part at all: not in the scale, not in the error, and it decodes to 0. Padding is
nothing but weight 0.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

ROWS = 8
LANES = 128
BLOCK = ROWS * LANES
# Above this waste a small array gets narrower blocks instead of more padding.
_MAX_PADDING = 1 / 16
# Weights above this are clipped: the square of a gradient below 1e-18 underflows.
_MAX_WEIGHT = 1e18
_INT8_ROWS = 2
_LOG_LEVELS_PER_OCTAVE = 4
# Decoding unrolls over this many senders, then loops.
_UNROLL = 8


class Packed(NamedTuple):
    """Codes of blocks, as they travel.

    Attributes:
      planes: uint8 ``(..., bits, lanes)``, one byte plane per bit.
      scale: float32 ``(..., 1, 1)``, one per block.
    """

    planes: jax.Array
    scale: jax.Array


class Factors(NamedTuple):
    """A weight as an outer product, ``weight = row * col`` by broadcasting.

    Attributes:
      row: float32, the leaf's shape with its column axis of size 1.
      col: float32, the leaf's shape with its row axis of size 1.
    """

    row: jax.Array
    col: jax.Array


# ---------------------------------------------------------------- blocks


def block_shape(size: int, parts: int = 1) -> tuple[int, int]:
    """Returns ``(blocks, lanes)`` of each of ``parts`` equal parts of ``size`` values.

    Blocks are 8 x 128 unless padding to them would waste more than 1/16 of the
    array; then they are as narrow as needed.

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


def to_blocks(x: jax.Array, parts: int = 1) -> jax.Array:
    """Flattens ``x`` and pads it with zeros to ``(parts * blocks, 8, lanes)``."""
    blocks, lanes = block_shape(x.size, parts)
    flat = jnp.ravel(x)
    padding = parts * blocks * ROWS * lanes - x.size
    if padding:
        flat = jnp.pad(flat, (0, padding))
    return flat.reshape(parts * blocks, ROWS, lanes)


def from_blocks(blocks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Inverse of :func:`to_blocks` for an array of shape ``shape``."""
    size = 1
    for dim in shape:
        size *= dim
    return blocks.reshape(-1)[:size].reshape(shape)


def padding_mask(size: int, parts: int = 1) -> jax.Array | None:
    """Weight of the blocks of ``size`` values: 1, and 0 on padding; None if there is none."""
    blocks, lanes = block_shape(size, parts)
    if parts * blocks * ROWS * lanes == size:
        return None
    return to_blocks(jnp.ones(size, jnp.float32), parts)


# ---------------------------------------------------------------- codes


def pack_bits(bits: jax.Array) -> jax.Array:
    """bool ``(..., 8, lanes)`` -> uint8 ``(..., lanes)``, row k in bit k."""
    shift = jnp.arange(ROWS, dtype=jnp.uint8)[:, None]
    shift = lax.broadcast_in_dim(shift, bits.shape, (bits.ndim - 2, bits.ndim - 1))
    return jnp.sum(bits.astype(jnp.uint8) << shift, axis=-2, dtype=jnp.uint8)


def unpack_bits(plane: jax.Array) -> jax.Array:
    """uint8 ``(..., lanes)`` -> uint8 0 or 1 ``(..., 8, lanes)``."""
    shape = (*plane.shape[:-1], ROWS, plane.shape[-1])
    shift = lax.broadcasted_iota(jnp.uint8, shape, len(shape) - 2)
    spread = lax.broadcast_in_dim(plane, shape, (*range(plane.ndim - 1), plane.ndim))
    return (spread >> shift) & jnp.uint8(1)


def _levels(planes: jax.Array) -> jax.Array:
    """Decodes byte planes to float32 levels in [-1, 1]."""
    bits = planes.shape[-2]
    code = unpack_bits(planes[..., 0, :])
    for j in range(1, bits):
        code = code | (unpack_bits(planes[..., j, :]) << jnp.uint8(j))
    return code.astype(jnp.float32) * (2.0 / (2**bits - 1)) - 1.0


def inverse(weight: jax.Array) -> jax.Array:
    """1 / weight, and 0 where the weight is 0."""
    alive = weight > 0
    return jnp.where(alive, 1.0 / jnp.where(alive, weight, 1.0), 0.0)


def encode(
    x: jax.Array, error: jax.Array | None = None, *, bits: int = 1, weight: jax.Array | None = None
) -> tuple[Packed, jax.Array]:
    r"""Encodes ``c = x + error`` and returns the code and what it lost.

    With ``u = weight * c``, per block: 1 bit sends ``sign(u)`` (sign(0) = +1) and
    the scale ``mean |u|``, the least-squares choice; b bits send
    ``round((u / max|u| + 1) (2^b - 1) / 2)`` and the scale ``max |u|``, so the
    levels are uniform on ``[-max, max]`` and none of them is 0. The new error is
    ``c - decode(code)`` rounded to float32, and 0 where the weight is 0.

    Args:
      x: float ``(..., 8, lanes)``, any float dtype; computed in float32.
      error: float32 of the same shape, or None for zero.
      bits: 1 to 8.
      weight: float32 >= 0 of the same shape, or None for ones.

    Returns:
      The code, and the new error (float32, shape of ``x``).

    Example:
      >>> x = jnp.full((1, 8, 128), -2.0).at[0, 0, 0].set(4.0)
      >>> code, error = encode(x)
      >>> code.planes.shape, code.planes.dtype, bool(jnp.allclose(decode(code) + error, x))
      ((1, 1, 128), dtype('uint8'), True)

    Source: 1-bit SGD (Seide et al. 2014); scales per block: Zheng et al. 2019.
    """
    c = x.astype(jnp.float32)
    if error is not None:
        c = c + error
    u = c if weight is None else c * weight
    magnitude = jnp.abs(u)
    if bits == 1:
        if weight is None:
            count = jnp.float32(u.shape[-1] * u.shape[-2])
        else:
            alive = (weight > 0).astype(jnp.float32)
            count = jnp.maximum(jnp.sum(alive, axis=(-2, -1), keepdims=True), 1.0)
        scale = jnp.sum(magnitude, axis=(-2, -1), keepdims=True) / count
        positive = u >= 0
        planes = pack_bits(positive)[..., None, :]
        decoded = jnp.where(positive, scale, -scale)
    else:
        scale = jnp.max(magnitude, axis=(-2, -1), keepdims=True, initial=0.0)
        top = 2**bits - 1
        unit = u / jnp.where(scale > 0, scale, 1.0)
        level = jnp.clip(jnp.round((unit + 1.0) * (top / 2)), 0.0, float(top))
        code = level.astype(jnp.uint8)
        planes = jnp.stack(
            [pack_bits((code >> jnp.uint8(j)) & jnp.uint8(1)) for j in range(bits)], axis=-2
        )
        decoded = (level * (2.0 / top) - 1.0) * scale
    if weight is None:
        return Packed(planes, scale), c - decoded
    return Packed(planes, scale), jnp.where(weight > 0, c - decoded * inverse(weight), 0.0)


def decode(code: Packed, weight: jax.Array | None = None) -> jax.Array:
    """Decodes to float32 ``(..., 8, lanes)``; 0 where the weight is 0.

    Example:
      >>> code, _ = encode(jnp.array([[[1.0], [-3.0], [2.0], [0.0], [-4.0], [2.0], [1.0], [3.0]]]))
      >>> decode(code)[0, :, 0].tolist()
      [2.0, -2.0, 2.0, 2.0, -2.0, 2.0, 2.0, 2.0]
    """
    value = _levels(code.planes) * code.scale
    return value if weight is None else value * inverse(weight)


def decode_mean(code: Packed, weight: jax.Array | None = None) -> jax.Array:
    """Mean over the leading axis (the senders) of the decoded blocks.

    Senders are added one after the other, so that no decoded copy of all of them
    ever exists: unrolled by 8, a loop beyond.

    Args:
      code: planes ``(senders, ..., bits, lanes)``, scales ``(senders, ..., 1, 1)``.
      weight: float32 ``(..., 8, lanes)``, the weight all senders used.

    Returns:
      float32 ``(..., 8, lanes)``.
    """
    senders = code.planes.shape[0]
    unrolled = senders % _UNROLL or min(senders, _UNROLL)
    total = decode(Packed(code.planes[0], code.scale[0]))
    for i in range(1, unrolled):
        total = total + decode(Packed(code.planes[i], code.scale[i]))

    def add(i: jax.Array, total: jax.Array) -> jax.Array:
        for k in range(_UNROLL):
            one = unrolled + i * _UNROLL + k
            total = total + decode(Packed(*(a[one] for a in code)))
        return total

    if senders > unrolled:
        total = lax.fori_loop(0, (senders - unrolled) // _UNROLL, add, total)
    total = total * (1.0 / senders)
    return total if weight is None else total * inverse(weight)


# ---------------------------------------------------------------- weights


def factored_axes(shape: tuple[int, ...]) -> tuple[int, int]:
    """The (row, column) axes of a leaf seen as matrices: its two largest axes.

    Equal sizes go to the later axes, every other axis stacks independent matrices
    (optax's rule for Adafactor). So stacked layers ``(layers, in, out)``, convolutions
    ``(h, w, in, out)`` and head axes ``(embed, heads, head_dim)`` factor as one expects.

    Example:
      >>> factored_axes((24, 512, 2048)), factored_axes((3, 3, 64, 128)), factored_axes((512, 8, 64))
      ((1, 2), (2, 3), (0, 2))
    """
    order = sorted(range(len(shape)), key=lambda axis: (shape[axis], axis))
    row, col = sorted(order[-2:])
    return row, col


def mean_factors(v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Row and column means of ``v`` (a leaf, ndim >= 2), each with the other axis kept as 1."""
    row, col = factored_axes(v.shape)
    return (
        jnp.mean(v, axis=col, keepdims=True),
        jnp.mean(v, axis=row, keepdims=True),
    )


def weight_factors(row_mean: jax.Array, col_mean: jax.Array, shape: tuple[int, ...]) -> Factors:
    r"""Factors of the variance-shaped weight, ``w_ij = (R_i C_j / mean R)^(-1/2)``.

    Args:
      row_mean, col_mean: float32, from :func:`mean_factors` of the variance.
      shape: shape of the leaf.

    Returns:
      Factors whose product is w; a factor is 0 where its mean is 0 or not finite.
    """
    row_axis, _ = factored_axes(shape)
    mean = jnp.mean(row_mean, axis=row_axis, keepdims=True)

    def rsqrt(x: jax.Array) -> jax.Array:
        alive = (x > 0) & jnp.isfinite(x)
        return jnp.where(alive, lax.rsqrt(jnp.where(alive, x, 1.0)), 0.0)

    return Factors(rsqrt(row_mean), rsqrt(col_mean) * jnp.sqrt(mean))


def weight_of(factors: Factors) -> jax.Array:
    """The weight of a leaf, float32 of the leaf's shape (or ``(1,) * ndim``-broadcast)."""
    return jnp.minimum(factors.row * factors.col, _MAX_WEIGHT)


# ---------------------------------------------------------------- storage


class Int8(NamedTuple):
    """Blocks stored in int8 with one float32 scale per two rows (256 values at most)."""

    values: jax.Array
    scale: jax.Array


def store(blocks: jax.Array, dtype: str) -> jax.Array | Int8:
    """Stores float32 blocks ``(..., 8, lanes)`` in ``dtype``.

    What is lost each time: nothing in ``"float32"``; at most ``2^-8 |x|`` (half a unit
    in the last of 8 significant bits is ``2^-9``) in ``"bfloat16"``; at most
    ``max|x| / 254`` over the two rows that share a scale in ``"int8"``.
    """
    if dtype != "int8":
        return blocks.astype(jnp.dtype(dtype))
    *lead, rows, lanes = blocks.shape
    groups = blocks.reshape(*lead, rows // _INT8_ROWS, _INT8_ROWS, lanes)
    scale = jnp.max(jnp.abs(groups), axis=(-2, -1), keepdims=True, initial=0.0) * (1 / 127)
    unit = groups / jnp.where(scale > 0, scale, 1.0)
    values = jnp.clip(jnp.round(unit), -127.0, 127.0).astype(jnp.int8)
    return Int8(values.reshape(blocks.shape), scale[..., 0])


def load(stored: jax.Array | Int8) -> jax.Array:
    """Inverse of :func:`store`, in float32."""
    if not isinstance(stored, Int8):
        return stored.astype(jnp.float32)
    *lead, rows, lanes = stored.values.shape
    groups = stored.values.astype(jnp.float32).reshape(*lead, -1, _INT8_ROWS, lanes)
    return (groups * stored.scale[..., None]).reshape(*lead, rows, lanes)


def encode_log(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """8-bit logarithmic code of blocks >= 0: 4 levels an octave below the block's maximum.

    Exact zeros stay zero. Others are within a factor 2^(1/8) of the input down to
    2^-63 of the maximum.

    Returns:
      uint8 codes of the shape of ``x`` ``(..., 8, lanes)`` and float32 maxima ``(..., 1, 1)``.
    """
    top = jnp.max(x, axis=(-2, -1), keepdims=True, initial=0.0)
    ratio = x / jnp.where(top > 0, top, 1.0)
    level = 255.0 + jnp.round(_LOG_LEVELS_PER_OCTAVE * jnp.log2(jnp.where(x > 0, ratio, 1.0)))
    return jnp.where(x > 0, jnp.clip(level, 1.0, 255.0), 0.0).astype(jnp.uint8), top


def decode_log(code: jax.Array, top: jax.Array) -> jax.Array:
    """Inverse of :func:`encode_log`."""
    octaves = (code.astype(jnp.float32) - 255.0) * (1 / _LOG_LEVELS_PER_OCTAVE)
    return jnp.where(code > 0, top * jnp.exp2(octaves), 0.0)
