"""``zero_shard``: reduce leg, an optax chain on the owner's chunk, gather leg.

A gradient walks down this file in the order in which it happens: local gradient ->
local momentum -> code -> reduce leg -> owner's update -> gather leg -> updates. It all
runs inside ``jax.shard_map``. Lists below run over the leaves of the parameter tree.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from onebit_zero_jax import codec
from onebit_zero_jax import collectives as coll
from onebit_zero_jax.codec import Packed
from onebit_zero_jax.config import ZeroConfig, check_number
from onebit_zero_jax.layout import Layout, Leaf
from onebit_zero_jax.state import (
    ChunkState,
    DenseState,
    Log8,
    Phases,
    Run,
    Tree,
    ZeroState,
    init_state,
)

Phase = Literal["dense", "compressed"]

# Lower bound of the denominator, as a share of the factored estimate 1 / weight.
RMS_FLOOR = 0.1
# In units of the gradient's root mean square: momentum beyond it comes from a variance
# gone stale (a unit that was dead during warm-up), and must not drown its block.
OUTLIER = 100.0
# 16 intervals of refreshes must fit int32.
_MAX_STEPS = 2**27
# The square of a larger gradient, divided by bc2, might overflow float32.
_MAX_GRADIENT = 2.0**62


def zero_shard(
    inner: optax.GradientTransformation,
    *,
    zero: ZeroConfig,
    b1: Any = 0.9,
    b2: Any = 0.999,
    warmup_steps: Any = 100,
    refresh: Any = 32,
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
        the learning-rate warm-up.
      refresh: steps from one dense variance refresh to the next, doubling after every
        16 refreshes; None for a variance frozen after warm-up.
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
    b1, b2 = (
        check_number(name, value, lambda x: 0 <= x < 1, "in [0, 1)")
        for name, value in (("b1", b1), ("b2", b2))
    )
    warmup_steps = _check_steps("warmup_steps", warmup_steps)
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
        grads = layout.values(updates, "the gradient tree")
        _check(layout, grads, state, zero.axis_name)
        means, nonfinite = _reduce_dense_leaves(layout, grads, zero.axes)
        ok = jnp.sum(nonfinite) == 0

        def step(dense: bool) -> tuple[Tree, ZeroState]:
            with jax.named_scope("phase_dense" if dense else "phase_compressed"):
                return walk(dense)

        def walk(dense: bool) -> tuple[Tree, ZeroState]:
            applied = (state.applied + 1).astype(jnp.float32)
            variance_updates = (state.variance_updates + int(dense)).astype(jnp.float32)
            # Until the first compressed step M is exact, and Adam's denominator is right.
            exact = zero.gather_mode == "params" and (
                (state.step < warmup_steps) | (state.variance_updates == 0)
            )
            if not bias_correction:
                bc1: Any = 1.0
            elif momentum_decay is None:
                bc1 = 1 - b1**applied
            else:
                bc1 = 1 - b1 * momentum_decay ** (applied - 1)
            this = _Step(
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
            is_dense = phases.is_dense_traced(state.step) | (state.variance_updates == 0)
            new_updates, new = lax.cond(is_dense, lambda: step(True), lambda: step(False))
        else:
            new_updates, new = step(phase == "dense")
        new = jax.tree.map(lambda new, old: jnp.where(ok, new, old), new, state)
        new = new._replace(
            step=state.step + 1, nonfinite=state.nonfinite + jnp.minimum(nonfinite, 1)
        )
        return jax.tree.map(lambda u: jnp.where(ok, u, jnp.zeros_like(u)), new_updates), new

    return optax.GradientTransformationExtraArgs(init, update)


def _check_steps(name: str, value: Any) -> Any:
    if isinstance(value, jax.Array):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}.")
    if value >= _MAX_STEPS:
        raise ValueError(
            f"{name} must be below {_MAX_STEPS} (the schedule counts in int32), got {value!r}; "
            "refresh=None never refreshes."
        )
    return int(value)


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


def _reduce_dense_leaves(
    layout: Layout, grads: list[jax.Array], axes: coll.AxisName
) -> tuple[list[jax.Array | None], jax.Array]:
    """Means of the dense leaves' gradients, and per leaf on how many devices it is bad.

    One psum carries both.
    """
    wide = [g.astype(jnp.float32) for g in grads]
    # NaN compares false, so it is bad too. No maximum: XLA's on CPU drops NaN in some shapes.
    bad = [~jnp.all(jnp.abs(g) < _MAX_GRADIENT) for g in wide]
    small = [g for leaf, g in zip(layout.leaves, wide, strict=True) if not leaf.compressed]
    with jax.named_scope("dense_leaves"):
        flags, *sums = _fused_psum([jnp.stack(bad).astype(jnp.float32), *small], axes)
    means = iter(sums)
    devices = coll.axis_size(axes)
    mean = [None if leaf.compressed else next(means) / devices for leaf in layout.leaves]
    return mean, flags.astype(jnp.int32)


def _fused_psum(arrays: list[jax.Array], axes: coll.AxisName) -> list[jax.Array]:
    """``psum`` of many float32 arrays in one collective."""
    if not arrays:
        return []
    buffer = coll.vary(jnp.concatenate([jnp.ravel(x) for x in arrays]), axes)
    buffer = lax.psum(buffer, axes)
    ends = np.cumsum([x.size for x in arrays])
    return [
        buffer[end - x.size : end].reshape(x.shape) for x, end in zip(arrays, ends, strict=True)
    ]


@dataclasses.dataclass(frozen=True)
class _Step:
    """What one step of one phase is made of; all its gradients are taken as finite."""

    zero: ZeroConfig
    layout: Layout
    dense: bool
    b1: Any
    b2: Any
    bc1: Any  # bias correction of the momentum: 1 - b1^applied; 1 without
    bc2: jax.Array  # of the variance of compressed leaves: 1 - b2^variance_updates
    live_bc2: jax.Array  # of the variance of dense leaves: 1 - b2^applied
    exact: jax.Array | bool  # whether M is exact: warm-up, with gather="params"
    momentum_decay: Any  # None for b1

    @property
    def floor(self) -> jax.Array:
        """Bounds rms from below, see RMS_FLOOR; no bound while M is exact."""
        return jnp.where(self.exact, 0.0, RMS_FLOOR)

    def own(self, blocks: jax.Array) -> jax.Array:
        """This device's chunk of a whole leaf in blocks."""
        return coll.own(blocks, self.zero.owner_axes)

    def super_chunk(self, blocks: jax.Array) -> jax.Array:
        """The chunks that codes between the devices of the slow axis cover, of a whole leaf."""
        return blocks if self.zero.fast is None else coll.own(blocks, self.zero.fast)

    def kept(self, old: jax.Array, sent: jax.Array) -> jax.Array:
        """The momentum to keep, ``decay old + (1 - decay) g``, from ``b1 old + (1 - b1) g``."""
        if self.momentum_decay is None:
            return sent
        share = (1 - self.momentum_decay) / (1 - self.b1)
        return (1 - share) * old + share * sent

    def leaf_sums(self, tree: Tree) -> Tree:
        """Sums over the pieces of a leaf: every device has one of a chunked leaf."""
        nodes = self.layout.flatten(tree, "what leaf_sums adds up")
        pairs = zip(self.layout.leaves, nodes, strict=True)
        # Links under optax.masked leave a node without arrays at some leaves.
        pieces = [x if leaf.compressed and self.gathers_params else None for leaf, x in pairs]
        arrays, treedef = jax.tree.flatten(pieces)
        with jax.named_scope("metrics"):
            sums = jax.tree.unflatten(treedef, _fused_psum(arrays, self.zero.axes))
        merged = [x if s is None else s for x, s in zip(nodes, sums, strict=True)]
        return self.layout.unflatten(merged)

    @property
    def gathers_params(self) -> bool:
        return self.zero.gather_mode == "params"


