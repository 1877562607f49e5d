"""Stage 3: parameters as shards, gathered for one layer at a time.

``layer(fn)`` gathers the shards of a layer, runs it and drops them; the backward pass
gathers them again, differentiates and drops them. What becomes of the gradient depends
on the axes that parameters are sharded over. Over the fast axis: it is reduced over
that axis and each device keeps the gradient of its shard. Over every axis: nothing is
reduced, the local gradient comes out. Either way ``zero_shard`` sends codes of it over
the slow axis when the backward pass is done.
"""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from onebit_zero_jax import codec
from onebit_zero_jax import collectives as coll
from onebit_zero_jax.codec import Packed
from onebit_zero_jax.config import ZeroConfig
from onebit_zero_jax.layout import NotAnArray, Shard, is_shard
from onebit_zero_jax.shards import names_of

P = jax.P
Tree = Any

# Primitives that copy or convert: cheap to run again, and parameters pass through them.
_COPIES = frozenset(
    {
        *("all_gather", "all_gather_invariant", "bitcast_convert_type", "broadcast_in_dim"),
        *("concatenate", "convert_element_type", "copy", "copy_p", "custom_vmap_call"),
        *("dynamic_slice", "expand_dims", "pad", "reshape", "rev", "slice", "split"),
        *("squeeze", "transpose"),
    }
)
_severed: contextvars.ContextVar[bool] = contextvars.ContextVar("severed", default=False)
_marked: contextvars.ContextVar[list[bool] | None] = contextvars.ContextVar("marked", default=None)


@dataclasses.dataclass(frozen=True)
class _How:
    """How a shard is gathered, and what its gradient is.

    Attributes:
      axis, size, over, model: of the :class:`Shard`.
      dtype: that the loss computes in.
      bits: of a gathered value, see ``ZeroConfig.layer_bits``.
      reduce: the gradient is the mean over ``over``, of the shard; else it is the local
        gradient of the whole parameter, with the shards' padding.
    """

    axis: int
    size: int
    over: tuple[str, ...]
    model: tuple[Any, ...]
    dtype: Any
    bits: int | None
    reduce: bool

    def on_pieces(self, fn: Callable[[jax.Array], jax.Array]) -> Callable[..., jax.Array]:
        """``fn`` on the piece of an array that a device has over model axes.

        A collective over some axes alone makes XLA gather its operand over all others.
        """

        def run(x: jax.Array) -> jax.Array:
            spec = P(*self.model[max(0, len(self.model) - x.ndim) :])
            if not names_of(spec):
                return fn(x)
            mapped = jax.shard_map(
                fn,
                in_specs=spec,
                out_specs=spec,
                axis_names=names_of(spec),
                check_vma=coll.tracks_types(self.over),
            )
            return mapped(x)

        return run


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["value", "slot"], meta_fields=["how"]
)
@dataclasses.dataclass(frozen=True)
class _Shard(NotAnArray):
    """A shard inside a loss; ``slot`` (zeros) takes the local gradient where that is wanted."""

    value: Any
    slot: Any
    how: _How

    @property
    def _advice(self) -> str:  # type: ignore[override]
        return (
            f"a sharded parameter (shard of shape {self.value.shape}) was used outside layer(fn): "
            "a loss that marks layers must pass every one to a layer, in its first argument."
        )


def _is_shard(x: Any) -> bool:
    return isinstance(x, _Shard)


def _has_shards(tree: Tree) -> bool:
    return any(map(_is_shard, jax.tree.leaves(tree, is_leaf=_is_shard)))


def _whole(value: jax.Array, how: _How) -> jax.Array:
    """The parameter in the loss's dtype, from every device's shard."""
    return how.on_pieces(functools.partial(_whole_piece, how=how))(value)


