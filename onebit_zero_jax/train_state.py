"""A :class:`TrainState` of global arrays on a mesh: shardings, init, batches."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from onebit_zero_jax.config import ZeroConfig
from onebit_zero_jax.layout import Layout, is_shard
from onebit_zero_jax.opt_specs import opt_specs
from onebit_zero_jax.shards import (
    check_mesh,
    data_size,
    full_specs,
    join,
    shard_params,
    shard_shapes,
    without,
)

P = jax.P
Tree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What a run carries from step to step; global ``jax.Array``\\ s on the mesh.

    Attributes:
      step: int32 scalar, calls of the train step so far (skipped updates included).
      params: the user's tree, replicated over the data-parallel axes; at stage 3 with a
        :class:`Shard` in place of each matrix (:func:`full_params` puts it together).
      opt_state: the optimizer's state; leaves that differ between devices are stacked
        along axis 0, which is sharded over the data-parallel axes: worker state in the
        order of the mesh, the chunks of owners in the order of ``zero.owner_axes``; before
        them over the model axes that cut the parameter.
      model_state: mutable model state such as batch statistics, replicated; or None.
        Leaves that are not floating-point must be updated equally on all devices.
    """

    step: jax.Array
    params: Tree
    opt_state: Any
    model_state: Tree = None


# ---------------------------------------------------------------- checks and shardings


def _check_params(params: Tree, mesh: Mesh, zero: ZeroConfig) -> None:
    if not jax.tree.leaves(params):
        raise ValueError("params is an empty tree: there is nothing to train.")

    def piece(path: Any, x: Any) -> Any:
        sharding = getattr(x, "sharding", None)
        if sharding is None:
            return x
        try:
            shape = sharding.shard_shape(x.shape)
        except ValueError as e:
            raise ValueError(
                f"parameter {jax.tree_util.keystr(path)} of shape {x.shape} does not divide over "
                f"the model axes it is sharded over, {sharding.spec}: {e}"
            ) from e
        return jax.ShapeDtypeStruct(shape, x.dtype)

    layout = Layout.of(jax.tree_util.tree_map_with_path(piece, params), zero, mesh.shape)
    if not any(leaf.size for leaf in layout.leaves):
        shapes = {leaf.path: leaf.shape for leaf in layout.leaves}
        raise ValueError(f"params holds no values, {shapes}: there is nothing to train.")


def state_shardings(
    params: Tree,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    zero: ZeroConfig,
    model_state: Tree = None,
) -> TrainState:
    """Shardings of every array of the :class:`TrainState`, known before any is allocated.

    Args:
      params: parameter tree, arrays or ``jax.ShapeDtypeStruct``.
      tx: optimizer holding a ``zero_shard``.
      mesh: mesh with the data-parallel axis.
      zero: the configuration ``tx`` was built with.
      model_state: as for :func:`init`.

    Returns:
      A TrainState of ``NamedSharding``.

    Raises:
      ValueError: mesh without the axis, empty or non-float tree, ``zero`` not that of ``tx``.

    Example:
      >>> mesh, zero = jax.make_mesh((1,), ("data",)), ZeroConfig()
      >>> from onebit_zero_jax import onebit_adam
      >>> s = state_shardings({"w": jnp.ones((16, 16))}, onebit_adam(1e-3, zero=zero), mesh, zero)
      >>> s.params["w"].spec, s.opt_state.leaves["w"].worker_error.spec
      (P(), P('data',))
    """
    specs = state_specs(params, tx, mesh, zero, model_state)
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def state_specs(
    params: Tree,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    zero: ZeroConfig,
    model_state: Tree,
) -> TrainState:
    """PartitionSpecs of every array of the TrainState; checks all that can be checked."""
    check_mesh(mesh, zero)
    params = shard_shapes(params, mesh, zero)
    _check_params(params, mesh, zero)
    specs = full_specs(params)
    place = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, s))
    params = jax.tree.map(place, params, specs)
    return TrainState(
        P(),  # type: ignore[arg-type]
        specs,
        opt_specs(tx, params, specs, mesh, zero),
        jax.tree.map(lambda x: P(), model_state),
    )


