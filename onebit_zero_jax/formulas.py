"""Formulas of :func:`onebit_zero_jax.plan`: bytes on the wire and in memory, per device.

They are taken from the layout and the state that the optimizer itself makes, as shapes.
``tests/test_plan.py`` compares them with compiled programs.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from onebit_zero_jax import codec, weighting
from onebit_zero_jax import collectives as coll
from onebit_zero_jax.adam import onebit_adamw
from onebit_zero_jax.clip import SKETCH_SIZE
from onebit_zero_jax.config import ZeroConfig
from onebit_zero_jax.layout import Layout, Leaf, is_shard
from onebit_zero_jax.shards import shard_shapes
from onebit_zero_jax.state import ChunkState, DenseState
from onebit_zero_jax.train_state import abstract_state

Bytes = dict[str, dict[str, float]]  # leg -> axis -> bytes

# psum of the loss, the two norms of the residual ratio, and two of the variance's staleness.
_SCALARS = 5
# Memory traffic of coding over its minimum, counted for XLA on TPU v5e.
_CODING_OVER_MINIMUM = 2.1
_STAND_IN_VECTORS = 1000  # one value in so many


def tree_of(params: Any, dtype: Any) -> Any:
    """Shapes of a parameter tree, or of one that stands in for a number of parameters."""
    return _stand_in(params, dtype) if isinstance(params, int) else _shapes(params)


def count_of(tree: Any) -> int:
    """Number of parameters."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))


