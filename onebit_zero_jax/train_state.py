"""A :class:`TrainState` of global arrays on a mesh: shardings, init, batches."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from onebit_zero_jax import collectives as coll
from onebit_zero_jax.config import ZeroConfig
from onebit_zero_jax.layers import (
    full_specs,
    gradient_zeros,
    join,
    shard_params,
    shard_shapes,
    without,
)
from onebit_zero_jax.layout import Layout, is_shard
from onebit_zero_jax.phases import Phases
from onebit_zero_jax.state import WORKER_FIELDS, ZeroState, zero_states
from onebit_zero_jax.wire import known_zeros

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


def with_extra_args(tx: Any) -> optax.GradientTransformationExtraArgs:
    """``tx``, taking the extra argument ``phase``; raises if it cannot work in a train step."""
    if isinstance(tx, optax.MultiSteps):
        raise ValueError(f"tx is {_REFUSED[optax.MultiStepsState]}.")
    if not isinstance(tx, optax.GradientTransformation):
        raise ValueError(f"tx must be an optax.GradientTransformation, got {tx!r}.")
    return optax.with_extra_args_support(tx)


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


def _opt_specs(
    tx: optax.GradientTransformation, params: Tree, param_specs: Tree, mesh: Mesh, zero: ZeroConfig
) -> Any:
    """PartitionSpecs of the optimizer state, read from the types of an abstract step.

    State that differs between devices after init or an update on local gradients is
    stacked along axis 0, over model axes first; the rest is replicated.
    """
    tx = with_extra_args(tx)
    axes = set(zero.axes)
    found: list[Any] = []

    def spec(path: Any, before: jax.Array, after: Any) -> P:
        model = coll.model_axes(zero.axes)
        types = (jax.typeof(before), after)
        varying = frozenset().union(*(t.manual_axis_type.varying for t in types))
        varying &= axes.union(model)
        if not varying:
            return P()
        if after.ndim == 0:
            raise ValueError(
                f"optimizer state {jax.tree_util.keystr(path)} is a scalar that each device "
                "would decide from its own gradient, so devices would drift apart. Use links "
                "that all devices agree on: clip_by_global_norm of this package, and the "
                "non-finite guard that zero_shard has built in."
            )
        # Worker state follows the mesh, the owners' chunks their own order.
        worker = any(getattr(key, "name", "") in WORKER_FIELDS for key in path)
        order = zero.axes if worker else zero.axes[::-1]
        return P(tuple(a for a in (*model, *order) if a in varying))

    def gradient_like(x: Any) -> Any:
        if not is_shard(x):
            return coll.vary(x, zero.axes)
        value = gradient_zeros(x, zero, x.value.dtype)
        return dataclasses.replace(x, value=coll.vary(value, zero.axes))

    def probe(params: Tree) -> jax.Array:
        before = tx.init(params)
        grads = jax.tree.map(gradient_like, params, is_leaf=is_shard)
        with _links_of_gradients(before, zero):
            program, out = jax.make_jaxpr(
                lambda grads: tx.update(grads, before, params, phase="dense"), return_shape=True
            )(grads)
        types = [v.aval for v in program.jaxpr.outvars]
        updates, after = jax.tree.unflatten(jax.tree.structure(out), types)
        with _links_of_gradients(before, zero):
            _check_same_shapes(before, after)
        frozen, model = known_zeros(program.jaxpr), coll.model_axes(zero.axes)
        nodes = jax.tree.leaves_with_path(updates, is_leaf=is_shard)
        values = [jax.typeof(x) for x in jax.tree.leaves(params)]
        for (path, u), x, zero_update in zip(nodes, values, frozen, strict=False):
            u, own = (u.value, set(u.over)) if is_shard(u) else (u, set())
            own |= x.manual_axis_type.varying.intersection(model)
            # Zeros made in the image of a gradient (optax.set_to_zero) have its type and shape.
            varies = (axes.union(model) - own) & u.manual_axis_type.varying
            if not zero_update and (varies or u.shape != x.shape):
                raise ValueError(
                    f"the update of parameter {jax.tree_util.keystr(path)} differs between "
                    "devices: it is made from the local gradient or from this device's chunk. "
                    "Put every trained leaf under zero_shard (optax.masked passes the others' "
                    "gradients on: add optax.set_to_zero for them), and no norm inside "
                    "zero_shard with gather='params'."
                )
        found.append(jax.tree_util.tree_map_with_path(spec, before, after))
        return jnp.zeros(())

    specs: dict[str, Any] = {"mesh": mesh, "in_specs": (param_specs,), "out_specs": P()}
    start = jax.shard_map(tx.init, check_vma=False, **specs)
    check_tx(jax.eval_shape(start, params), zero)
    jax.eval_shape(jax.shard_map(probe, **specs), params)
    return found[0]


@contextlib.contextmanager
def _links_of_gradients(before: Any, zero: ZeroConfig) -> Iterator[None]:
    """Says why a link in front fails where gradients have another shape than shards."""
    try:
        yield
    except (TypeError, ValueError) as e:
        nodes = jax.tree.leaves_with_path(before, is_leaf=lambda x: is_shard(x) or _is_zero(x))
        images = [jax.tree_util.keystr(path) for path, x in nodes if is_shard(x)]
        if not zero.flat or not images:
            raise
        raise ValueError(
            f"optimizer state {images[0]} has the shape of a shard, but at stage 3 with "
            f"shard_params_over={zero.over} links in front of zero_shard get gradients of whole "
            "leaves. Put the link inside zero_shard, shard over the fast axis of a two-speed mesh, "
            "or use stage=2."
        ) from e


def _check_same_shapes(before: Any, after: Any) -> None:
    """An update must not change the shapes of the state."""

    def check(path: Any, old: Any, new: Any) -> None:
        if old.shape != new.shape:
            raise ValueError(
                f"optimizer state {jax.tree_util.keystr(path)} has shape {old.shape} after init "
                f"and {new.shape} after an update."
            )

    jax.tree_util.tree_map_with_path(check, before, after)


def _is_zero(x: Any) -> bool:
    return isinstance(x, ZeroState)


# Wrappers that cannot work in a train step, by the state they leave.
_REFUSED = {
    optax.MultiStepsState: (
        "optax.MultiSteps, which hides from the host whether a step sends; use "
        "train_step(..., accumulate=k), which communicates once in k micro-batches"
    ),
    optax.ApplyIfFiniteState: (
        "optax.apply_if_finite, which decides on each device from its own gradient; remove it: "
        "zero_shard skips non-finite steps on all devices (metrics['skipped_steps'])"
    ),
}
_REFUSED_WITH_PARAMS = {
    optax.contrib.ScheduleFreeState: (
        "optax.contrib.schedule_free, whose parameters do not move by zero_shard's updates, while "
        "gather='params' sends what they lack; use ZeroConfig(gather='momentum')"
    ),
}


def check_tx(opt_state: Any, zero: ZeroConfig) -> Phases | None:
    """The schedule of the ZeroStates in ``opt_state``; None unless there is exactly one."""
    refused = {**_REFUSED, **(_REFUSED_WITH_PARAMS if zero.gather_mode == "params" else {})}
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda x: type(x) in refused)
    for x in nodes:
        if type(x) in refused:
            raise ValueError(f"tx holds {refused[type(x)]}.")
    states = zero_states(opt_state)
    if not states:
        raise ValueError(
            "tx holds no zero_shard: build it with onebit_adamw, onebit_adam or zero_shard."
        )
    for s in states:
        if s.run.zero != zero:
            raise ValueError(
                f"zero differs between tx and this call: tx was built with {s.run.zero}, "
                f"got {zero}. Pass the same ZeroConfig to both."
            )
    phases = {s.run.phases for s in states}
    return phases.pop() if len(phases) == 1 else None


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
    opt_specs = _opt_specs(tx, params, specs, mesh, zero)
    return TrainState(
        P(),  # type: ignore[arg-type]
        specs,
        opt_specs,
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

    Example:
      >>> mesh, zero = jax.make_mesh((1,), ("data",)), ZeroConfig()
      >>> from onebit_zero_jax import onebit_adam
      >>> state = init({"w": jnp.ones((16, 16))}, onebit_adam(1e-3, zero=zero), mesh, zero)
      >>> full_params(state)["w"].sum().item()
      256.0
    """
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