def abstract_state(
    params: Tree,
    tx: optax.GradientTransformation,
    mesh: Any,
    zero: ZeroConfig,
    model_state: Tree = None,
) -> TrainState:
    r"""The TrainState of :func:`init` in ``jax.ShapeDtypeStruct``\ s; allocates nothing.

    Args:
      params, tx, zero, model_state: as in :func:`init`; shapes are enough.
      mesh: mesh, of devices that need not exist, or ``jax.sharding.AbstractMesh``.

    Returns:
      A TrainState whose leaves carry their shardings.

    Example:
      >>> mesh, zero = jax.sharding.AbstractMesh((4096,), ("data",)), ZeroConfig()
      >>> from onebit_zero_jax import onebit_adam
      >>> w = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
      >>> state = abstract_state({"w": w}, onebit_adam(1e-3, zero=zero), mesh, zero)
      >>> state.opt_state.leaves["w"].master.shape
      (16384, 8, 128)
    """
    specs = state_specs(params, tx, mesh, zero, model_state)
    place = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, s))
    shards = jax.tree.map(place, shard_shapes(params, mesh, zero), specs.params)
    opt_state = jax.eval_shape(_start(tx, mesh, specs), shards)
    step: Any = jax.ShapeDtypeStruct((), jnp.int32)
    return jax.tree.map(place, TrainState(step, shards, opt_state, model_state), specs)


def _start(tx: optax.GradientTransformation, mesh: Any, specs: TrainState) -> Any:
    """``tx.init`` on the mesh."""
    return jax.shard_map(
        tx.init,
        mesh=mesh,
        in_specs=(specs.params,),
        out_specs=specs.opt_state,
        check_vma=False,
    )


def init(
    params: Tree,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    zero: ZeroConfig,
    model_state: Tree = None,
) -> TrainState:
    """The state before the first step, on the mesh.

    Arrays are copied: donating the state never touches the user's own. In a
    multi-process run every process passes the same ``params``.

    Args:
      params: tree of floating-point arrays. How a ``NamedSharding`` cuts one over other
        axes of the mesh than the data-parallel ones (tensor parallelism) stays as it is.
      tx: optimizer holding a ``zero_shard``.
      mesh: mesh with the data-parallel axis; Auto or Explicit.
      zero: the configuration ``tx`` was built with.
      model_state: mutable model state (batch statistics), any arrays; or None.

    Returns:
      A :class:`TrainState`.

    Raises:
      ValueError: mesh without the axis, empty tree, a leaf that is not floating-point,
        ``zero`` differs from that of ``tx``.

    Example:
      >>> mesh, zero = jax.make_mesh((1,), ("data",)), ZeroConfig()
      >>> from onebit_zero_jax import onebit_adam
      >>> state = init({"w": jnp.ones((16, 16))}, onebit_adam(1e-3, zero=zero), mesh, zero)
      >>> int(state.step), state.params["w"].shape
      (0, (16, 16))
    """
    if isinstance(mesh, AbstractMesh):
        raise ValueError(f"init needs devices, and {mesh!r} has none: see abstract_state.")
    params, model_state = jax.tree.map(_as_array, (params, model_state))
    jax.tree_util.tree_map_with_path(functools.partial(_check_array, "model_state"), model_state)
    specs = state_specs(params, tx, mesh, zero, model_state)
    whole = NamedSharding(mesh, P())
    params = shard_params(params, mesh, zero)
    copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=whole)
    model_state = copy(jax.device_put(model_state, whole))
    step = jax.device_put(jnp.zeros((), jnp.int32), whole)
    return TrainState(step, params, jax.jit(_start(tx, mesh, specs))(params), model_state)


def _as_array(x: Any) -> Any:
    return x if isinstance(x, jax.Array) else np.asarray(x)


