"""Parameters as stage 3 keeps them: a user's tree with shards, its shapes and specs."""

import dataclasses
import math
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from onebit_zero_jax.config import ZeroConfig
from onebit_zero_jax.layout import Shard, is_compressed, is_shard, shard_axis

P = jax.P
Tree = Any


def check_mesh(mesh: Mesh, zero: ZeroConfig) -> int:
    """Number of devices on the data-parallel axes; raises if the mesh does not fit."""
    if not isinstance(mesh, (Mesh, AbstractMesh)):
        raise ValueError(f"mesh must be a jax.sharding.Mesh, got {mesh!r}.")
    if not isinstance(zero, ZeroConfig):
        raise ValueError(f"zero must be a ZeroConfig, got {zero!r}.")
    if not set(zero.axes) <= set(mesh.axis_names):
        raise ValueError(
            f"the mesh has axes {mesh.axis_names} but zero.axis_name is {zero.axis_name!r}; "
            "pass ZeroConfig(axis_name=...) axes of the mesh."
        )
    return data_size(mesh, zero)


def data_size(mesh: Mesh, zero: ZeroConfig) -> int:
    """Number of devices on the data-parallel axes."""
    return math.prod(mesh.shape[axis] for axis in zero.axes)


def shard_params(params: Tree, mesh: Mesh, zero: ZeroConfig) -> Tree:
    """Parameters on the mesh as stage 3 keeps them; below stage 3 replicated.

    Args:
      params: the user's tree of arrays.
      mesh, zero: as in :func:`onebit_zero_jax.init`.

    Returns:
      The tree, copied, with a :class:`Shard` in place of each matrix that is large enough.

    Raises:
      ValueError: mesh without the axes; a matrix that model axes shard along every dim.

    Example:
      >>> import numpy as np
      >>> mesh, zero = jax.make_mesh((8,), ("data",)), ZeroConfig(stage=3)
      >>> shards = shard_params({"w": np.ones((16, 62)), "b": np.ones(62)}, mesh, zero)
      >>> shards["w"].value.shape, shards["w"].value.sharding.spec, shards["b"].shape
      ((16, 64), P(None, 'data'), (62,))
    """
    check_mesh(mesh, zero)
    shapes = shard_shapes(params, mesh, zero)
    place = lambda spec: NamedSharding(mesh, spec)
    shardings = jax.tree.map(place, full_specs(shapes))
    # Each leaf as it is sharded over model axes, whole over the data-parallel ones.
    whole = jax.tree.map(lambda x: place(model_spec(x, mesh, zero)), params)

    def cut(params: Tree) -> Tree:
        def one(like: Any, x: jax.Array) -> Any:
            if not is_shard(like):
                return jnp.copy(x)
            padding = [(0, want - have) for want, have in zip(like.value.shape, x.shape)]
            return dataclasses.replace(like, value=jnp.pad(x, padding))

        return jax.tree.map(one, shapes, params, is_leaf=is_shard)

    # jit may hand its inputs through as outputs; a copy inside it never aliases them.
    return jax.jit(cut, out_shardings=shardings)(jax.device_put(params, whole))


def shard_shapes(params: Tree, mesh: Mesh | AbstractMesh, zero: ZeroConfig) -> Tree:
    """The tree of :func:`shard_params` in ShapeDtypeStructs; shards may be cut already."""
    devices = math.prod(mesh.shape[a] for a in zero.axes)
    shards = math.prod(mesh.shape[a] for a in zero.over)

    def like(x: Any, shape: Any) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, model_spec(x, mesh, zero))
        floating = jnp.issubdtype(x.dtype, jnp.floating)  # float64 is float32 without x64
        dtype = jax.dtypes.canonicalize_dtype(x.dtype) if floating else x.dtype
        return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=sharding)

    def one(path: Any, x: Any) -> Any:
        if is_shard(x):
            return dataclasses.replace(x, value=like(x.value, x.value.shape))
        if not hasattr(x, "dtype"):
            return x  # for Layout.of to refuse
        whole = like(x, x.shape)
        spec = whole.sharding.spec
        pieces = math.prod(mesh.shape[a] for a in names_of(spec))
        if zero.stage < 3 or not is_compressed(whole.shape, devices * pieces):
            return whole
        ndim = len(whole.shape)
        free = [a - ndim for a, entry in enumerate(_entries(spec, ndim)) if entry is None]
        if not free:
            raise ValueError(
                f"parameter {jax.tree_util.keystr(path)} of shape {whole.shape} is sharded over "
                f"model axes along every dim ({spec}); stage 3 needs one that is not."
            )
        axis = shard_axis(whole.shape, shards, free, zero.tiles)
        shape = list(whole.shape)
        shape[axis] += -shape[axis] % shards
        model = tuple(_entries(spec, ndim)) if names_of(spec) else ()
        return Shard(like(x, shape), axis, whole.shape[axis], zero.over, model)

    return jax.tree_util.tree_map_with_path(one, params, is_leaf=is_shard)