def _seen(step: _Step, shared: Any) -> jax.Array:
    """Where v > 0, from (a part of) ``ChunkState.shared``: bool; False on padding."""
    if isinstance(shared, Log8):
        return shared.levels > 0
    if step.zero.stage:
        return codec.unpack_bits(shared)
    return shared > 0


def _weight(
    step: _Step, leaf: Leaf, s: ChunkState, part: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """w of a part of a leaf in blocks; 0 on padding and wherever v is 0."""
    factored = step.layout.to_blocks(leaf, codec.weight_of(s.factors))
    return jnp.where(_seen(step, jax.tree.map(part, s.shared)), part(factored), 0.0)


def _adam_moments(step: _Step, s: DenseState, g: jax.Array) -> tuple[DenseState, jax.Array]:
    """Adam's own moments, for a dense leaf; also the momentum to apply."""
    m = step.b1 * s.momentum + (1 - step.b1) * g
    v = step.b2 * s.variance + (1 - step.b2) * jnp.square(g)
    return s._replace(momentum=step.kept(s.momentum, m), variance=v), m


class _Owned(NamedTuple):
    """What the owner of a chunk holds after the reduce leg.

    Attributes:
      momentum: M, as it is applied.
      variance: v.
      weight: w, 0 wherever v is 0.
      news: what all devices must learn of a new v; empty in a compressed step.
    """

    momentum: jax.Array
    variance: jax.Array
    weight: jax.Array
    news: tuple[jax.Array, ...]


def _reduce_dense(
    step: _Step,
    leaves: list[Leaf],
    states: list[ChunkState],
    grads: list[jax.Array],
    previous: list[jax.Array],
) -> tuple[list[ChunkState], list[_Owned]]:
    """Dense reduce leg: Adam's moments on the owner, and new factors for everyone."""
    zero, layout = step.zero, step.layout
    moments: list[tuple[jax.Array, jax.Array]] = []
    means: list[jax.Array] = []
    for leaf, s, g, prev in zip(leaves, states, grads, previous, strict=True):
        with jax.named_scope("reduce_leg"):
            g = lax.psum_scatter(g, zero.slow, scatter_dimension=0, tiled=True) / layout.slow
        prev = s.momentum if step.gathers_params else coll.own(prev, zero.slow)
        v = s.variance if zero.stage else step.own(s.shared)
        m = step.b1 * prev + (1 - step.b1) * g
        v = step.b2 * v + (1 - step.b2) * jnp.square(g)
        moments.append((m, v))
        whole = layout.from_blocks(leaf, coll.place(v / step.bc2, zero.owner_axes))
        means.extend(codec.mean_factors(whole))
    with jax.named_scope("weights"):
        means = _fused_psum(means, zero.owner_axes)
    new_states, owned = [], []
    for k, (leaf, s, (m, v)) in enumerate(zip(leaves, states, moments, strict=True)):
        factors = codec.weight_factors(means[2 * k], means[2 * k + 1], leaf.shape)
        factored = layout.to_blocks(leaf, codec.weight_of(factors))
        weight = jnp.where(v > 0, step.own(factored), 0.0)
        if not zero.stage:
            news: tuple[jax.Array, ...] = (v,)
        elif step.gathers_params:
            news = (codec.pack_bits(v > 0),)
        else:
            news = codec.encode_log(jnp.sqrt(v / step.bc2))
        new_states.append(s._replace(factors=factors, variance=v if zero.stage else None))
        owned.append(_Owned(m, v, weight, news))
    return new_states, owned


def _reduce_compressed(
    step: _Step, states: list[ChunkState], local: list[jax.Array], weights: list[jax.Array]
) -> tuple[list[ChunkState], list[_Owned], jax.Array]:
    """1-bit reduce leg with worker error; v and w stay. Also returns the residual's norms."""
    zero = step.zero
    new_states: list[ChunkState] = []
    codes: list[jax.Array] = []
    norms = coll.vary(jnp.zeros((1, 2), jnp.float32), zero.axes)
    for s, m, w in zip(states, local, weights, strict=True):
        e = None if s.worker_error is None else codec.load(s.worker_error)
        code, new_e = codec.encode(m, e, bits=1, weight=w, limit=OUTLIER)
        c = m if e is None else m + e
        lost, had = jnp.sum(jnp.square(new_e * w)), jnp.sum(jnp.square(c * w))
        norms = norms + jnp.stack([lost, had])[None]
        if e is not None:
            s = s._replace(worker_error=codec.store(new_e, zero.error_dtype))
        new_states.append(s)
        codes.extend(code)
    with jax.named_scope("reduce_leg"):
        received = coll.exchange(codes, zero.slow)
    owned = []
    for k, (s, w) in enumerate(zip(states, weights, strict=True)):
        weight = coll.own(w, zero.slow)
        m = codec.decode_mean(Packed(received[2 * k], received[2 * k + 1]), weight)
        v = s.variance if zero.stage else step.own(s.shared)
        owned.append(_Owned(m, v, weight, ()))
    return new_states, owned, norms


def _refresh(
    step: _Step,
    dense: tuple[list[ChunkState], list[_Owned]],
    coded: tuple[list[ChunkState], list[_Owned], jax.Array],
    residual: jax.Array,
) -> tuple[list[ChunkState], list[_Owned], jax.Array]:
    """After warm-up a dense step with local momentum is a compressed step, but for v.

    M of the last code holds coding errors that the worker errors take back in this one.
    b1 M + (1 - b1) g would keep most of them for good.
    """

    def pick(exact: Any, code: Any) -> Any:
        return jax.tree.map(lambda a, b: jnp.where(step.exact, a, b), exact, code)

    chunks = [
        s._replace(worker_error=pick(s.worker_error, c.worker_error))
        for s, c in zip(dense[0], coded[0], strict=True)
    ]
    owned = [
        o._replace(momentum=pick(o.momentum, c.momentum))
        for o, c in zip(dense[1], coded[1], strict=True)
    ]
    return chunks, owned, pick(residual, coded[2])


def _learn(step: _Step, s: ChunkState, news: list[jax.Array]) -> ChunkState:
    """Takes in what owners told of a new variance."""
    if not news:
        return s
    return s._replace(shared=Log8(*news) if len(news) == 2 else news[0])


def _gather_momentum(
    step: _Step, states: list[ChunkState], owned: list[_Owned]
) -> list[ChunkState]:
    """Gather leg of Q(M + E), with server error; everyone keeps the codes as its momentum."""
    sent, errors = [], []
    for s, o in zip(states, owned, strict=True):
        e = codec.load(s.server_error)
        bits = int(step.zero.bits)
        code, new_e = codec.encode(o.momentum, e, bits=bits, weight=o.weight, limit=OUTLIER)
        errors.append(codec.store(new_e, step.zero.error_dtype))
        sent.append((*code, *o.news))
    got = _broadcast(step, sent)
    return [
        _learn(step, s._replace(momentum=Packed(*x[:2]), server_error=e), x[2:])
        for s, e, x in zip(states, errors, got, strict=True)
    ]


def _gather_params(
    step: _Step,
    leaves: list[Leaf],
    states: list[ChunkState],
    owned: list[_Owned],
    params: list[jax.Array],
) -> tuple[list[ChunkState], list[jax.Array]]:
    """Gather leg of Q(x - y); x - y is its own error feedback. Returns the updates of y."""
    layout, zero = step.layout, step.zero
    sent, masters, new_states, updates = [], [], [], []
    for leaf, s, o, y in zip(leaves, states, owned, params, strict=True):
        if zero.flat or zero.bits == "dense":
            masters.append(s.master)
            sent.append(o.news if zero.flat else (s.master.astype(leaf.dtype), *o.news))
            continue
        replica = layout.own(leaf, y.astype(jnp.float32), zero.owner_axes)
        alive = o.variance > 0
        # Nobody would learn of a change of the others: not even weight decay moves them.
        masters.append(jnp.where(alive, s.master, replica))
        weight = alive.astype(jnp.float32)
        code, _ = codec.encode(masters[-1] - replica, bits=int(zero.bits), weight=weight)
        sent.append((*code, *o.news))
    got = _broadcast(step, sent)
    for leaf, s, master, y, x in zip(leaves, states, masters, params, got, strict=True):
        count = 0 if zero.flat else 1 if zero.bits == "dense" else 2
        values, news = x[:count], x[count:]
        s = _learn(step, s._replace(master=master), news)
        new_states.append(s)
        if zero.flat:
            shard = codec.from_blocks(master, layout.shard_shape(leaf))
            updates.append(shard.astype(leaf.dtype) - y)
        elif zero.bits == "dense":
            updates.append(layout.from_blocks(leaf, values[0]) - y)
        else:
            change = codec.decode(Packed(*values), _seen(step, s.shared).astype(jnp.float32))
            updates.append(layout.from_blocks(leaf, change).astype(leaf.dtype))
    return new_states, updates


def _broadcast(step: _Step, sent: list[tuple[jax.Array, ...]]) -> list[list[jax.Array]]:
    """:func:`coll.broadcast` of every leaf's arrays together."""
    with jax.named_scope("gather_leg"):
        got = iter(coll.broadcast([x for arrays in sent for x in arrays], step.zero.owner_axes))
    return [[next(got) for _ in arrays] for arrays in sent]


def _walk(
    step: _Step,
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
            states[i], m = _adam_moments(step, states[i], g)
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
        _weight(step, leaf, s, step.super_chunk) for leaf, s in zip(leaves, chunks, strict=True)
    ]
    if step.gathers_params:
        previous = [codec.load(s.worker_momentum) for s in chunks]
    else:
        previous = [
            codec.decode(jax.tree.map(step.super_chunk, s.momentum), w)
            for s, w in zip(chunks, weights, strict=True)
        ]
    local = [step.b1 * prev + (1 - step.b1) * g for prev, g in zip(previous, blocks, strict=True)]

    # Reduce leg.
    residual, owned = state.residual, list[_Owned]()
    if big and step.dense:
        exact = _reduce_dense(step, leaves, chunks, blocks, previous)
        if step.gathers_params:
            coded = _reduce_compressed(step, chunks, local, weights)
            chunks, owned, residual = _refresh(step, exact, coded, residual)
        else:
            chunks, owned = exact
    elif big:
        chunks, owned, residual = _reduce_compressed(step, chunks, local, weights)

    # Owner's update and gather leg, or gather leg and everyone's update.
    updates: list[Any] = [None] * len(states)
    if step.gathers_params:
        chunks = [
            s._replace(
                worker_momentum=codec.store(step.kept(prev, m), zero.momentum_dtype),
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
        chunks = _gather_momentum(step, chunks, owned)
        for i, leaf, s in zip(big, leaves, chunks, strict=True):
            w = _weight(step, leaf, s, lambda x: x)
            whole = codec.decode(s.momentum, w) / step.bc1
            root = codec.decode_log(*s.shared) if zero.stage else jnp.sqrt(s.shared / step.bc2)
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
        chunks, changes = _gather_params(step, leaves, chunks, owned, replicas)
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
        leaves=layout.unflatten(states),
        inner=inner_state,
    )
    return layout.like(params, updates), new
