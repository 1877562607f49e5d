"""Compressed collectives, for use inside ``jax.shard_map``.

On P devices, with ``Q`` the 1-bit code of :mod:`onebit_zero_jax.codec`::

    reduce-scatter  c = x + e;  q = Q(c);  e <- c - q;  all_to_all(q);  owner: mean of the decoded
    all-gather      c = d + E;  q = Q(c);  E <- c - q;  all_gather(q);  all: decoded
    all-reduce      the first, then the second

``e`` is the worker error, ``E`` the server error. What was sent and what was kept
add up to what was put in, to float32 rounding::

    sum_t out_t = sum_t mean_i x_(i,t) - mean_i e_(i,T) - E_T

Planes and scales travel as uint8 in one collective per leg, in rows of 128 bytes.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from onebit_zero_jax import codec
from onebit_zero_jax.codec import Packed

AxisName = str | tuple[str, ...]


def axis_size(axis_name: AxisName) -> int:
    """Number of devices on a bound mesh axis (a tuple is one axis in row-major order).

    Raises:
      ValueError: the axis is not bound here.
    """
    try:
        return lax.axis_size(axis_name)
    except NameError as e:
        raise ValueError(
            f"mesh axis {axis_name!r} is not bound here: call this inside jax.shard_map over a "
            "mesh with that axis, or use onebit_zero_jax.init and train_step."
        ) from e


def _names(axis_name: AxisName) -> set[str]:
    return {axis_name} if isinstance(axis_name, str) else set(axis_name)


def _on_mesh(axis_name: AxisName) -> bool:
    """Whether the axis is a mesh axis in ``shard_map``; else ``vmap(axis_name=...)`` stands in."""
    return _names(axis_name) <= set(jax.sharding.get_abstract_mesh().manual_axes)


def tracks_types(axis_name: AxisName) -> bool:
    """Whether arrays carry the axes they vary over (``shard_map(check_vma=True)``)."""
    if not _on_mesh(axis_name):
        return False
    index = jax.typeof(lax.axis_index(axis_name))
    return bool(index.manual_axis_type.varying)


def vary(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """``x``, typed as different on every device of the axis."""
    if not _on_mesh(axis_name):
        return x
    have: frozenset[str] = jax.typeof(x).manual_axis_type.varying
    missing = tuple(sorted(_names(axis_name) - have))
    return lax.pcast(x, missing, to="varying") if missing else x


def model_axes(axis_name: AxisName) -> tuple[str, ...]:
    """Bound mesh axes of more than one device besides the data-parallel ones."""
    mesh = jax.sharding.get_abstract_mesh()
    others = set(mesh.manual_axes) - _names(axis_name)
    return tuple(a for a in mesh.axis_names if a in others and mesh.shape[a] > 1)


def model_axes_of(x: jax.Array, axis_name: AxisName) -> tuple[str, ...]:
    """Those of :func:`model_axes` that ``x`` is a piece over, by its type."""
    names = model_axes(axis_name)
    varying = jax.typeof(x).manual_axis_type.varying if names else ()
    return tuple(a for a in names if a in varying)


def check_model_axes(axis_name: AxisName) -> None:
    """Raises if types do not tell which leaves are pieces over further mesh axes."""
    names = model_axes(axis_name)
    if names and not tracks_types(axis_name):
        raise ValueError(
            f"mesh axes {names} are bound besides {axis_name!r}, and check_vma=False hides which "
            "parameters are sharded over them: use shard_map(check_vma=True), or train_step."
        )


def share(x: jax.Array, axis_name: AxisName) -> float:
    """1 / number of devices that hold the same ``x`` over :func:`model_axes`."""
    same = set(model_axes(axis_name)) - set(model_axes_of(x, axis_name))
    return 1 / math.prod(lax.axis_size(a) for a in same)


def check_varies(path: str, x: jax.Array, axis_name: AxisName) -> None:
    """Raises if a gradient is typed as equal on all devices, i.e. was already reduced."""
    if axis_size(axis_name) == 1 or not tracks_types(axis_name):
        return
    if not _names(axis_name) <= jax.typeof(x).manual_axis_type.varying:
        raise ValueError(
            f"the gradient of {path} is the same on every device of axis {axis_name!r}: it was "
            "already all-reduced, so there is nothing left to compress. Under "
            "shard_map(check_vma=True) differentiate with respect to "
            f"jax.lax.pcast(params, {axis_name!r}, to='varying'), and do not psum or pmean the "
            "loss or the gradients."
        )


# ---------------------------------------------------------------- one buffer per leg


# A buffer of fewer bytes is one row, without padding, and summed up in one collective.
MIN_IN_ROWS = 4096


def buffer_bytes(total: int) -> int:
    """Bytes of one part of a leg's buffer, from those of the arrays in it: with its padding."""
    return total if total < MIN_IN_ROWS else total + -total % codec.LANES


