"""One leaf of a state on another number of devices or in another stage; no mesh.

Owners' arrays (master parameters, variance, server error, momentum) hold every value
once, in the order of the leaf: they are cut again, exactly. Workers' arrays (local
momentum, worker error) hold one whole leaf per worker: what the loss feels is their
mean over workers, and that is kept. Codes whose block scales are tied to the blocks of
a chunk are copied where blocks keep their width, else decoded and encoded again; what
that rounds goes into an error, which sends it on.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from onebit_zero_jax import codec
from onebit_zero_jax.config import ZeroConfig
from onebit_zero_jax.layout import Leaf
from onebit_zero_jax.state import ChunkState, DenseState, Log8


class Parts(NamedTuple):
    """How a state is divided: ``workers`` that send codes, over ``owners`` chunks."""

    workers: int
    owners: int

    @classmethod
    def of(cls, axes: Mapping[str, int], zero: ZeroConfig) -> "Parts":
        """Of a mesh with axes of these sizes."""
        return cls(axes[zero.slow], math.prod(axes[a] for a in zero.axes))

    def sizes(self, zero: ZeroConfig) -> dict[str, int]:
        """Sizes of the data-parallel axes: inverse of :meth:`of`."""
        return dict(zip(zero.axes, (self.workers, self.owners // self.workers), strict=False))


# ---------------------------------------------------------------- arrays


def reflow(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The same values in the same order: padding at the end is cut off or added."""
    flat, size = x.reshape(-1), int(np.prod(shape))
    flat = jnp.pad(flat, (0, size - flat.size)) if flat.size < size else flat[:size]
    return flat.reshape(shape)