def _shapes(tree: Any) -> Any:
    if not jax.tree.leaves(tree):
        raise ValueError("params is an empty tree.")
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def _stand_in(count: int, dtype: Any) -> Any:
    """A matrix about 16 times as high as wide, and a vector."""
    if isinstance(count, bool) or count < 1:
        raise ValueError(f"params must be a positive number or a tree, got {count!r}.")
    try:
        dtype = jnp.dtype(dtype)
    except TypeError as e:
        raise ValueError(f"param_dtype must be a floating dtype, got {dtype!r}.") from e
    width = 2 ** max(0, int(math.log2(max(1, count)) / 2) - 2)
    rows = (count - count // _STAND_IN_VECTORS) // width
    return {
        "matrix": jax.ShapeDtypeStruct((rows, width), dtype),
        "vector": jax.ShapeDtypeStruct((count - rows * width,), dtype),
    }


def layout_of(tree: Any, zero: ZeroConfig, mesh: "Mesh") -> Layout:
    """How ``zero_shard`` cuts the tree, from what one device holds of it."""
    abstract = mesh.abstract(zero)
    shards = math.prod(abstract.shape[a] for a in zero.over)

    def local(x: Any) -> Any:
        if not is_shard(x):
            return x
        shape = list(x.value.shape)
        shape[x.axis] //= shards
        return dataclasses.replace(x, value=jax.ShapeDtypeStruct(tuple(shape), x.value.dtype))

    held = jax.tree.map(local, shard_shapes(tree, abstract, zero), is_leaf=is_shard)
    return Layout.of(held, zero, abstract.shape)


# ---------------------------------------------------------------- bytes on the wire


@dataclasses.dataclass(frozen=True)
class Mesh:
    """Sizes of the data axes."""

    slow: int
    fast: int
    flat: bool  # parameters sharded over the only axis
    sharded: bool  # parameters sharded over the fast axis, or over the only one

    @property
    def size(self) -> int:
        """Devices."""
        return self.slow * self.fast

    def abstract(self, zero: ZeroConfig) -> Any:
        """A mesh without devices."""
        return AbstractMesh((self.slow, self.fast)[: len(zero.axes)], zero.axes)

    def joint(self, per_device: float) -> dict[str, float]:
        """Splits what a collective over all devices sends, ``(N - 1)`` pieces."""
        n, pieces = self.size, max(1, self.size - 1)
        return {
            "slow": per_device * (self.slow - 1) / pieces,
            "fast": per_device * (n - self.slow) / pieces,
        }

    def all_reduce(self, size: float) -> dict[str, float]:
        """What :func:`coll.psum` of ``size`` bytes over all devices sends."""
        s, f = self.slow, self.fast
        if min(s, f) == 1 or size < coll.MIN_IN_ROWS:
            return self.joint(2 * size * (self.size - 1) / self.size)
        padded = size + -size % (4 * f)
        return {"slow": 2 * padded / f * (s - 1) / s, "fast": 2 * padded * (f - 1) / f}


def _code(leaf: Leaf, bits: int) -> int:
    """Bytes of a chunk's planes and scales."""
    return leaf.blocks * (bits * leaf.lanes + 4)


def bytes_sent(layout: Layout, zero: ZeroConfig, mesh: Mesh, dense: bool) -> Bytes:
    """What a device sends in a step of the given phase."""
    s, f = mesh.slow, mesh.fast
    over_fast = mesh.sharded and not mesh.flat
    reduce_fast = reduce_slow = weights = 0.0
    codes = gathered = 0
    layers = {"slow": 0.0, "fast": 0.0}
    for leaf in layout.leaves:
        if not leaf.compressed:
            continue
        values = leaf.blocks * codec.ROWS * leaf.lanes  # of a chunk
        reduce_fast += 4 * (f - 1) * (leaf.size if over_fast else values * s)
        reduce_slow += (s - 1) * 4 * values if dense else 0
        if not dense or zero.gather_mode == "params":  # With local momentum refreshes code too.
            codes += _code(leaf, 1)
        if mesh.flat:
            chunk = 0
        elif zero.bits == "dense":
            chunk = values * jnp.dtype(leaf.dtype).itemsize
        else:
            chunk = _code(leaf, int(zero.bits))
        if dense and not zero.stage:
            chunk += 4 * values  # v
        elif dense and zero.gather_mode == "params":
            chunk += leaf.blocks * leaf.lanes  # where v > 0
        elif dense:
            chunk += values + 4 * leaf.blocks  # sqrt(v) in 8 bits
        gathered += chunk
        if mesh.sharded:
            shard = leaf.size // (layout.parts if mesh.flat else 1)
            piece = 2 * shard * jnp.dtype(leaf.dtype).itemsize  # forward and backward
            layers["slow"] += piece * (s - 1) if mesh.flat else 0
            layers["fast"] += piece * (f - 1) * (s if mesh.flat else 1)
        if dense:
            shape = jax.ShapeDtypeStruct(leaf.shape, jnp.float32)
            means = jax.eval_shape(weighting.mean_factors, shape)
            weights += 4 * sum(math.prod(m.shape) for m in means)
    reduce_slow += (s - 1) * coll.buffer_bytes(codes)
    gathered = coll.buffer_bytes(gathered)
    small = sum(leaf.size for leaf in layout.leaves if not leaf.compressed)
    out = {"layer_gather": layers} if mesh.sharded else {}
    out |= {"fast": {"slow": 0.0, "fast": reduce_fast}} if f > 1 else {}
    return out | {
        "reduce": {"slow": reduce_slow, "fast": 0.0},
        "gather": {
            "slow": (s - 1) * gathered,
            "fast": 0.0 if over_fast else (f - 1) * s * gathered,
        },
        "dense_leaves": mesh.all_reduce(4 * (small + len(layout.leaves))),
        "weights": (
            {"slow": 2 * weights * (s - 1) / s, "fast": 0.0}
            if over_fast
            else mesh.all_reduce(weights)
        ),
        "metrics": {
            axis: sketch + mesh.all_reduce(4 * _SCALARS)[axis]
            for axis, sketch in mesh.all_reduce(4 * SKETCH_SIZE).items()
        },
    }


def baseline(count: int, mesh: Mesh) -> Bytes:
    """Reduce-scatter and all-gather in bfloat16; stage 3 gathers layers twice."""
    s, f, n = mesh.slow, mesh.fast, mesh.size
    over = {"slow": 2 * count * (s - 1) / n, "fast": 2 * count * (f - 1) / f}
    if mesh.flat:
        return {"reduce": over, "layer_gather": {a: 2 * x for a, x in over.items()}}
    if mesh.sharded:
        layers = {"slow": 0.0, "fast": 2 * over["fast"]}
        return {
            "reduce": over,
            "gather": {"slow": over["slow"], "fast": 0.0},
            "layer_gather": layers,
        }
    return {"reduce": over, "gather": dict(over)}


# ---------------------------------------------------------------- memory


def memory(tree: Any, zero: ZeroConfig, mesh: Mesh) -> dict[str, float]:
    """Bytes of the package's own state, on one device."""
    abstract = mesh.abstract(zero)
    tx = onebit_adamw(1e-3, zero=zero)
    state: Any = abstract_state(tree, tx, abstract, zero)
    out: dict[str, float] = {}

    def add(item: str, arrays: Any) -> None:
        for x in jax.tree.leaves(arrays):
            here = math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
            out[item] = out.get(item, 0.0) + here

    add("parameters", state.params)
    for s in jax.tree.leaves(state.opt_state.leaves, is_leaf=_is_state):
        if isinstance(s, ChunkState):
            for name, arrays in s._asdict().items():
                if arrays is not None:
                    add(_ITEMS.get(name, name.replace("_", " ")), arrays)
        else:
            add("dense leaves", s)
    counted = set(state.opt_state._fields) - {"leaves", "run"}
    for name in counted:
        add("counters", getattr(state.opt_state, name))
    return out


def _is_state(x: Any) -> bool:
    return isinstance(x, (ChunkState, DenseState))


_ITEMS = {"shared": "shared variance", "factors": "weight factors"}


def dense_memory(count: int, mesh: Mesh) -> dict[str, float]:
    """Bytes of dense ZeRO: bfloat16 replicas, float32 master and moments sharded."""
    split = (mesh.size if mesh.flat else mesh.fast) if mesh.sharded else 1
    return {"parameters": 2 * count / split, "master, moments": 12 * count / mesh.size}


def coding_bytes(layout: Layout, zero: ZeroConfig) -> float:
    """Memory traffic of a compressed step that a dense one does without."""
    width = {"float32": 4, "bfloat16": 2, "int8": 1}
    total = 0.0
    for leaf in layout.leaves:
        if not leaf.compressed:
            continue
        kept = width[zero.error_dtype]
        if zero.gather_mode == "params":
            kept += width[zero.momentum_dtype]
        encode = leaf.size / layout.fast * (4 + 2 * kept + 1 / 8)
        bits = 8 * jnp.dtype(leaf.dtype).itemsize if zero.bits == "dense" else int(zero.bits)
        decode = leaf.size * (2 * jnp.dtype(leaf.dtype).itemsize + bits / 8)
        total += encode + decode
    return _CODING_OVER_MINIMUM * total
