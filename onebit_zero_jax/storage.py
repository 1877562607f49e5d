"""How float32 blocks are stored between steps: bfloat16, int8, or logarithms in 8 bits."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from onebit_zero_jax.codec import max_abs

_INT8_ROWS = 2
_LOG_LEVELS_PER_OCTAVE = 4


class Int8(NamedTuple):
    """Blocks stored in int8 with one float32 scale per two rows (256 values at most).

    Attributes:
      values: int8 ``(..., 8, lanes)``.
      scale: float32 ``(..., 4, 1)``, the value of one step.
    """

    values: jax.Array
    scale: jax.Array


def store(blocks: jax.Array, dtype: str) -> jax.Array | Int8:
    """Stores float32 blocks in ``dtype``.

    What is lost each time: nothing in ``"float32"``; at most ``2^-8 |x|`` (half a unit
    in the last of 8 significant bits) in ``"bfloat16"``; at most ``max|x| / 254``, half
    a step, over the two rows that share a scale in ``"int8"``, where rows whose maximum
    is below 1e-35 may be lost.

    Args:
      blocks: float32 ``(..., 8, lanes)``.
      dtype: ``"float32"``, ``"bfloat16"`` or ``"int8"``.

    Returns:
      An array of that dtype, or :class:`Int8`.

    Example:
      >>> stored = store(jnp.array([[1.0], [-127.0]] * 4), "int8")
      >>> stored.values[:2, 0].tolist(), stored.scale[:, 0].tolist()
      ([1, -127], [1.0, 1.0, 1.0, 1.0])
    """
    if dtype != "int8":
        return blocks.astype(jnp.dtype(dtype))
    *lead, rows, lanes = blocks.shape
    groups = blocks.reshape(*lead, rows // _INT8_ROWS, _INT8_ROWS, lanes)
    scale = max_abs(groups) * (1 / 127)
    unit = groups / jnp.where(scale > 0, scale, 1.0)
    values = jnp.clip(jnp.round(unit), -127.0, 127.0).astype(jnp.int8)
    return Int8(values.reshape(blocks.shape), scale[..., 0])


def load(stored: jax.Array | Int8) -> jax.Array:
    """Inverse of :func:`store`.

    Args:
      stored: what :func:`store` returned.

    Returns:
      float32 ``(..., 8, lanes)``.

    Example:
      >>> load(store(jnp.array([[0.1], [-127.0]] * 4), "int8"))[:2, 0].tolist()
      [0.0, -127.0]
    """
    if not isinstance(stored, Int8):
        return stored.astype(jnp.float32)
    *lead, rows, lanes = stored.values.shape
    groups = stored.values.astype(jnp.float32).reshape(*lead, -1, _INT8_ROWS, lanes)
    return (groups * stored.scale[..., None]).reshape(*lead, rows, lanes)


def encode_log(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """8-bit logarithmic code of blocks >= 0: 4 levels an octave below the block's maximum.

    Exact zeros stay zero. Others are within a factor 2^(1/8) of the input down to
    2^-63 of the maximum; what is smaller still comes back as 2^-63.5 of the maximum.

    Args:
      x: float32 ``(..., 8, lanes)``, >= 0.

    Returns:
      uint8 codes of the shape of ``x`` and float32 maxima ``(..., 1, 1)``.

    Example:
      >>> code, top = encode_log(jnp.array([[8.0], [4.0], [0.0], [2.0]] * 2))
      >>> code[:4, 0].tolist(), top.tolist()
      ([255, 251, 0, 247], [[8.0]])
    """
    top = jnp.max(x, axis=(-2, -1), keepdims=True, initial=0.0)
    ratio = x / jnp.where(top > 0, top, 1.0)
    level = 255.0 + jnp.round(_LOG_LEVELS_PER_OCTAVE * jnp.log2(jnp.where(x > 0, ratio, 1.0)))
    return jnp.where(x > 0, jnp.clip(level, 1.0, 255.0), 0.0).astype(jnp.uint8), top


def decode_log(code: jax.Array, top: jax.Array) -> jax.Array:
    """Inverse of :func:`encode_log`.

    Args:
      code: uint8 ``(..., 8, lanes)``.
      top: float32 ``(..., 1, 1)``.

    Returns:
      float32 ``(..., 8, lanes)``.

    Example:
      >>> decode_log(jnp.array([[255], [251], [0]], jnp.uint8), jnp.array([[8.0]])).tolist()
      [[8.0], [4.0], [0.0]]
    """
    octaves = (code.astype(jnp.float32) - 255.0) * (1 / _LOG_LEVELS_PER_OCTAVE)
    return jnp.where(code > 0, top * jnp.exp2(octaves), 0.0)
