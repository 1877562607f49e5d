"""Where a leaf stands in a state: its pieces, chunks and blocks on a mesh of given sizes."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from onebit_zero_jax import codec, weighting
from onebit_zero_jax.config import ZeroConfig
from onebit_zero_jax.layout import Layout, Leaf, is_shard
from onebit_zero_jax.shards import device_shapes, shard_shapes, whole_shapes


class Parts(NamedTuple):
    """How a state is divided: ``workers`` that send codes, over ``owners`` chunks."""

    workers: int
    owners: int

    @classmethod
    def of(cls, axes: Mapping[str, int], zero: ZeroConfig) -> "Parts":
        """Of a mesh with axes of these sizes."""
        return cls(axes[zero.slow], math.prod(axes[a] for a in zero.axes))

    def mesh(self, zero: ZeroConfig) -> AbstractMesh:
        """A mesh of the data-parallel axes, of these sizes: inverse of :meth:`of`."""
        sizes = (self.workers, self.owners // self.workers)
        return AbstractMesh(sizes[: len(zero.axes)], zero.axes)


@dataclasses.dataclass(frozen=True)
class Side:
    """A leaf's place in a state, before or after.

    Attributes:
      leaf: as one device holds it.
      whole: shape, as the user has it.
      axis, pieces: stage 3 pads the leaf along ``axis``, cuts it into ``pieces``, and puts
        each of them into blocks of its own; 0 and 1 where it is not cut.
      feedback: whether the state has worker errors.
    """

    leaf: Leaf
    whole: tuple[int, ...]
    axis: int
    pieces: int
    zero: ZeroConfig
    parts: Parts
    feedback: bool = True

    @classmethod
    def of(cls, params: Any, zero: ZeroConfig, parts: Parts) -> "dict[str, Side]":
        """Of every leaf, by path; ``params`` as the user or as a TrainState has them."""
        mesh = parts.mesh(zero)
        params = whole_shapes(params)
        leaves = Layout.of(device_shapes(params, mesh, zero), zero, mesh.shape).leaves
        stored = jax.tree.leaves(shard_shapes(params, mesh, zero), is_leaf=is_shard)
        sides = {}
        for leaf, x, like in zip(leaves, jax.tree.leaves(params), stored, strict=True):
            axis, pieces = 0, 1
            if is_shard(like):
                pieces = math.prod(mesh.shape[a] for a in like.over)
                axis = x.ndim + like.axis if pieces > 1 else 0
            anonymous = dataclasses.replace(leaf, path="", axis=None)
            sides[leaf.path] = cls(anonymous, x.shape, axis, pieces, _storage(zero), parts)
        return sides

    @property
    def blocks(self) -> int:
        """Blocks of the whole leaf."""
        return self.parts.owners * self.leaf.blocks

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the whole leaf in blocks."""
        return (self.blocks, codec.ROWS, self.leaf.lanes)

    @property
    def order(self) -> tuple[Any, ...]:
        """Equal where the same values stand in the same blocks, but for padding at the end."""
        per_piece = self.blocks // self.pieces if self.pieces > 1 else 0
        tiled = self.zero.tiles and codec.is_tiled(self.piece, self.leaf.lanes)
        return (self.leaf.lanes, self.axis, self.pieces, per_piece, tiled)

    @property
    def padded(self) -> tuple[int, ...]:
        """Shape of the parameter in the TrainState."""
        return tuple(
            n + -n % self.pieces if i == self.axis else n for i, n in enumerate(self.whole)
        )

    @property
    def piece(self) -> tuple[int, ...]:
        """Shape of a piece."""
        shape = list(self.padded)
        shape[self.axis] //= self.pieces
        return tuple(shape)

    @property
    def gathers_params(self) -> bool:
        """Whether owners send parameters, and hold the master copy."""
        return self.zero.gather_mode == "params"

    def pad(self, x: jax.Array) -> jax.Array:
        """A leaf as the user has it, in the shape of the TrainState."""
        if self.whole == self.padded:
            return x
        return jnp.pad(x, [(0, b - a) for a, b in zip(self.whole, self.padded, strict=True)])

    def unpad(self, x: jax.Array) -> jax.Array:
        """Inverse of :meth:`pad`."""
        return x[tuple(slice(n) for n in self.whole)]

    def _split(self, x: jax.Array) -> jax.Array:
        """``(pieces, ...)`` of a leaf in the shape of the TrainState."""
        before, after = self.padded[: self.axis], self.padded[self.axis + 1 :]
        return jnp.moveaxis(x.reshape(*before, self.pieces, -1, *after), self.axis, 0)

    def cut(self, x: jax.Array) -> jax.Array:
        """A leaf as the user has it, in blocks."""
        parts = self.parts.owners // self.pieces
        to_blocks = lambda x: codec.to_blocks(x, parts, self.zero.tiles)
        if self.pieces == 1:
            return to_blocks(x)
        return jax.vmap(to_blocks)(self._split(self.pad(x))).reshape(self.shape)

    def join(self, blocks: jax.Array) -> jax.Array:
        """Inverse of :meth:`cut`."""
        if self.pieces == 1:
            return codec.from_blocks(blocks, self.whole, self.zero.tiles)
        each = blocks.reshape(self.pieces, -1, *blocks.shape[1:])
        pieces = jax.vmap(lambda x: codec.from_blocks(x, self.piece, self.zero.tiles))(each)
        return self.unpad(jnp.moveaxis(pieces, 0, self.axis).reshape(self.padded))

    @property
    def weighed(self) -> tuple[Any, ...]:
        """Equal where factors of the weight are of the same rows and columns."""
        return self.leaf.shape, self.leaf.shape == self.padded or (self.axis, self.pieces)

    def factors(self, mean_square: jax.Array) -> weighting.Factors:
        """Factors of the weight, from v / bc2 in the user's shape; stacked if pieces have own."""

        def of(v: jax.Array) -> weighting.Factors:
            return weighting.weight_factors(*weighting.mean_factors(v), self.leaf.shape)

        v = self.pad(mean_square)
        if self.leaf.shape == self.padded:
            return of(v)
        stacked = jax.vmap(of)(self._split(v))
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), stacked)

    def weight(self, variance: jax.Array, factors: weighting.Factors) -> jax.Array:
        """w in blocks, of ``variance`` in blocks; where devices hold the whole leaf."""
        factored = codec.to_blocks(weighting.weight_of(factors), self.parts.owners, self.zero.tiles)
        return jnp.where(variance > 0, factored, 0.0)


def _storage(zero: ZeroConfig) -> ZeroConfig:
    """``zero`` without what leaves no trace in the state, but for where values stand."""
    params = zero.gather_mode == "params"
    return ZeroConfig(
        stage=min(zero.stage, 1),
        gather=zero.gather_mode,
        gather_bits=None if params else zero.bits,
        tiles=zero.tiles,
        error_dtype=zero.error_dtype,
        momentum_dtype=zero.momentum_dtype if params else "float32",
    )
