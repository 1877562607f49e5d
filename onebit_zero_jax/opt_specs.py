"""PartitionSpecs of the optimizer's state, read from an abstract step; transformations refused."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from onebit_zero_jax import collectives as coll
from onebit_zero_jax.config import ZeroConfig
from onebit_zero_jax.layers import gradient_zeros
from onebit_zero_jax.layout import is_shard
from onebit_zero_jax.phases import Phases
from onebit_zero_jax.state import WORKER_FIELDS, is_zero_state, zero_states
from onebit_zero_jax.wire import known_zeros

P = jax.P
Tree = Any

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


def with_extra_args(tx: Any) -> optax.GradientTransformationExtraArgs:
    """``tx``, taking the extra argument ``phase``; raises if it cannot work in a train step."""
    if isinstance(tx, optax.MultiSteps):
        raise ValueError(f"tx is {_REFUSED[optax.MultiStepsState]}.")
    if not isinstance(tx, optax.GradientTransformation):
        raise ValueError(f"tx must be an optax.GradientTransformation, got {tx!r}.")
    return optax.with_extra_args_support(tx)


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


def opt_specs(
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
        nodes = jax.tree.leaves_with_path(before, is_leaf=lambda x: is_shard(x) or is_zero_state(x))
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
