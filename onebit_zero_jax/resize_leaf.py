"""One leaf of a state on another number of devices or in another stage; no mesh.

Owners' arrays (master parameters, variance, server error, momentum) hold every value
once, in the order of the leaf: they are cut again, exactly. Workers' arrays (local
momentum, worker error) hold one whole leaf per worker: what the loss feels is their
mean over workers, and that is kept. Codes whose block scales are tied to the blocks of
a chunk are copied where blocks keep their width, else decoded and encoded again; what
that rounds goes into an error, which sends it on. Stage 3 cuts a leaf along an axis
before it is cut into blocks: then nothing but values carries over.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from onebit_zero_jax import codec, storage, weighting
from onebit_zero_jax.resize_side import Side
from onebit_zero_jax.state import ChunkState, DenseState, Log8

# ---------------------------------------------------------------- arrays


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
      factors: of the weight; None where they must be made anew, of v.
    """

    momentum: jax.Array
    own: jax.Array
    variance: jax.Array
    local: jax.Array
    error: jax.Array
    server: jax.Array
    master: jax.Array
    factors: weighting.Factors | None


def _ratio(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.where(b > 0, a / jnp.where(b > 0, b, 1.0), 0.0)


def _open(side: Side, s: ChunkState | DenseState, y: jax.Array, known: Known) -> _Whole:
    shape, workers = side.whole, side.parts.workers
    y = y.astype(jnp.float32)
    if isinstance(s, DenseState):
        v = s.variance * _ratio(known.bc2, known.live_bc2)
        local = jnp.broadcast_to(s.momentum, (workers, *shape))
        nothing = jnp.zeros(shape, jnp.float32)
        master = y if s.master is None else s.master
        error = jnp.zeros_like(local)
        return _Whole(s.momentum, s.momentum, v, local, error, nothing, master, None)

    def each(stored: Any) -> jax.Array:
        return jax.vmap(side.join)(storage.load(stored).reshape(workers, *side.shape))

    v = s.variance if side.zero.stage else s.shared
    nothing = jnp.zeros(shape, jnp.float32)
    if s.worker_error is None:
        error = jnp.zeros((workers, *shape), jnp.float32)
    else:
        error = each(s.worker_error)
    if side.gathers_params:
        local, own, master = (
            each(s.worker_momentum),
            side.join(s.momentum),
            side.join(s.master),
        )
        momentum, server = jnp.mean(local, axis=0), nothing
    else:
        momentum = side.join(codec.decode(s.momentum, side.weight(v, s.factors)))
        local, own, master = jnp.broadcast_to(momentum, (workers, *shape)), momentum, y
        server = side.join(storage.load(s.server_error))
    return _Whole(momentum, own, side.join(v), local, error, server, master, s.factors)


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
    zero = new.zero
    same_blocks = isinstance(s, ChunkState) and new.order == old.order
    chunk = s if isinstance(s, ChunkState) else None
    v = new.cut(whole.variance)
    factors = whole.factors
    if factors is None or new.weighed != old.weighed:
        # v has not changed since factors were made of it.
        mean_square = _ratio(whole.variance, jnp.broadcast_to(known.bc2, new.whole))
        factors = new.factors(mean_square)

    def per_worker(x: jax.Array, stored: Any, dtype: str, old_dtype: str) -> Any:
        workers = new.parts.workers
        if (
            same_blocks
            and stored is not None
            and (workers, dtype) == (old.parts.workers, old_dtype)
        ):
            return _recount(stored, new.blocks, workers)
        x = jax.vmap(new.cut)(rework(x, workers))
        return storage.store(x.reshape(-1, *new.shape[1:]), dtype)

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
        factors=factors,
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
            state = state._replace(shared=Log8(*storage.encode_log(root)))
    if new.gathers_params:
        stored = chunk.worker_momentum if chunk is not None and old.gathers_params else None
        dtypes = zero.momentum_dtype, old.zero.momentum_dtype
        return state._replace(
            worker_momentum=per_worker(whole.local, stored, *dtypes),
            momentum=new.cut(whole.own),
            master=new.cut(whole.master),
        )
    codes = chunk.momentum if chunk is not None and same_blocks and not old.gathers_params else None
    server = new.cut(whole.server)
    if codes is not None and zero.bits == old.zero.bits:
        codes = _recount(codes, new.blocks)
        if zero.error_dtype == old.zero.error_dtype and chunk is not None:
            return state._replace(
                momentum=codes, server_error=_recount(chunk.server_error, new.blocks)
            )
    else:
        # The next step starts from b1 times the codes; what they lack is owed by the server.
        weight = new.weight(v, factors)
        momentum = new.cut(whole.momentum)
        codes, lost = codec.encode(momentum, bits=int(zero.bits), weight=weight)
        server = server + known.b1 * lost
    return state._replace(momentum=codes, server_error=storage.store(server, zero.error_dtype))


def recut(old: Side, new: Side, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """An array of the leaf's values, whole or in blocks, as an array of ``shape``."""
    x = x if x.shape == old.whole else old.join(x)
    return x if shape == new.whole else new.cut(x)


def convert_leaf(
    old: Side, new: Side, s: ChunkState | DenseState, y: jax.Array, known: Known
) -> tuple[ChunkState | DenseState, jax.Array]:
    """State and parameter of one leaf, ``y`` and its successor as a TrainState has them."""
    y = old.unpad(y)
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
    return state, new.pad(y)