def _check_array(name: str, path: Any, x: Any) -> None:
    try:
        jax.typeof(x)
    except TypeError as e:
        dtype = getattr(x, "dtype", type(x).__name__)
        raise ValueError(
            f"{name}{jax.tree_util.keystr(path)} is {dtype}, which JAX has no arrays of."
        ) from e


def full_params(state: TrainState) -> Tree:
    """The parameters in the user's tree, replicated, for evaluation or export.

    Args:
      state: from :func:`init` or a train step.

    Returns:
      The tree given to :func:`init`, of arrays replicated over the data-parallel axes. Below
      stage 3 they are the next step's input: a step that donates ``state`` consumes them; copy
      what must survive.

    Raises:
      ValueError: ``state`` is no TrainState.

    Example:
      >>> mesh, zero = jax.make_mesh((1,), ("data",)), ZeroConfig()
      >>> from onebit_zero_jax import onebit_adam
      >>> state = init({"w": jnp.ones((16, 16))}, onebit_adam(1e-3, zero=zero), mesh, zero)
      >>> full_params(state)["w"].sum().item()
      256.0
    """
    if not isinstance(state, TrainState):
        raise ValueError(f"full_params takes a TrainState, got {type(state).__name__}.")
    leaves = jax.tree.leaves(state.params, is_leaf=is_shard)
    shards = [x.value for x in leaves if is_shard(x)]
    if not shards:
        return state.params
    mesh = shards[0].sharding.mesh

    def whole(x: Any) -> Any:
        if not is_shard(x):
            return x.sharding
        spec = without(x.value.sharding.spec, x.over)
        return dataclasses.replace(x, value=NamedSharding(mesh, spec))

    shardings = jax.tree.map(whole, state.params, is_leaf=is_shard)
    return jax.jit(join)(jax.jit(lambda x: x, out_shardings=shardings)(state.params))


def shard_batch(batch: Tree, mesh: Mesh, zero: ZeroConfig) -> Tree:
    r"""Puts a batch on the mesh, examples (axis 0) sharded over the data-parallel axes.

    Args:
      batch: tree of arrays. NumPy and single-device arrays are the whole batch in a
        single-process run, and this process's own examples in a multi-process run;
        arrays already sharded over the mesh pass through, ``jax.ShapeDtypeStruct``\ s (of
        the whole batch) get their sharding.
      mesh, zero: as in :func:`init`.

    Returns:
      Global arrays.

    Raises:
      ValueError: axis 0 does not divide over the devices.

    Example:
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> shard_batch({"x": np.ones((4, 2))}, mesh, ZeroConfig())["x"].sharding.spec
      P('data',)
    """
    sharding = NamedSharding(mesh, P(zero.axes))
    parts = data_size(mesh, zero)

    def put(path: Any, x: Any) -> Any:
        if isinstance(x, jax.Array) and x.ndim and x.sharding == sharding:
            return x
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        if isinstance(mesh, AbstractMesh):
            raise ValueError(
                f"batch{jax.tree_util.keystr(path)} is an array, and {mesh!r} has no devices "
                "to put it on: pass jax.ShapeDtypeStruct."
            )
        shape = np.shape(x)
        here = parts
        if jax.process_count() > 1 and not (
            isinstance(x, jax.Array) and not x.is_fully_addressable
        ):
            here = len(sharding.addressable_devices)
        if not shape or not shape[0] or shape[0] % here:
            raise ValueError(
                f"batch{jax.tree_util.keystr(path)} of shape {shape} does not divide over "
                f"{here} devices of axis {zero.axis_name!r}: axis 0 must be a multiple of {here}."
            )
        _check_array("batch", path, x)
        if jax.process_count() > 1 and here != parts:
            return jax.make_array_from_process_local_data(sharding, np.asarray(x))
        return jax.device_put(x, sharding)

    return jax.tree_util.tree_map_with_path(put, batch)