def _whole_piece(value: jax.Array, how: _How) -> jax.Array:
    axis, parts = value.ndim + how.axis, coll.axis_size(how.over)
    with jax.named_scope("layer_gather"):
        if how.bits == 8:
            code, _ = codec.encode(codec.to_blocks(value), bits=8)
            # One primitive, for the sake of _keeps.
            decode = jax.custom_batching.sequential_vmap(lambda *code: codec.decode(Packed(*code)))
            decoded = decode(*coll.broadcast(code, how.over))
            shards = decoded.reshape(parts, -1)[:, : value.size].reshape(parts, *value.shape)
            shape = (*value.shape[:axis], parts * value.shape[axis], *value.shape[axis + 1 :])
            whole = jnp.moveaxis(shards, 0, axis).reshape(shape)
        else:
            # Unsigned integers: XLA on CPU widens collectives of bfloat16.
            wire = jnp.dtype(jnp.bfloat16 if how.bits == 16 else how.dtype)
            whole = lax.bitcast_convert_type(value.astype(wire), f"uint{8 * wire.itemsize}")
            for name in reversed(how.over):
                whole = coll.all_gather(whole, name, axis)
            whole = lax.bitcast_convert_type(whole, wire)
        return lax.slice_in_dim(whole.astype(how.dtype), 0, how.size, axis=axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(how: _How, value: jax.Array, slot: Any) -> jax.Array:
    return _whole(value, how)


def _gather_fwd(how: _How, value: jax.Array, slot: Any) -> tuple[jax.Array, jax.Array]:
    # An empty array tells the backward pass the dtype.
    return _whole(value, how), jnp.zeros(0, value.dtype)


def _gather_bwd(how: _How, like: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, Any]:
    axis, parts = cotangent.ndim + how.axis, coll.axis_size(how.over)
    padding = [(0, 0)] * cotangent.ndim
    padding[axis] = (0, -how.size % parts)
    local = jnp.pad(cotangent.astype(jnp.float32), padding)
    if not how.reduce:
        part = lax.slice_in_dim(local, 0, local.shape[axis] // parts, axis=axis)
        return jnp.zeros_like(part, like.dtype), local
    with jax.named_scope("fast_leg"):
        (name,) = how.over
        scatter = functools.partial(
            lax.psum_scatter, axis_name=name, scatter_dimension=axis, tiled=True
        )
        mean = how.on_pieces(scatter)(local) / parts
    return mean.astype(like.dtype), None


_gather.defvjp(_gather_fwd, _gather_bwd)


def gather(tree: Tree) -> Tree:
    """``tree`` with the whole parameter in place of each shard, inside a loss."""

    def whole(x: Any) -> Any:
        if not _is_shard(x):
            return x
        if _severed.get():
            shape = list(x.value.shape)
            shape[x.how.axis] = x.how.size
            return jnp.zeros(shape, x.how.dtype)
        return _gather(x.how, x.value, x.slot)

    return jax.tree.map(whole, tree, is_leaf=_is_shard)


def layer(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A layer of a loss whose parameters stage 3 gathers for this layer alone.

    ``layer(fn)(params, *args)`` is ``fn(params, *args)``. At stage 3 the parameters are
    gathered before ``fn`` runs and dropped after it, in the forward and in the
    backward pass: ``fn`` keeps its activations for the backward pass but not its
    parameters. Below stage 3 it changes nothing. It goes into Python loops, into ``lax.scan``
    over stacked layers (leading axes of a leaf may be sliced off, but for the axis that
    is sharded) and under ``jax.checkpoint``.

    A loss that marks layers uses every matrix inside of one; vectors and small leaves
    are replicated and may be used anywhere. Gather tied parameters once: use both
    of their places in one layer, or pay a gather for each.

    Args:
      fn: ``fn(params, *args, **kwargs)``, with ``params`` any tree.

    Returns:
      A function of the same arguments, ``params`` with or without shards.

    Raises:
      ValueError: ``fn`` is not callable.

    Example:
      >>> block = layer(lambda p, x: jnp.tanh(x @ p["w"]))
      >>> block({"w": jnp.zeros((2, 2))}, jnp.ones((1, 2))).tolist()
      [[0.0, 0.0]]

    Source: ZeRO stage 3 (Rajbhandari et al. 2020).
    """

    if not callable(fn):
        raise ValueError(f"layer takes a function fn(params, *args), got {fn!r}.")

    @functools.wraps(fn)
    def run(params: Tree, *args: Any, **kwargs: Any) -> Any:
        marked = _marked.get()
        if marked is not None:
            marked.append(True)
        if not _has_shards(params):
            return fn(params, *args, **kwargs)
        inside = jax.checkpoint(lambda p: fn(gather(p), *args, **kwargs), policy=_keeps)
        return inside(params)

    return run


def _keeps(primitive: Any, *_: Any, **__: Any) -> bool:
    """What the backward pass finds again: results of arithmetic, no parameters and no copies."""
    return primitive.name not in _COPIES


@contextlib.contextmanager
def severed() -> Iterator[None]:
    """Layers get zeros: what a loss still depends on shards by, it does outside of layers."""
    token = _severed.set(True)
    try:
        yield
    finally:
        _severed.reset(token)


@contextlib.contextmanager
def marked_layers() -> Iterator[list[bool]]:
    """Collects one entry for every call of a marked layer while a loss is traced."""
    calls: list[bool] = []
    token = _marked.set(calls)
    try:
        yield calls
    finally:
        _marked.reset(token)


def wrap(params: Tree, zero: ZeroConfig, dtype: Any) -> Tree:
    """Parameters of a :class:`TrainState` as a loss is differentiated by, in ``shard_map``.

    Args:
      params: as one device holds them.
      zero: the configuration.
      dtype: that the loss computes in; None for the parameters' own.
    """

    def put(x: Any) -> Any:
        if not is_shard(x):
            return x
        cut = (x.axis, x.size, x.over, x.model)
        how = _How(*cut, dtype or x.value.dtype, zero.layer_bits, reduce=not zero.flat)
        slot = gradient_zeros(x, zero) if zero.flat else None
        return _Shard(x.value, slot, how)

    return jax.tree.map(put, params, is_leaf=is_shard)


def into_loss(params: Tree, dtype: Any, layered: bool) -> Tree:
    """What a loss takes, from :func:`wrap`'s: floats in ``dtype``, all gathered or by layers."""
    if dtype is not None:
        cast = lambda x: x if _is_shard(x) else x.astype(dtype)
        params = jax.tree.map(cast, params, is_leaf=_is_shard)
    return params if layered else gather(params)


def unwrap(grads: Tree, params: Tree) -> Tree:
    """Gradients by what :func:`wrap` returned, as ``zero_shard`` takes them."""

    def take(x: Any, g: Any) -> Any:
        if not is_shard(x):
            return g
        return dataclasses.replace(x, value=g.value if g.slot is None else g.slot)

    return jax.tree.map(take, params, grads, is_leaf=is_shard)


def gradient_zeros(shard: Shard, zero: ZeroConfig, dtype: Any = jnp.float32) -> jax.Array:
    """Zeros in the image of the gradient that ``zero_shard`` takes for a shard."""
    zeros = jnp.zeros_like(shard.value, dtype)
    if not zero.flat:
        return zeros
    padding = [(0, 0)] * zeros.ndim
    padding[shard.axis] = (0, (coll.axis_size(shard.over) - 1) * zeros.shape[shard.axis])
    return jnp.pad(zeros, padding)
