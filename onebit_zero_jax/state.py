"""State of :func:`onebit_zero_jax.zero_shard`."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from onebit_zero_jax import codec, storage, weighting
from onebit_zero_jax import collectives as coll
from onebit_zero_jax.codec import Packed
from onebit_zero_jax.config import ZeroConfig
from onebit_zero_jax.layout import Layout, Leaf
from onebit_zero_jax.phases import CHECKS_PER_WINDOW, Phases
from onebit_zero_jax.weighting import Factors

Tree = Any

# State that belongs to a worker, not to the owner of a chunk: stacked in the mesh's order.
WORKER_FIELDS = ("worker_momentum", "worker_error", "residual", "staleness")


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Run:
    """What a :class:`ZeroState` was made with (no array, part of the tree's structure).

    Attributes:
      zero: the configuration.
      phases: the schedule of dense steps; None where ``inject_hyperparams`` traces it.
    """

    zero: ZeroConfig
    phases: Phases | None


class Log8(NamedTuple):
    """sqrt(v / bc2) of a whole leaf in 8 bits, see :func:`storage.encode_log`."""

    levels: jax.Array
    top: jax.Array


class ChunkState(NamedTuple):
    """State of a compressed leaf on one of N devices; chunks are ``(blocks, 8, lanes)``.

    Worker arrays cover the S chunks of the device's super-chunk (all N of them unless the
    mesh is two-speed), the whole leaf is N chunks.

    Attributes:
      worker_momentum: m_i ``(S * blocks, 8, lanes)`` in ``momentum_dtype``;
        ``gather="params"`` only.
      worker_error: e_i ``(S * blocks, 8, lanes)`` in ``error_dtype``; None without feedback.
      server_error: E of the own chunk, in ``error_dtype``; ``gather="momentum"`` only.
      momentum: ``"params"``: M of the own chunk, float32. ``"momentum"``: codes of M of
        the whole leaf, equal on all devices.
      variance: v of the own chunk, float32; None at stage 0.
      shared: what every device knows of the variance of the whole leaf. Stage 0: v,
        float32. ``"momentum"``: :class:`Log8`. ``"params"``: bit planes of v > 0.
      factors: of the weight, equal on all devices.
      master: float32 parameters of the own chunk; ``gather="params"`` only.
    """

    worker_momentum: Any
    worker_error: Any
    server_error: Any
    momentum: Any
    variance: Any
    shared: Any
    factors: Factors
    master: Any


class DenseState(NamedTuple):
    """State of a dense leaf, float32 of its shape, equal on all devices.

    Attributes:
      momentum: M.
      variance: v, updated on every step.
      master: parameters in float32; ``gather="params"`` only.
    """

    momentum: jax.Array
    variance: jax.Array
    master: Any


class ZeroState(NamedTuple):
    """State of :func:`onebit_zero_jax.zero_shard`.

    Attributes:
      step: int32, updates tried, skipped ones included.
      applied: int32, updates applied.
      variance_updates: int32, updates of the compressed leaves' variance.
      nonfinite: int32 ``(leaves,)``, steps skipped for a non-finite gradient of that leaf.
      residual: float32 ``(1, 2)``, different on each device: weighted square norms of the
        worker error left by the last compressed step, and of what it encoded.
      staleness: float32 ``(1, 3)``, different on each device: weighted L1 norm of what was
        last encoded, its sum over the first 32 codes, and their number.
      starts: int32 ``(3,)``, steps from which refreshes count, see :class:`Phases`.
      norms: float32 ``(8,)``, L1 norms of v at the last checks; ``warmup_steps="auto"`` only.
      leaves: the parameters' tree with a :class:`ChunkState` or :class:`DenseState` in
        place of each leaf.
      inner: state of the inner chain.
      run: what this state was made with (static).
    """

    step: jax.Array
    applied: jax.Array
    variance_updates: jax.Array
    nonfinite: jax.Array
    residual: jax.Array
    staleness: jax.Array
    starts: jax.Array
    norms: jax.Array
    leaves: Tree
    inner: Any
    run: Run


def init_state(
    params: Tree,
    inner: optax.GradientTransformationExtraArgs,
    run: Run,
    error_feedback: bool = True,
) -> ZeroState:
    """State before the first step; inside ``shard_map`` over the data-parallel axes."""
    zero, axes = run.zero, run.zero.axes
    # optax.tree.map_params calls init with a leafless placeholder and no axis bound.
    bound = bool(jax.tree.leaves(params))
    sizes = {axis: coll.axis_size(axis) if bound else 1 for axis in axes}
    layout = Layout.of(params, zero, sizes)
    slow, parts = layout.slow, layout.parts
    gathers_params = zero.gather_mode == "params"

    def zeros(x: jax.Array, leaf: Leaf, blocks: int, dtype: str = "float32") -> Any:
        names = axes + coll.model_axes_of(x, axes)
        shape = jax.ShapeDtypeStruct((blocks, codec.ROWS, leaf.lanes), jnp.float32)
        stored = jax.eval_shape(lambda x: storage.store(x, dtype), shape)
        return jax.tree.map(lambda s: coll.vary(jnp.zeros(s.shape, s.dtype), names), stored)

    def leaf_state(leaf: Leaf, x: jax.Array) -> ChunkState | DenseState:
        if not leaf.compressed:
            nothing = jnp.zeros(leaf.shape, jnp.float32)
            return DenseState(nothing, nothing, x.astype(jnp.float32) if gathers_params else None)
        whole = parts * leaf.blocks
        scale = jnp.zeros((whole, 1, 1), jnp.float32)
        if not zero.stage:
            shared: Any = jnp.zeros((whole, codec.ROWS, leaf.lanes), jnp.float32)
        elif gathers_params:
            shared = jnp.zeros((whole, leaf.lanes), jnp.uint8)
        else:
            shared = Log8(jnp.zeros((whole, codec.ROWS, leaf.lanes), jnp.uint8), scale)
        means = jax.eval_shape(
            weighting.mean_factors, jax.ShapeDtypeStruct(leaf.shape, jnp.float32)
        )
        state = ChunkState(
            worker_momentum=None,
            worker_error=None,
            server_error=None,
            momentum=None,
            variance=zeros(x, leaf, leaf.blocks) if zero.stage else None,
            shared=shared,
            factors=Factors(*(jnp.zeros(m.shape, jnp.float32) for m in means)),
            master=None,
        )
        if error_feedback:
            error = zeros(x, leaf, slow * leaf.blocks, zero.error_dtype)
            state = state._replace(worker_error=error)
        if gathers_params:
            x = x.astype(jnp.float32)
            return state._replace(
                worker_momentum=zeros(x, leaf, slow * leaf.blocks, zero.momentum_dtype),
                momentum=zeros(x, leaf, leaf.blocks),
                master=layout.own(leaf, x, zero.owner_axes),
            )
        return state._replace(
            server_error=zeros(x, leaf, leaf.blocks, zero.error_dtype),
            momentum=Packed(jnp.zeros((whole, int(zero.bits), leaf.lanes), jnp.uint8), scale),
        )

    flat = layout.values(params, "params")
    states = [leaf_state(leaf, x) for leaf, x in zip(layout.leaves, flat, strict=True)]
    masters = layout.unflatten([s.master for s in states])
    count = jnp.zeros((), jnp.int32)
    residual, staleness = jnp.zeros((1, 2), jnp.float32), jnp.zeros((1, 3), jnp.float32)
    if states:
        names = axes + coll.model_axes(axes)
        residual, staleness = coll.vary(residual, names), coll.vary(staleness, names)
    return ZeroState(
        step=count,
        applied=count,
        variance_updates=count,
        nonfinite=jnp.zeros(len(states), jnp.int32),
        residual=residual,
        staleness=staleness,
        starts=jnp.zeros(3, jnp.int32),
        norms=jnp.zeros(CHECKS_PER_WINDOW, jnp.float32),
        leaves=layout.unflatten(states),
        inner=inner.init(masters if gathers_params else params),
        run=run,
    )


def is_zero_state(x: Any) -> bool:
    """Whether ``x`` is a :class:`ZeroState`."""
    return isinstance(x, ZeroState)


def zero_states(opt_state: Any) -> list[ZeroState]:
    """The states of ``zero_shard`` inside a chain, partition or wrapper that hold a leaf at all."""
    nodes = jax.tree.leaves(opt_state, is_leaf=is_zero_state)
    return [x for x in nodes if is_zero_state(x) and x.nonfinite.size]
