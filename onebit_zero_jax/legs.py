"""The two legs of a step, on lists over the compressed leaves, inside ``jax.shard_map``.

Reduce leg: local momentum to the owner's momentum. Gather leg: the owner's chunk to
what every device applies. ``shard.py`` calls them in order.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from onebit_zero_jax import codec, storage, weighting
from onebit_zero_jax import collectives as coll
from onebit_zero_jax.codec import Packed
from onebit_zero_jax.config import ZeroConfig
from onebit_zero_jax.layout import Layout, Leaf
from onebit_zero_jax.state import ChunkState, DenseState, Log8, Tree

# Lower bound of the denominator, as a share of the factored estimate 1 / weight.
RMS_FLOOR = 0.1
# In units of the gradient's root mean square: momentum beyond it comes from a variance
# gone stale (a unit that was dead during warm-up), and must not drown its block.
OUTLIER = 100.0
# The square of a larger gradient, divided by bc2, might overflow float32.
_MAX_GRADIENT = 2.0**62


def reduce_dense_leaves(
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
        bad_leaves = coll.sum_over_model_axes([jnp.stack(bad).astype(jnp.float32)], axes)
        flags, *sums = _fused_psum([*bad_leaves, *small], axes, axes)
    means = iter(sums)
    devices = coll.axis_size(axes)
    mean = [None if leaf.compressed else next(means) / devices for leaf in layout.leaves]
    return mean, flags.astype(jnp.int32)


def _fused_psum(
    arrays: list[jax.Array], axes: coll.AxisName, data_axes: coll.AxisName
) -> list[jax.Array]:
    """:func:`coll.psum` of many float32 arrays as one buffer."""
    slow_first = tuple(a for a in data_axes if a in axes)

    def fused(arrays: list[jax.Array]) -> list[jax.Array]:
        buffer = coll.psum(jnp.concatenate([jnp.ravel(x) for x in arrays]), slow_first)
        ends = np.cumsum([x.size for x in arrays])
        return [
            buffer[end - x.size : end].reshape(x.shape) for x, end in zip(arrays, ends, strict=True)
        ]

    return coll.by_model_axes(fused, arrays, data_axes)


@dataclasses.dataclass(frozen=True)
class Step:
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
        axes = self.zero.axes
        with jax.named_scope("metrics"):
            arrays, treedef = jax.tree.flatten(tree)
            tree = jax.tree.unflatten(treedef, coll.sum_over_model_axes(arrays, axes))
            nodes = self.layout.flatten(tree, "what leaf_sums adds up")
            pairs = zip(self.layout.leaves, nodes, strict=True)
            # Links under optax.masked leave a node without arrays at some leaves.
            pieces = [x if leaf.compressed and self.gathers_params else None for leaf, x in pairs]
            arrays, treedef = jax.tree.flatten(pieces)
            sums = jax.tree.unflatten(treedef, _fused_psum(arrays, axes, axes))
        merged = [x if s is None else s for x, s in zip(nodes, sums, strict=True)]
        return self.layout.unflatten(merged)

    @property
    def gathers_params(self) -> bool:
        """Whether the gather leg carries parameters."""
        return self.zero.gather_mode == "params"


def _seen(step: Step, shared: Any) -> jax.Array:
    """Where v > 0, from (a part of) ``ChunkState.shared``: bool; False on padding."""
    if isinstance(shared, Log8):
        return shared.levels > 0
    if step.zero.stage:
        return codec.unpack_bits(shared)
    return shared > 0


def leaf_weight(
    step: Step, leaf: Leaf, s: ChunkState, part: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """w of a part of a leaf in blocks; 0 on padding and wherever v is 0."""
    factored = step.layout.to_blocks(leaf, weighting.weight_of(s.factors))
    return jnp.where(_seen(step, jax.tree.map(part, s.shared)), part(factored), 0.0)


def adam_moments(step: Step, s: DenseState, g: jax.Array) -> tuple[DenseState, jax.Array]:
    """Adam's own moments, for a dense leaf; also the momentum to apply."""
    m = step.b1 * s.momentum + (1 - step.b1) * g
    v = step.b2 * s.variance + (1 - step.b2) * jnp.square(g)
    return s._replace(momentum=step.kept(s.momentum, m), variance=v), m


class Owned(NamedTuple):
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


def reduce_dense(
    step: Step,
    leaves: list[Leaf],
    states: list[ChunkState],
    grads: list[jax.Array],
    previous: list[jax.Array],
) -> tuple[list[ChunkState], list[Owned]]:
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
        means.extend(weighting.mean_factors(whole))
    with jax.named_scope("weights"):
        means = _fused_psum(means, zero.owner_axes, zero.axes)
    new_states, owned = [], []
    for k, (leaf, s, (m, v)) in enumerate(zip(leaves, states, moments, strict=True)):
        factors = weighting.weight_factors(means[2 * k], means[2 * k + 1], leaf.shape)
        factored = layout.to_blocks(leaf, weighting.weight_of(factors))
        weight = jnp.where(v > 0, step.own(factored), 0.0)
        if not zero.stage:
            news: tuple[jax.Array, ...] = (v,)
        elif step.gathers_params:
            news = (codec.pack_bits(v > 0),)
        else:
            news = storage.encode_log(jnp.sqrt(v / step.bc2))
        new_states.append(s._replace(factors=factors, variance=v if zero.stage else None))
        owned.append(Owned(m, v, weight, news))
    return new_states, owned


