"""A run of ``optax.adamw`` goes on compressed: :func:`from_adam_state`."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from onebit_zero_jax.config import ZeroConfig
from onebit_zero_jax.layout import Layout
from onebit_zero_jax.resize import decays, refuse_model_axes
from onebit_zero_jax.resize_leaf import Known, convert_leaf
from onebit_zero_jax.resize_side import Parts, Side
from onebit_zero_jax.shards import check_mesh
from onebit_zero_jax.state import ChunkState, DenseState, ZeroState, zero_states
from onebit_zero_jax.train_state import TrainState, init

Tree = Any


def from_adam_state(
    params: Tree,
    adam_state: Any,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    zero: ZeroConfig,
    model_state: Tree = None,
) -> TrainState:
    r"""The state that goes on from a run of ``optax.adam`` or ``optax.adamw``, without warm-up.

    With ``mu``, ``nu`` and ``count`` of optax: M and every m_i become mu, v becomes nu, its
    weights are those of nu, errors are 0, and all counters, those of schedules too, become
    count. Refreshes count from there, so the first step is compressed, whatever
    ``warmup_steps`` says. With ``gather="momentum"`` mu is rounded to its code; what that
    loses goes into the server error.

    Args:
      params: the parameters of that run.
      adam_state: its optimizer state; a ``ScaleByAdamState`` is looked for in it.
      tx: holds one ``zero_shard`` over all parameters: ``onebit_adam``, ``onebit_adamw``
        or ``onebit_lamb``, with b1 and b2 of that run. Other links start anew.
      mesh, zero, model_state: as in :func:`init`.

    Returns:
      A TrainState as :func:`init` makes it.

    Raises:
      NotImplementedError: a parameter is sharded over a model axis.
      ValueError: no ``ScaleByAdamState`` or several, one that has made no step, is not
        finite or is not of these parameters; another number of ``zero_shard`` in ``tx``
        than one; what :func:`init` raises.

    Example:
      >>> from onebit_zero_jax import onebit_adam
      >>> mesh, zero = jax.make_mesh((1,), ("data",)), ZeroConfig()
      >>> params, adam = {"w": jnp.ones((16, 16))}, optax.adam(1e-3)
      >>> _, adam_state = adam.update(params, adam.init(params), params)
      >>> state = from_adam_state(params, adam_state, onebit_adam(1e-3, zero=zero), mesh, zero)
      >>> int(state.step), round(state.opt_state.leaves["w"].momentum.max().item(), 4)
      (1, 0.1)
    """
    adam = _find(adam_state)
    check_mesh(mesh, zero)
    refuse_model_axes(params, zero)
    params = jax.tree.map(lambda x: x if isinstance(x, jax.Array) else np.asarray(x), params)
    layout = Layout.of(params, dataclasses.replace(zero, stage=2, **_NOT_SHARDED), mesh.shape)
    whole = NamedSharding(mesh, jax.P())
    mus, nus = (_moments(name, getattr(adam, name), layout, whole) for name in ("mu", "nu"))
    count = int(np.asarray(adam.count))
    _check_values(layout, mus, nus, count)
    state = init(params, tx, mesh, zero, model_state)
    states = zero_states(state.opt_state)
    is_state = lambda x: isinstance(x, (ChunkState, DenseState))
    structure: Any = jax.tree.structure(states[0].leaves, is_leaf=is_state)
    if len(states) != 1 or structure != layout.treedef:
        raise ValueError(
            f"tx holds {len(states)} zero_shard, and not one over all parameters: its groups and "
            "masks do not tell which of them Adam's moments belong to. Start with init."
        )
    b1, b2 = decays(tx, params, zero)[0]
    known = Known(*(jnp.float32(x) for x in (b1, b2, 1 - b2**count, 1 - b2**count)))
    # Before, one worker holds each leaf: all workers start from the same momentum.
    before, after = (
        Side.of(params, zero, parts).values() for parts in (Parts(1, 1), Parts.of(mesh.shape, zero))
    )
    leaves = []
    current = jax.device_put(layout.flatten(params, "params"), whole)
    targets = layout.flatten(states[0].leaves, "the optimizer state")
    for old, new, *moments, target in zip(before, after, mus, nus, current, targets, strict=True):
        if isinstance(target, ChunkState):
            new = dataclasses.replace(new, feedback=target.worker_error is not None)
        program = jax.jit(
            functools.partial(_convert, old, new),
            out_shardings=jax.tree.map(lambda x: x.sharding, target),
        )
        leaves.append(program(*moments, known))

    def put(x: Any, old: jax.Array) -> jax.Array:
        return jax.device_put(np.asarray(x, old.dtype), old.sharding)

    def counted(x: Any) -> Any:
        """Schedules go on from count."""
        if isinstance(x, ZeroState):
            counters: dict[str, Any] = {n: put(count, getattr(x, n)) for n in _COUNTERS}
            return x._replace(
                **counters,
                starts=put((0, 0, count), x.starts),
                leaves=layout.unflatten(leaves),
                inner=jax.tree.map(counted, x.inner, is_leaf=_has_count),
            )
        if isinstance(x, optax.ScaleByScheduleState):
            return x._replace(count=put(count, x.count))
        if isinstance(x, _INJECTED):
            inner = jax.tree.map(counted, x.inner_state, is_leaf=_has_count)
            return x._replace(count=put(count, x.count), inner_state=inner)
        return x

    opt_state = jax.tree.map(counted, state.opt_state, is_leaf=_has_count)
    return TrainState(put(count, state.step), state.params, opt_state, state.model_state)


_NOT_SHARDED: dict[str, Any] = {"shard_params_over": None, "layer_bits": None}
_COUNTERS = ("step", "applied", "variance_updates")
_INJECTED = (optax.InjectHyperparamsState, optax.InjectStatefulHyperparamsState)


def _has_count(x: Any) -> bool:
    return isinstance(x, (ZeroState, optax.ScaleByScheduleState, *_INJECTED))


def _convert(
    old: Side, new: Side, mu: jax.Array, nu: jax.Array, y: jax.Array, known: Known
) -> ChunkState | DenseState:
    return convert_leaf(old, new, DenseState(mu, nu, None), y, known)[0]


def _find(adam_state: Any) -> optax.ScaleByAdamState:
    is_adam = lambda x: isinstance(x, optax.ScaleByAdamState)
    found = [x for x in jax.tree.leaves(adam_state, is_leaf=is_adam) if is_adam(x)]
    if len(found) != 1:
        raise ValueError(
            f"adam_state must hold one optax.ScaleByAdamState, found {len(found)} in "
            f"{type(adam_state).__name__}: pass the optimizer state of optax.adam or optax.adamw "
            "over all parameters."
        )
    return found[0]


def _moments(name: str, tree: Tree, layout: Layout, whole: NamedSharding) -> list[jax.Array]:
    """Float32, replicated, one for each parameter."""
    values = layout.flatten(tree, f"adam_state.{name}")
    for leaf, x in zip(layout.leaves, values, strict=True):
        shape = getattr(x, "shape", None)
        if shape != leaf.shape or not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(
                f"adam_state.{name} of parameter {leaf.path} is {getattr(x, 'dtype', type(x))} of "
                f"shape {shape}, the parameter has shape {leaf.shape}: it is the state of another "
                "model."
            )
    wide = jax.jit(lambda xs: [x.astype(jnp.float32) for x in xs], out_shardings=whole)
    values = [x if isinstance(x, jax.Array) else np.asarray(x) for x in values]
    return wide(jax.device_put(values, whole))


def _check_values(layout: Layout, mu: list[jax.Array], nu: list[jax.Array], count: int) -> None:
    if count < 1:
        raise ValueError(
            f"adam_state has made {count} steps, so there is no variance to go on from: start "
            "with init."
        )

    def good(m: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.all(jnp.isfinite(m)) & jnp.all((v >= 0) & (v < jnp.inf))

    ok = jax.jit(lambda mu, nu: jnp.stack([good(m, v) for m, v in zip(mu, nu, strict=True)]))
    for leaf, fine in zip(layout.leaves, np.asarray(ok(mu, nu)), strict=True):
        if not fine:
            raise ValueError(
                f"adam_state of parameter {leaf.path} holds values that are not finite, or a "
                "negative nu."
            )
