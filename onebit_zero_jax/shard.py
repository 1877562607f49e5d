"""``zero_shard``: reduce leg, an optax chain on the owner's chunk, gather leg.

A gradient walks down this file in the order in which it happens: local gradient ->
local momentum -> code -> reduce leg -> owner's update -> gather leg -> updates. It all
runs inside ``jax.shard_map``. Lists below run over the leaves of the parameter tree.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from onebit_zero_jax import codec, storage, weighting
from onebit_zero_jax import collectives as coll
from onebit_zero_jax.config import ZeroConfig, check_decay, check_number
from onebit_zero_jax.layout import Layout
from onebit_zero_jax.legs import (
    Owned,
    Step,
    adam_moments,
    gather_momentum,
    gather_params,
    leaf_weight,
    reduce_compressed,
    reduce_dense,
    reduce_dense_leaves,
    reduce_refresh,
)
from onebit_zero_jax.phases import Phases
from onebit_zero_jax.state import (
    ChunkState,
    DenseState,
    Run,
    Tree,
    ZeroState,
    init_state,
)

Phase = Literal["dense", "compressed"]

# Compressed steps after warm-up that later ones are compared with.
REFERENCE_CODES = 32
# 16 intervals of refreshes must fit int32.
_MAX_STEPS = 2**27


def zero_shard(
    inner: optax.GradientTransformation,
    *,
    zero: ZeroConfig,
    b1: Any = 0.9,
    b2: Any = 0.999,
    warmup_steps: Any = 100,
    refresh: Any = 32,
    learning_rate: Callable[[Any], Any] | None = None,
    momentum_decay: Any = None,
    bias_correction: bool = True,
    error_feedback: bool = True,
) -> optax.GradientTransformationExtraArgs:
    r"""Runs an optax chain on ZeRO shards, with 1-bit momentum between devices.

    On device i with local gradient g_i, and for the owner of a chunk M, v, x::

        m_i <- b1 prev + (1 - b1) g_i     prev: own m_i ("params") or decoded M ("momentum")
        dense step:       M <- b1 M + (1 - b1) mean g,  v <- b2 v + (1 - b2) (mean g)^2
        compressed step:  q_i, e_i <- encode(m_i + e_i, weight w),  M <- mean_i decode(q_i)
        refresh:          v of a dense step; M of a compressed step with gather="params"
        gather="params":    owner: x <- x + inner(M / bc1);  all: y <- y + Q(x - y)
        gather="momentum":  all: M <- decode(Q(M + E)),  y <- y + inner(M / bc1)

    ``inner`` gets the bias-corrected momentum as updates, the master parameters, and
    two extra arguments. ``rms`` is per leaf ``max(sqrt(v / bc2), 0.1 / w)``, the root mean
    square of the gradient. ``leaf_sums`` is a function for statistics of whole leaves: it
    takes a tree with an array for each leaf, say a square norm, and adds it up over the
    pieces of that leaf in one ``psum``. With ``gather="params"`` it sees the own chunk
    ``(blocks, 8, lanes)`` of compressed leaves, with ``"momentum"`` whole leaves; the tree
    has the parameters' structure in both. Second moments that ``inner`` would take of
    the momentum are not Adam's: use ``rms``.

    Vectors, scalars and small leaves stay dense: reduced in float32, with a live v.
    A coordinate whose gradient has always been exactly 0 (v = 0) has weight 0: nothing
    is sent for it and a coded gather leg leaves it as it is.

    A non-finite gradient anywhere (or one beyond 2^62, about 5e18) makes every device
    skip: the updates are zero and all state but the counters ``step`` and ``nonfinite``
    stays as it was.

    Args:
      inner: optax transformation. Nothing may follow ``zero_shard`` in a chain.
      zero: axis, stage and codes.
      b1: decay of the momentum, in [0, 1).
      b2: decay of the variance that shapes the weights, in [0, 1).
      warmup_steps: dense steps before the variance is frozen, at least 1; no fewer than
        the learning-rate warm-up. ``"auto"``: until v has settled, that is until its L1 norm
        over all matrices, of now and of max(100, 1 / (1 - b2)) steps ago (rounded up to
        eighths of 16 steps), differ by 4 % at most, and ``learning_rate`` has stopped rising.
      refresh: steps from one dense variance refresh to the next, doubling after every
        16 refreshes; None for a variance frozen after warm-up.
      learning_rate: the schedule that ``inner`` follows, if any, a function of the number
        of steps. It is not applied here: where it begins to rise after warm-up, the step
        is dense and refreshes count from there (unless ``refresh`` is None).
      momentum_decay: decay of the momentum that m_i and M keep, in [b1, 1), where it is
        not b1: what is sent and applied is then ``c = b1 m + (1 - b1) g`` (Lion).
        ``gather="params"`` only. None for b1.
      bias_correction: whether ``inner`` gets M / bc1; else M.
      error_feedback: whether a device adds what its last code of the reduce leg lost to the
        next (e_i). It makes sums over steps right at the cost of noise in each, which
        an update that takes signs cannot average. False for ``gather="params"`` only.

    Returns:
      A transformation for use inside ``jax.shard_map`` over the data-parallel axes:
      ``init(params)`` and ``update(local_gradients, state, params, phase=None)``. The
      updates are equal on all devices. ``phase`` ("dense" or "compressed") fixes the
      phase while tracing, so that the program holds that phase alone; None picks it on
      the device with ``lax.cond``.

    Raises:
      ValueError: a hyperparameter out of range (here); axis not bound, non-float
        leaves, changed shapes, gradients already reduced (at ``init`` and ``update``).

    Example:
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> tx = zero_shard(optax.sgd(0.5), zero=ZeroConfig(), b1=0.0)
      >>> @jax.shard_map(mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
      ... def update(params):
      ...     updates, _ = tx.update({"x": jnp.ones(2)}, tx.init(params), params)
      ...     return optax.apply_updates(params, updates)
      >>> update({"x": jnp.ones(2)})["x"].tolist()
      [0.5, 0.5]

    Source: 1-bit Adam (Tang et al. 2021); ZeRO (Rajbhandari et al. 2020); 0/1 Adam (Lu et
      al. 2022) for the refresh schedule.
    """
    if not isinstance(zero, ZeroConfig):
        raise ValueError(f"zero must be a ZeroConfig, got {zero!r}.")
    if not isinstance(inner, optax.GradientTransformation):
        raise ValueError(f"inner must be an optax.GradientTransformation, got {inner!r}.")
    b1, b2 = check_decay("b1", b1), check_decay("b2", b2)
    if not (isinstance(warmup_steps, str) and warmup_steps == "auto"):
        warmup_steps = _check_steps("warmup_steps", warmup_steps, " or 'auto'")
    if learning_rate is not None and not callable(learning_rate):
        raise ValueError(
            f"learning_rate must be a schedule or None, got {learning_rate!r}: it only says where "
            "the rate rises, inner applies it."
        )
    if refresh is not None:
        refresh = _check_steps("refresh", refresh)
    if momentum_decay is not None:
        momentum_decay = _check_momentum_decay(momentum_decay, b1, zero)
    for name, value in (("bias_correction", bias_correction), ("error_feedback", error_feedback)):
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, got {value!r}.")
    if not error_feedback and zero.gather_mode == "momentum":
        raise ValueError(
            "error_feedback=False needs gather='params': with gather='momentum' (default of stages "
            "0 and 1) the momentum would restart from codes and lose what they lose."
        )
    inner = optax.with_extra_args_support(inner)
    phases = Phases(warmup_steps, refresh)
    traced = isinstance(warmup_steps, jax.Array) or isinstance(refresh, jax.Array)
    run = Run(zero, None if traced else phases)

    def init(params: Tree) -> ZeroState:
        return init_state(params, inner, run, error_feedback)

    def update(
        updates: Tree,
        state: ZeroState,
        params: Tree | None = None,
        *,
        phase: Phase | None = None,
        **extra_args: Any,
    ) -> tuple[Tree, ZeroState]:
        if params is None:
            raise ValueError(
                "zero_shard needs the parameters: call update(gradients, state, params)."
            )
        if phase not in (None, "dense", "compressed"):
            raise ValueError(f"phase must be 'dense', 'compressed' or None, got {phase!r}.")
        layout = Layout.of(params, zero, {axis: coll.axis_size(axis) for axis in zero.axes})
        if not layout.leaves:
            return updates, state
        coll.check_model_axes(zero.axes)
        grads = layout.values(updates, "the gradient tree")
        _check(layout, grads, state, zero.axis_name)
        means, nonfinite = reduce_dense_leaves(layout, grads, zero.axes)
        ok = jnp.sum(nonfinite) == 0

        def step(dense: bool) -> tuple[Tree, ZeroState]:
            with jax.named_scope("phase_dense" if dense else "phase_compressed"):
                return walk(dense)

        def walk(dense: bool) -> tuple[Tree, ZeroState]:
            applied = (state.applied + 1).astype(jnp.float32)
            variance_updates = (state.variance_updates + int(dense)).astype(jnp.float32)
            # Until the first compressed step M is exact, and Adam's denominator is right.
            exact = zero.gather_mode == "params" and (
                phases.in_warmup_traced(state.step, state.starts) | (state.variance_updates == 0)
            )
            if not bias_correction:
                bc1: Any = 1.0
            elif momentum_decay is None:
                bc1 = 1 - b1**applied
            else:
                bc1 = 1 - b1 * momentum_decay ** (applied - 1)
            this = Step(
                zero=zero,
                layout=layout,
                dense=dense,
                b1=b1,
                b2=b2,
                bc1=bc1,
                bc2=1 - b2**variance_updates,
                live_bc2=1 - b2**applied,
                exact=exact,
                momentum_decay=momentum_decay,
            )
            return _walk(this, inner, grads, means, state, params, extra_args)

        if phase is None:
            # A variance that no step has updated yet is never frozen.
            is_dense = phases.is_dense_traced(state.step, state.starts) | (
                state.variance_updates == 0
            )
            new_updates, new = lax.cond(is_dense, lambda: step(True), lambda: step(False))
        else:
            new_updates, new = step(phase == "dense")
        new = jax.tree.map(lambda new, old: jnp.where(ok, new, old), new, state)
        starts, norms = phases.advance(
            state.step,
            state.starts,
            state.norms,
            lambda: _norm(zero, layout, new),
            b2,
            learning_rate,
        )
        new = new._replace(
            step=state.step + 1,
            nonfinite=state.nonfinite + jnp.minimum(nonfinite, 1),
            starts=starts,
            norms=norms,
        )
        return jax.tree.map(lambda u: jnp.where(ok, u, jnp.zeros_like(u)), new_updates), new

    return optax.GradientTransformationExtraArgs(init, update)


def _norm(zero: ZeroConfig, layout: Layout, state: ZeroState) -> jax.Array:
    """L1 norm of v / bc2 of the compressed leaves, which all devices know from the weights."""
    states = layout.flatten(state.leaves, "the optimizer state")
    norms = [
        leaf.size * weighting.mean_variance(s.factors)
        for leaf, s in zip(layout.leaves, states, strict=True)
        if leaf.compressed
    ]
    total = sum(coll.sum_over_model_axes(norms, zero.axes), jnp.zeros((), jnp.float32))
    # Where parameters are sharded over the fast axis, weights are those of a shard.
    apart = tuple(a for a in zero.axes if a not in zero.owner_axes)
    with jax.named_scope("metrics"):
        return lax.psum(coll.vary(total, apart), apart) if apart else total


def _check_steps(name: str, value: Any, other: str = "") -> Any:
    array = isinstance(value, jax.Array)
    whole = array and value.shape == () and jnp.issubdtype(value.dtype, jnp.integer)
    if isinstance(value, jax.core.Tracer) and whole:
        return value
    plain = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not (whole or plain) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1{other}, got {value!r}.")
    if value >= _MAX_STEPS:
        raise ValueError(
            f"{name} must be below {_MAX_STEPS} (the schedule counts in int32), got {value!r}; "
            "refresh=None never refreshes."
        )
    return value if array else int(value)


def _check_momentum_decay(value: Any, b1: Any, zero: ZeroConfig) -> Any:
    low = 0.0 if isinstance(b1, jax.Array) else b1
    value = check_number("momentum_decay", value, lambda x: low <= x < 1, f"in [b1, 1), b1={b1}")
    if zero.gather_mode == "momentum":
        raise ValueError(
            f"a momentum that decays by {value} and is sent with b1={b1} needs gather='params': "
            "with gather='momentum' (default of stages 0 and 1) the momentum restarts from what "
            "was sent. Use ZeroConfig(gather='params'), or one decay for both."
        )
    return value


def _check(
    layout: Layout, grads: list[jax.Array], state: ZeroState, axis_name: coll.AxisName
) -> None:
    """Gradients and state must belong to the parameters."""
    states = layout.flatten(state.leaves, "the optimizer state")
    for leaf, g, s in zip(layout.leaves, grads, states, strict=True):
        if getattr(g, "shape", None) != leaf.shape or not jnp.issubdtype(g.dtype, jnp.floating):
            raise ValueError(
                f"the gradient of {leaf.path} must be floating-point of shape {leaf.shape}, got "
                f"{getattr(g, 'dtype', type(g).__name__)} {getattr(g, 'shape', '')}."
            )
        if leaf.compressed:
            # Where errors are int8, their first array; where there are none, the momentum.
            same = isinstance(s, ChunkState) and (
                jax.tree.leaves((s.worker_error, s.worker_momentum))[0].shape
                == (layout.slow * leaf.blocks, codec.ROWS, leaf.lanes)
            )
            same = same and jnp.broadcast_shapes(*(f.shape for f in s.factors)) == leaf.shape
        else:
            same = isinstance(s, DenseState) and s.momentum.shape == leaf.shape
        if not same:
            raise ValueError(
                f"parameter {leaf.path} of shape {leaf.shape} on {layout.parts} devices does not "
                "fit the optimizer state: its shape or the number of devices changed since init. "
                "Call init again."
            )
        coll.check_varies(leaf.path, g, axis_name)


def _staleness(before: jax.Array, norm: jax.Array) -> jax.Array:
    """``ZeroState.staleness`` after values of this norm were encoded."""
    _, total, count = before[0]
    first = (count < REFERENCE_CODES).astype(jnp.float32)
    return jnp.stack([norm, total + first * norm, count + first])[None]


def _walk(
    step: Step,
    inner: optax.GradientTransformationExtraArgs,
    grads: list[jax.Array],
    means: list[jax.Array | None],
    state: ZeroState,
    params: Tree,
    extra_args: dict[str, Any],
) -> tuple[Tree, ZeroState]:
    """One step, from local gradients to updates."""
    zero, layout = step.zero, step.layout
    states: list[Any] = layout.flatten(state.leaves, "the optimizer state")
    current = layout.values(params, "params")
    big = [i for i, leaf in enumerate(layout.leaves) if leaf.compressed]
    leaves = [layout.leaves[i] for i in big]
    first: list[Any] = [None] * len(states)
    rms: list[Any] = [None] * len(states)

    for i, g in enumerate(means):
        if g is not None:
            states[i], m = adam_moments(step, states[i], g)
            first[i] = m / step.bc1
            rms[i] = jnp.sqrt(states[i].variance / step.live_bc2)

    # Full reduction over the fast axis, then local momentum.
    chunks: list[ChunkState] = [states[i] for i in big]
    blocks = [layout.to_blocks(layout.leaves[i], grads[i].astype(jnp.float32)) for i in big]
    if zero.fast is not None:
        with jax.named_scope("fast_leg"):
            blocks = [
                lax.psum_scatter(g, zero.fast, scatter_dimension=0, tiled=True) / layout.fast
                for g in blocks
            ]
    weights = [
        leaf_weight(step, leaf, s, step.super_chunk) for leaf, s in zip(leaves, chunks, strict=True)
    ]
    if step.gathers_params:
        previous = [storage.load(s.worker_momentum) for s in chunks]
    else:
        previous = [
            codec.decode(jax.tree.map(step.super_chunk, s.momentum), w)
            for s, w in zip(chunks, weights, strict=True)
        ]
    local = [step.b1 * prev + (1 - step.b1) * g for prev, g in zip(previous, blocks, strict=True)]

    # Reduce leg.
    residual, staleness, owned = state.residual, state.staleness, list[Owned]()
    exact = reduce_dense(step, leaves, chunks, blocks, previous) if big and step.dense else None
    if big and (step.gathers_params or not step.dense):
        coded, norms = reduce_compressed(step, leaves, chunks, local, weights)
        # In warm-up no code is applied.
        dropped = step.exact if step.dense else False
        residual = jnp.where(dropped, residual, norms[:, :2])
        staleness = jnp.where(dropped, staleness, _staleness(staleness, norms[0, 2]))
        chunks, owned = coded if exact is None else reduce_refresh(step, exact, coded)
    elif exact is not None:
        chunks, owned = exact

    # Owner's update and gather leg, or gather leg and everyone's update.
    updates: list[Any] = [None] * len(states)
    if step.gathers_params:
        chunks = [
            s._replace(
                worker_momentum=storage.store(step.kept(prev, m), zero.momentum_dtype),
                momentum=step.kept(s.momentum, o.momentum),
            )
            for s, prev, m, o in zip(chunks, previous, local, owned, strict=True)
        ]
        for i, o in zip(big, owned, strict=True):
            first[i] = o.momentum / step.bc1
            bound = step.floor * codec.inverse(o.weight)
            rms[i] = jnp.maximum(jnp.sqrt(o.variance / step.bc2), bound)
        masters: list[Any] = [s.master for s in states]
    else:
        chunks = gather_momentum(step, chunks, owned)
        for i, leaf, s in zip(big, leaves, chunks, strict=True):
            w = leaf_weight(step, leaf, s, lambda x: x)
            whole = codec.decode(s.momentum, w) / step.bc1
            root = storage.decode_log(*s.shared) if zero.stage else jnp.sqrt(s.shared / step.bc2)
            root = jnp.maximum(root, step.floor * codec.inverse(w))
            first[i] = layout.from_blocks(leaf, whole)
            rms[i] = layout.from_blocks(leaf, root)
        masters = current
    change, inner_state = inner.update(
        layout.unflatten(first),
        state.inner,
        layout.unflatten(masters),
        rms=layout.unflatten(rms),
        leaf_sums=step.leaf_sums,
        **extra_args,
    )
    change = layout.flatten(change, "the inner chain's updates")
    if step.gathers_params:
        for i, (leaf, master, y) in enumerate(zip(layout.leaves, masters, current, strict=True)):
            if not leaf.compressed:
                master = master + change[i]
                states[i] = states[i]._replace(master=master)
                updates[i] = (master - y.astype(jnp.float32)).astype(leaf.dtype)
        chunks = [s._replace(master=s.master + change[i]) for s, i in zip(chunks, big, strict=True)]
        replicas = [current[i] for i in big]
        chunks, changes = gather_params(step, leaves, chunks, owned, replicas)
        for i, u in zip(big, changes, strict=True):
            updates[i] = u
    else:
        updates = [u.astype(leaf.dtype) for u, leaf in zip(change, layout.leaves, strict=True)]
    for i, s in zip(big, chunks, strict=True):
        states[i] = s

    new = state._replace(
        applied=state.applied + 1,
        variance_updates=state.variance_updates + int(step.dense),
        residual=residual,
        staleness=staleness,
        leaves=layout.unflatten(states),
        inner=inner_state,
    )
    return layout.like(params, updates), new