def reduce_compressed(
    step: Step,
    leaves: list[Leaf],
    states: list[ChunkState],
    local: list[jax.Array],
    weights: list[jax.Array],
) -> tuple[tuple[list[ChunkState], list[Owned]], jax.Array]:
    """1-bit reduce leg with worker error; v and w stay.

    Also returns float32 ``(1, 3)``: square norms of what the codes lost and of what they
    encoded, and the L1 norm of that, all weighted.
    """
    zero = step.zero
    new_states: list[ChunkState] = []
    codes: list[jax.Array] = []
    norms = coll.vary(jnp.zeros((1, 3), jnp.float32), zero.axes + coll.model_axes(zero.axes))
    for s, m, w in zip(states, local, weights, strict=True):
        e = None if s.worker_error is None else storage.load(s.worker_error)
        code, new_e = codec.encode(m, e, bits=1, weight=w, limit=OUTLIER)
        c = m if e is None else m + e
        lost, had = jnp.sum(jnp.square(new_e * w)), jnp.sum(jnp.square(c * w))
        new = jnp.stack([lost, had, jnp.sum(jnp.abs(c * w))])
        norms = norms + coll.share(m, zero.axes) * new[None]
        if e is not None:
            s = s._replace(worker_error=storage.store(new_e, zero.error_dtype))
        new_states.append(s)
        codes.extend(code)
    with jax.named_scope("reduce_leg"):
        received = coll.by_model_axes(
            lambda arrays: coll.exchange(arrays, zero.slow), codes, zero.axes
        )
    owned = []
    for k, (leaf, s, w) in enumerate(zip(leaves, states, weights, strict=True)):
        weight = coll.own(w, zero.slow)
        if zero.tiles:
            # Made again for the own chunk: XLA for TPU would write out all of w for a slice.
            again = s._replace(factors=lax.optimization_barrier(s.factors))
            weight = leaf_weight(step, leaf, again, step.own)
        m = codec.decode_mean(Packed(received[2 * k], received[2 * k + 1]), weight)
        v = s.variance if zero.stage else step.own(s.shared)
        owned.append(Owned(m, v, weight, ()))
    return (new_states, owned), norms


def reduce_refresh(
    step: Step,
    dense: tuple[list[ChunkState], list[Owned]],
    coded: tuple[list[ChunkState], list[Owned]],
) -> tuple[list[ChunkState], list[Owned]]:
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
    return chunks, owned


def _learn(step: Step, s: ChunkState, news: list[jax.Array]) -> ChunkState:
    """Takes in what owners told of a new variance."""
    if not news:
        return s
    return s._replace(shared=Log8(*news) if len(news) == 2 else news[0])


def gather_momentum(step: Step, states: list[ChunkState], owned: list[Owned]) -> list[ChunkState]:
    """Gather leg of Q(M + E), with server error; everyone keeps the codes as its momentum."""
    sent, errors = [], []
    for s, o in zip(states, owned, strict=True):
        e = storage.load(s.server_error)
        bits = int(step.zero.bits)
        code, new_e = codec.encode(o.momentum, e, bits=bits, weight=o.weight, limit=OUTLIER)
        errors.append(storage.store(new_e, step.zero.error_dtype))
        sent.append((*code, *o.news))
    got = _broadcast(step, sent)
    return [
        _learn(step, s._replace(momentum=Packed(*x[:2]), server_error=e), x[2:])
        for s, e, x in zip(states, errors, got, strict=True)
    ]


def gather_params(
    step: Step,
    leaves: list[Leaf],
    states: list[ChunkState],
    owned: list[Owned],
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
            updates.append(layout.shard(leaf, master).astype(leaf.dtype) - y)
        elif zero.bits == "dense":
            updates.append(layout.from_blocks(leaf, values[0]) - y)
        else:
            change = codec.decode(Packed(*values), _seen(step, s.shared).astype(jnp.float32))
            updates.append(layout.from_blocks(leaf, change).astype(leaf.dtype))
    return new_states, updates


def _broadcast(step: Step, sent: list[tuple[jax.Array, ...]]) -> list[list[jax.Array]]:
    """:func:`coll.broadcast` of every leaf's arrays together."""
    zero, flat = step.zero, [x for arrays in sent for x in arrays]
    with jax.named_scope("gather_leg"):
        fused = lambda arrays: coll.broadcast(arrays, zero.owner_axes)
        got = iter(coll.by_model_axes(fused, flat, zero.axes))
    return [[next(got) for _ in arrays] for arrays in sent]