def names_of(spec: P) -> set[str]:
    """Mesh axes that a PartitionSpec names."""
    entries = [e if isinstance(e, tuple) else (e,) for e in spec if e is not None]
    return {name for e in entries for name in e}


def _entries(spec: P, ndim: int) -> list[Any]:
    """Of a PartitionSpec, one for each axis."""
    return [*spec, *[None] * (ndim - len(spec))]


def model_spec(x: Any, mesh: Mesh | AbstractMesh, zero: ZeroConfig) -> P:
    """How a parameter is sharded over mesh axes other than the data-parallel ones.

    Raises:
      ValueError: it is sharded over an axis that the mesh lacks.
    """
    sharding = getattr(x, "sharding", None)
    spec = sharding.spec if isinstance(sharding, NamedSharding) else P()
    missing = names_of(spec) - {*zero.axes, *mesh.axis_names}
    if missing:
        raise ValueError(
            f"a parameter of shape {tuple(x.shape)} is sharded as {spec}, over axes that the "
            f"mesh {mesh.axis_names} lacks; put it on this mesh, or pass a NumPy array."
        )
    return without(spec, {*zero.axes, *(a for a, n in mesh.shape.items() if n == 1)})


def model_sharding(x: Any, data_axes: Collection[str]) -> str:
    """In words, how a parameter of a TrainState is sharded over model axes; empty if it is not."""
    sharding = getattr(x.value if is_shard(x) else x, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return ""
    spec = without(sharding.spec, data_axes)
    sizes = {a: n for a, n in sharding.mesh.shape.items() if a in names_of(spec)}
    return f"{spec} of {sizes}" if sizes else ""


def without(spec: P, names: Collection[str]) -> P:
    """A PartitionSpec without some mesh axes, and without empty entries at its end."""
    entries: list[Any] = []
    for entry in spec:
        entry = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
        kept = tuple(a for a in entry if a not in names)
        entries.append(kept if len(kept) > 1 else kept[0] if kept else None)
    while entries and entries[-1] is None:
        entries.pop()
    return P(*entries)


def full_specs(shapes: Tree) -> Tree:
    """PartitionSpecs of parameters as a TrainState keeps them, from :func:`shard_shapes`."""

    def one(x: Any) -> Any:
        if not is_shard(x):
            return getattr(getattr(x, "sharding", None), "spec", P())
        spec = _entries(x.value.sharding.spec, len(x.value.shape))
        spec[x.axis] = x.over if len(x.over) > 1 else x.over[0]
        return dataclasses.replace(x, value=without(P(*spec), ()))

    return jax.tree.map(one, shapes, is_leaf=is_shard)


def device_shapes(params: Tree, mesh: Mesh | AbstractMesh, zero: ZeroConfig) -> Tree:
    """The tree of :func:`shard_shapes` as one device holds it."""

    def one(x: Any) -> Any:
        if not is_shard(x):
            return x
        shape = list(x.value.shape)
        shape[x.axis] //= math.prod(mesh.shape[a] for a in x.over)
        return dataclasses.replace(x, value=jax.ShapeDtypeStruct(tuple(shape), x.value.dtype))

    return jax.tree.map(one, shard_shapes(params, mesh, zero), is_leaf=is_shard)


def whole_shapes(params: Tree) -> Tree:
    """The user's tree in ShapeDtypeStructs, from parameters as a TrainState keeps them."""

    def one(x: Any) -> Any:
        if not is_shard(x):
            return jax.ShapeDtypeStruct(x.shape, x.dtype)
        shape = list(x.value.shape)
        shape[x.axis] = x.size
        return jax.ShapeDtypeStruct(tuple(shape), x.value.dtype)

    return jax.tree.map(one, params, is_leaf=is_shard)


def shard_specs(params: Tree) -> Tree:
    """The part of :func:`full_specs` that names data-parallel axes."""

    def one(x: Any) -> Any:
        if not is_shard(x):
            return P()
        over = x.over if len(x.over) > 1 else x.over[0]
        spec = [None] * (len(x.value.shape) + x.axis) + [over]
        return dataclasses.replace(x, value=P(*spec))

    return jax.tree.map(one, params, is_leaf=is_shard)


def join(params: Tree) -> Tree:
    """Inverse of :func:`shard_params` on global arrays: shards without their padding."""

    def one(x: Any) -> Any:
        if not is_shard(x):
            return x
        return lax.slice_in_dim(x.value, 0, x.size, axis=x.value.ndim + x.axis)

    return jax.tree.map(one, params, is_leaf=is_shard)