def _rows(arrays: Sequence[jax.Array], parts: int) -> tuple[int, list[bool]]:
    """How wide the rows of a buffer are, and which arrays fill whole ones."""
    sizes = [x.size * x.dtype.itemsize // parts for x in arrays]
    width = sum(sizes) if sum(sizes) < MIN_IN_ROWS else codec.LANES
    return width, [width > 0 and n % width == 0 for n in sizes]


def _to_bytes(x: jax.Array, parts: int) -> jax.Array:
    if x.dtype != jnp.uint8:
        # One bitcast: XLA would compute a value again for each of its bytes, and with other
        # rounding it would tear.
        x = lax.bitcast_convert_type(x, jnp.uint8)
    return x.reshape(parts, -1)


def _from_bytes(x: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    width = jnp.dtype(dtype).itemsize
    if width == 1:
        return lax.bitcast_convert_type(x.reshape(shape), dtype)
    return lax.bitcast_convert_type(x.reshape(*shape, width), dtype)


def _join(arrays: Sequence[jax.Array], parts: int) -> jax.Array:
    """One buffer of bytes in rows of 128: ``(parts, rows, 128)``.

    What fills no rows comes last, padded together. A buffer ``(parts, bytes)`` TPU pads to
    tiles: more temporaries, and compile time that grows with the leaf.
    """
    width, full = _rows(arrays, parts)
    pairs = list(zip(arrays, full, strict=True))
    rows = [_to_bytes(x, parts).reshape(parts, -1, width) for x, fills in pairs if fills]
    rest = [_to_bytes(x, parts) for x, fills in pairs if not fills]
    if rest:
        tail = jnp.concatenate(rest, axis=1)
        tail = jnp.pad(tail, ((0, 0), (0, -tail.shape[1] % max(1, width))))
        rows.append(tail.reshape(parts, tail.shape[1] // max(1, width), width))
    return jnp.concatenate(rows, axis=1)


def _split(buffer: jax.Array, like: Sequence[jax.Array], parts: int) -> list[jax.Array]:
    """Cuts :func:`_join`'s buffer into arrays ``(senders, len // parts, ...)`` as in ``like``."""
    width, full = _rows(like, parts)
    sizes = [x.size // parts * x.dtype.itemsize for x in like]
    end = sum(n // width for n, fills in zip(sizes, full, strict=True) if fills)
    row, at, tail = 0, 0, buffer[:, end:].reshape(buffer.shape[0], -1)
    out = []
    for x, n, fills in zip(like, sizes, full, strict=True):
        if fills:
            piece = buffer[:, row : row + n // width]
            row += n // width
        else:
            piece = tail[:, at : at + n]
            at += n
        shape = (buffer.shape[0], x.shape[0] // parts, *x.shape[1:])
        out.append(_from_bytes(piece, shape, x.dtype))
    return out


def all_gather(x: jax.Array, axis_name: str, axis: int = 0) -> jax.Array:
    """``lax.all_gather`` along an axis, typed as equal on all devices of the mesh axis."""
    if not _on_mesh(axis_name):
        return lax.all_gather(x, axis_name, axis=axis, tiled=True)
    return lax.all_gather(vary(x, axis_name), axis_name, axis=axis, tiled=True, to="invarying")


def psum(x: jax.Array, axis_name: AxisName, others: tuple[str, ...] = ()) -> jax.Array:
    """``lax.psum`` of a vector; of two data axes, each value crosses the slow one once.

    Over both in one, every device of a TPU slice would send all of it to the other slices.

    Args:
      x: ``(n,)``.
      axis_name: the data-parallel axes, the slow one first.
      others: further axes to sum over.
    """
    *slow, fast = (axis_name,) if isinstance(axis_name, str) else axis_name
    length = axis_size(fast)
    x = vary(x, (*slow, fast, *others))
    if axis_size(tuple(slow)) == 1 or length == 1 or x.size * x.dtype.itemsize < MIN_IN_ROWS:
        return lax.psum(x, (*slow, fast, *others))
    padded = jnp.pad(x, (0, -x.size % length))
    piece = lax.psum_scatter(padded, fast, scatter_dimension=0, tiled=True)
    return all_gather(lax.psum(piece, (*slow, *others)), fast)[: x.size]


def by_model_axes(
    fused: Callable[[list[jax.Array]], list[jax.Array]],
    arrays: Sequence[jax.Array],
    axis_name: AxisName,
) -> list[jax.Array]:
    """``fused(arrays)``, once for the arrays that are pieces over the same model axes.

    A buffer that holds pieces would make pieces of what model axes replicate.
    """
    groups: dict[tuple[str, ...], list[int]] = {}
    for i, x in enumerate(arrays):
        groups.setdefault(model_axes_of(x, axis_name), []).append(i)
    out: dict[int, jax.Array] = {}
    for indices in groups.values():
        out.update(zip(indices, fused([arrays[i] for i in indices]), strict=True))
    return [out[i] for i in range(len(arrays))]


def sum_over_model_axes(arrays: Sequence[jax.Array], axis_name: AxisName) -> list[jax.Array]:
    """Each array summed over the :func:`model_axes` that it differs over."""

    def fused(arrays: list[jax.Array]) -> list[jax.Array]:
        names = model_axes_of(arrays[0], axis_name)
        return lax.psum(arrays, names) if names else arrays

    return by_model_axes(fused, arrays, axis_name)


def exchange(arrays: Sequence[jax.Array], axis_name: AxisName) -> list[jax.Array]:
    """One ``all_to_all``: part p of every array goes to device p.

    Args:
      arrays: each ``(P * k, ...)``, k of its own.

    Returns:
      For each array ``(P, k, ...)``: this device's part, from every sender.
    """
    parts = axis_size(axis_name)
    if not arrays:
        return []
    buffer = _join(arrays, parts)
    buffer = lax.all_to_all(vary(buffer, axis_name), axis_name, 0, 0, tiled=True)
    return _split(buffer, arrays, parts)


def broadcast(arrays: Sequence[jax.Array], axis_name: AxisName) -> list[jax.Array]:
    """One ``all_gather`` an axis: every device gets all arrays, concatenated on axis 0.

    A tuple of axes is one axis in row-major order. Its last axis goes first, so that
    each device sends no more than its own arrays there: name the slow axis last.

    Args:
      arrays: each ``(k, ...)``, k of its own.

    Returns:
      For each array ``(P * k, ...)``, equal on all devices.
    """
    if not arrays:
        return []
    buffer = _join(arrays, 1)
    for name in reversed((axis_name,) if isinstance(axis_name, str) else axis_name):
        buffer = all_gather(buffer, name)
    pieces = _split(buffer, arrays, 1)
    return [p.reshape(p.shape[0] * p.shape[1], *p.shape[2:]) for p in pieces]


def own(blocks: jax.Array, axis_name: AxisName) -> jax.Array:
    """This device's part of ``(P * k, ...)``: rows ``[p k, (p + 1) k)``."""
    k = blocks.shape[0] // axis_size(axis_name)
    start = lax.axis_index(axis_name) * k
    return lax.dynamic_slice_in_dim(blocks, start, k, axis=0)


def place(chunk: jax.Array, axis_name: AxisName) -> jax.Array:
    """Inverse of :func:`own`: ``(P * k, ...)`` that is 0 outside this device's part."""
    k = chunk.shape[0]
    whole = vary(jnp.zeros((axis_size(axis_name) * k, *chunk.shape[1:]), chunk.dtype), axis_name)
    start = lax.axis_index(axis_name) * k
    return lax.dynamic_update_slice_in_dim(whole, chunk, start, axis=0)


# ---------------------------------------------------------------- public collectives


def _check_bits(bits: int) -> None:
    if type(bits) is not int or not 1 <= bits <= 8:
        raise ValueError(f"bits must be an integer from 1 to 8, got {bits!r}.")


def _blocks_and_error(
    x: jax.Array, error: jax.Array | None, parts: int, what: str
) -> tuple[jax.Array, jax.Array | None]:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x must have a floating dtype, got {x.dtype}; cast it first.")
    if error is None:
        return codec.to_blocks(x.astype(jnp.float32), parts), None
    if error.shape != x.shape or error.dtype != jnp.float32:
        raise ValueError(
            f"{what} must be float32 of shape {x.shape}, got {error.dtype} {error.shape}; "
            "pass the error that the previous call returned, or None at the first."
        )
    return codec.to_blocks(x.astype(jnp.float32), parts), codec.to_blocks(error, parts)


def compressed_reduce_scatter(
    x: jax.Array, error: jax.Array | None, axis_name: AxisName, *, bits: int = 1
) -> tuple[jax.Array, jax.Array]:
    """Mean over devices of ``x + error`` at 1 bit per value, one chunk on each device.

    Args:
      x: float array of any shape, different on each device.
      error: worker error, float32 of the shape of ``x``; None for zero.
      axis_name: mesh axis, or a tuple of axes taken as one in row-major order.
      bits: bits per value, 1 to 8.

    Returns:
      ``(chunk, error)``: this device's flat float32 chunk of the flattened mean
      (chunks are equally long; the last ones end in zeros), and the new worker error.

    Raises:
      ValueError: axis not bound, integer ``x``, error of another shape or dtype, bits
        out of range.

    Example:
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> def f(x):
      ...     chunk, error = compressed_reduce_scatter(x, None, "data")
      ...     return chunk + error
      >>> jax.shard_map(f, mesh=mesh, in_specs=jax.P(), out_specs=jax.P("data"))(
      ...     jnp.arange(8.0)).tolist()
      [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]

    Source: 1-bit Adam (Tang et al. 2021), section 4; block scales: Zheng et al. 2019.
    """
    chunk, error_blocks, _ = _reduce(x, error, axis_name, bits)
    return chunk.reshape(-1), codec.from_blocks(error_blocks, x.shape)


def _reduce(
    x: jax.Array, error: jax.Array | None, axis_name: AxisName, bits: int
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns the chunk (blocks), the new error (blocks) and the chunk's padding mask."""
    _check_bits(bits)
    parts = axis_size(axis_name)
    blocks, error_blocks = _blocks_and_error(vary(x, axis_name), error, parts, "error")
    mask = codec.padding_mask(x.size, parts)
    code, new_error = codec.encode(blocks, error_blocks, bits=bits, weight=mask)
    mask = None if mask is None else own(mask, axis_name)
    if x.size:
        code = Packed(*exchange(code, axis_name))
        return codec.decode_mean(code, mask), new_error, mask
    return blocks, new_error, mask


def compressed_all_gather(
    chunk: jax.Array, error: jax.Array | None, axis_name: AxisName, *, bits: int = 1
) -> tuple[jax.Array, jax.Array]:
    """Every device's ``chunk + error`` at 1 bit per value, on every device.

    Args:
      chunk: float array of any shape, this device's part.
      error: server error, float32 of the shape of ``chunk``; None for zero.
      axis_name: mesh axis, or a tuple of axes taken as one in row-major order.
      bits: bits per value, 1 to 8.

    Returns:
      ``(x, error)``: the decoded chunks concatenated along axis 0, float32 and bit for
      bit equal on all devices, and the new server error.

    Raises:
      ValueError: axis not bound, integer ``chunk``, error of another shape or dtype,
        bits out of range.

    Example:
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> f = lambda x: compressed_all_gather(x, None, "data")[0]
      >>> jax.shard_map(f, mesh=mesh, in_specs=jax.P(), out_specs=jax.P())(
      ...     jnp.array([1.0, -3.0])).tolist()
      [2.0, -2.0]

    Source: 1-bit Adam (Tang et al. 2021), section 4.
    """
    _check_bits(bits)
    parts = axis_size(axis_name)
    blocks, error_blocks = _blocks_and_error(vary(chunk, axis_name), error, 1, "error")
    whole, new_error = _gather(
        blocks, error_blocks, axis_name, bits, codec.padding_mask(chunk.size)
    )
    flat = whole.reshape(parts, -1)[:, : chunk.size]
    shape = (parts * chunk.shape[0], *chunk.shape[1:]) if chunk.ndim else (parts,)
    return flat.reshape(shape), codec.from_blocks(new_error, chunk.shape)


def _gather(
    blocks: jax.Array,
    error: jax.Array | None,
    axis_name: AxisName,
    bits: int,
    mask: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    code, new_error = codec.encode(blocks, error, bits=bits, weight=mask)
    return codec.decode(Packed(*broadcast(code, axis_name))), new_error


def compressed_all_reduce(
    x: jax.Array,
    worker_error: jax.Array | None,
    server_error: jax.Array | None,
    axis_name: AxisName,
    *,
    bits: int = 1,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Mean over devices of ``x``, both legs at 1 bit per value, both errors fed back.

    Args:
      x: float array of any shape, different on each device.
      worker_error: float32 of the shape of ``x``; None for zero.
      server_error: float32, flat, as long as the chunk that
        :func:`compressed_reduce_scatter` gives for ``x``; None for zero.
      axis_name: mesh axis, or a tuple of axes taken as one in row-major order.
      bits: bits per value and leg, 1 to 8.

    Returns:
      ``(x, worker_error, server_error)``: float32 of the shape of ``x``, bit for bit
      equal on all devices, and the two new errors.

    Raises:
      ValueError: axis not bound, integer ``x``, an error of another shape or dtype, bits
        out of range.

    Example:
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> def f(x):
      ...     out, e, s = compressed_all_reduce(x, None, None, "data")
      ...     return out, out + e + s[: x.size]
      >>> out, total = jax.shard_map(f, mesh=mesh, in_specs=jax.P(),
      ...     out_specs=(jax.P(), jax.P("data")))(jnp.array([1.0, -3.0]))
      >>> out.tolist(), total.tolist()
      ([2.0, -2.0], [1.0, -3.0])

    Source: 1-bit Adam (Tang et al. 2021), section 4 and algorithm 1.
    """
    chunk, worker_blocks, mask = _reduce(x, worker_error, axis_name, bits)
    if server_error is not None:
        size = chunk.size
        if server_error.shape != (size,) or server_error.dtype != jnp.float32:
            raise ValueError(
                f"server_error must be float32 of shape ({size},) for x of shape {x.shape} on "
                f"{axis_size(axis_name)} devices, got {server_error.dtype} {server_error.shape}; "
                "pass the error that the previous call returned, or None at the first."
            )
        server_error = server_error.reshape(chunk.shape)
    whole, server_blocks = _gather(chunk, server_error, axis_name, bits, mask)
    out = codec.from_blocks(whole, x.shape)
    return out, codec.from_blocks(worker_blocks, x.shape), server_blocks.reshape(-1)