def rework(x: jax.Array, workers: int) -> jax.Array:
    """``(old workers, ...)`` float32 to ``(workers, ...)`` of the same mean over workers.

    Groups are averaged when the new count divides the old; each worker's value goes to a
    group of the new ones when the old divides the new; else everyone gets the mean.
    """
    old = x.shape[0]
    if old == workers:
        return x
    if old % workers == 0:
        return jnp.mean(x.reshape(workers, old // workers, *x.shape[1:]), axis=1)
    if workers % old == 0:
        return jnp.repeat(x, workers // old, axis=0)
    return jnp.broadcast_to(jnp.mean(x, axis=0), (workers, *x.shape[1:]))


def _recount(stored: Any, blocks: int, senders: int = 1) -> Any:
    """Stored blocks, bit for bit, ``blocks`` of them per sender: those at the end are padding."""

    def one(x: jax.Array) -> jax.Array:
        x = x.reshape(senders, -1, *x.shape[1:])
        short = blocks - x.shape[1]
        x = (
            jnp.pad(x, [(0, 0), (0, short)] + [(0, 0)] * (x.ndim - 2))
            if short > 0
            else x[:, :blocks]
        )
        return x.reshape(senders * blocks, *x.shape[2:])

    return jax.tree.map(one, stored)


# ---------------------------------------------------------------- one leaf


@dataclasses.dataclass(frozen=True)
class Side:
    """A leaf's place in a state, before or after.

    Attributes:
      feedback: whether the state has worker errors.
    """

    leaf: Leaf
    zero: ZeroConfig
    parts: Parts
    feedback: bool = True

    @property
    def blocks(self) -> int:
        """Blocks of the whole leaf."""
        return self.parts.owners * self.leaf.blocks

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the whole leaf in blocks."""
        return (self.blocks, codec.ROWS, self.leaf.lanes)

    @property
    def gathers_params(self) -> bool:
        """Whether owners send parameters, and hold the master copy."""
        return self.zero.gather_mode == "params"

    def weight(self, variance: jax.Array, factors: codec.Factors) -> jax.Array:
        """w in blocks, of ``variance`` in blocks."""
        factored = reflow(codec.weight_of(factors), self.shape)
        return jnp.where(variance > 0, factored, 0.0)


class Known(NamedTuple):
    """What conversions need beside the leaf; scalars.

    Attributes:
      b1, b2: decays of the momentum and of the variance.
      bc2, live_bc2: bias corrections of the variance of compressed and of dense leaves.
    """

    b1: jax.Array
    b2: jax.Array
    bc2: jax.Array
    live_bc2: jax.Array


class _Whole(NamedTuple):
    """A compressed leaf's state by value: float32 in the leaf's shape, workers stacked.

    Attributes:
      momentum: M as the next step starts from it, the mean of ``local``.
      own: M of the owners.
      variance: v.
      local: m_i ``(workers, ...)``.
      error: e_i ``(workers, ...)``.
      server: E.
      master: x.
      factors: of the weight.
    """

    momentum: jax.Array
    own: jax.Array
    variance: jax.Array
    local: jax.Array
    error: jax.Array
    server: jax.Array
    master: jax.Array
    factors: codec.Factors


def _ratio(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.where(b > 0, a / jnp.where(b > 0, b, 1.0), 0.0)


def _open(side: Side, s: ChunkState | DenseState, y: jax.Array, known: Known) -> _Whole:
    shape, workers = side.leaf.shape, side.parts.workers
    y = y.astype(jnp.float32)
    if isinstance(s, DenseState):
        v = s.variance * _ratio(known.bc2, known.live_bc2)
        scaled = _ratio(v, jnp.broadcast_to(known.bc2, v.shape))
        factors = codec.weight_factors(*codec.mean_factors(scaled), shape)
        local = jnp.broadcast_to(s.momentum, (workers, *shape))
        nothing = jnp.zeros(shape, jnp.float32)
        master = y if s.master is None else s.master
        error = jnp.zeros_like(local)
        return _Whole(s.momentum, s.momentum, v, local, error, nothing, master, factors)

    def each(stored: Any) -> jax.Array:
        return jax.vmap(lambda x: reflow(x, shape))(
            codec.load(stored).reshape(workers, *side.shape)
        )

    v = s.variance if side.zero.stage else s.shared
    nothing = jnp.zeros(shape, jnp.float32)
    if s.worker_error is None:
        error = jnp.zeros((workers, *shape), jnp.float32)
    else:
        error = each(s.worker_error)
    if side.gathers_params:
        local, own, master = (
            each(s.worker_momentum),
            reflow(s.momentum, shape),
            reflow(s.master, shape),
        )
        momentum, server = jnp.mean(local, axis=0), nothing
    else:
        momentum = reflow(codec.decode(s.momentum, side.weight(v, s.factors)), shape)
        local, own, master = jnp.broadcast_to(momentum, (workers, *shape)), momentum, y
        server = reflow(codec.load(s.server_error), shape)
    return _Whole(momentum, own, reflow(v, shape), local, error, server, master, s.factors)


def _to_dense(new: Side, old: Side, whole: _Whole, known: Known) -> DenseState:
    """The errors, which a dense leaf lacks, go into the momentum.

    Momentum d adds ``d (b1 + b1^2 + ...)`` to all that is ever applied; an error adds itself
    once, or, where the momentum restarts from the aggregate, itself times 1 / (1 - b1).
    """
    owed = jnp.mean(whole.error, axis=0) + whole.server
    share = (1 - known.b1) if old.gathers_params else jnp.float32(1)
    return DenseState(
        momentum=whole.momentum + _ratio(share, known.b1) * owed,
        variance=whole.variance * _ratio(known.live_bc2, known.bc2),
        master=whole.master if new.gathers_params else None,
    )


def _to_chunk(
    new: Side, old: Side, s: ChunkState | DenseState, whole: _Whole, known: Known
) -> ChunkState:
    zero, lanes = new.zero, new.leaf.lanes
    same_blocks = isinstance(s, ChunkState) and lanes == old.leaf.lanes
    chunk = s if isinstance(s, ChunkState) else None
    v = reflow(whole.variance, new.shape)

    def per_worker(x: jax.Array, stored: Any, dtype: str, old_dtype: str) -> Any:
        workers = new.parts.workers
        if (
            same_blocks
            and stored is not None
            and (workers, dtype) == (old.parts.workers, old_dtype)
        ):
            return _recount(stored, new.blocks, workers)
        x = jax.vmap(lambda x: reflow(x, new.shape))(rework(x, workers))
        return codec.store(x.reshape(-1, *new.shape[1:]), dtype)

    # Moving the server error to all workers leaves mean e + E as it was.
    moved = whole.server if new.gathers_params and not old.gathers_params else None
    error = whole.error if moved is None else whole.error + moved
    kept = chunk.worker_error if chunk is not None and moved is None else None
    state = ChunkState(
        worker_momentum=None,
        worker_error=(
            per_worker(error, kept, zero.error_dtype, old.zero.error_dtype)
            if new.feedback
            else None
        ),
        server_error=None,
        momentum=None,
        variance=v if zero.stage else None,
        shared=v,
        factors=whole.factors,
        master=None,
    )
    if zero.stage and new.gathers_params:
        state = state._replace(shared=codec.pack_bits(v > 0))
    elif zero.stage:
        shared = chunk.shared if chunk is not None and same_blocks else None
        if isinstance(shared, Log8):
            state = state._replace(shared=_recount(shared, new.blocks))
        else:
            root = jnp.sqrt(_ratio(v, jnp.broadcast_to(known.bc2, v.shape)))
            state = state._replace(shared=Log8(*codec.encode_log(root)))
    if new.gathers_params:
        stored = chunk.worker_momentum if chunk is not None and old.gathers_params else None
        dtypes = zero.momentum_dtype, old.zero.momentum_dtype
        return state._replace(
            worker_momentum=per_worker(whole.local, stored, *dtypes),
            momentum=reflow(whole.own, new.shape),
            master=reflow(whole.master, new.shape),
        )
    codes = chunk.momentum if chunk is not None and same_blocks and not old.gathers_params else None
    server = reflow(whole.server, new.shape)
    if codes is not None and zero.bits == old.zero.bits:
        codes = _recount(codes, new.blocks)
        if zero.error_dtype == old.zero.error_dtype and chunk is not None:
            return state._replace(
                momentum=codes, server_error=_recount(chunk.server_error, new.blocks)
            )
    else:
        # The next step starts from b1 times the codes; what they lack is owed by the server.
        weight = new.weight(v, whole.factors)
        codes, lost = codec.encode(
            reflow(whole.momentum, new.shape), bits=int(zero.bits), weight=weight
        )
        server = server + known.b1 * lost
    return state._replace(momentum=codes, server_error=codec.store(server, zero.error_dtype))


def convert_leaf(
    old: Side, new: Side, s: ChunkState | DenseState, y: jax.Array, known: Known
) -> tuple[ChunkState | DenseState, jax.Array]:
    """State and parameter of one leaf."""
    if isinstance(s, DenseState) and not new.leaf.compressed:
        master = y.astype(jnp.float32) if s.master is None else s.master
        state: Any = s._replace(master=master if new.gathers_params else None)
    else:
        whole = _open(old, s, y, known)
        master = whole.master
        to = _to_chunk(new, old, s, whole, known) if new.leaf.compressed else None
        state = to if to is not None else _to_dense(new, old, whole, known)
    # Without a master the parameters are the truth.
    if old.gathers_params and not new.gathers_params:
        y = master.astype(y.dtype)
    return state, y
