"""How a parameter tree is cut into blocks and chunks.

A leaf is *compressed* if it is a matrix (two axes or more) with enough values for
every device; its values are flattened and padded to N equal chunks of whole blocks, one
for each device. On a two-speed mesh of S x L devices, device (s, f) owns chunk
``f * S + s``: the S chunks of one f, a *super-chunk*, are what the full reduction over
the fast axis leaves on every device (s, f), and what codes of the slow axis cover.
Every other leaf is *dense*: reduced in float32, kept whole.

At stage 3 a compressed leaf is a :class:`Shard`. Sharded over the fast axis it is cut
as if it were the leaf. Sharded over every axis the shards are the chunks, and the leaf
is what gradients are: all shards side by side.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from onebit_zero_jax import codec
from onebit_zero_jax import collectives as coll
from onebit_zero_jax.config import ZeroConfig

# A chunk below this many values is sent dense: its scales would cost more than its signs.
MIN_CHUNK = 64


class NotAnArray:
    """Says what to do where a shard is used as the array it is a part of."""

    _advice: str

    def __jax_array__(self) -> Any:
        raise TypeError(self._advice)

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError(self._advice)

    def __getitem__(self, _: Any) -> Any:
        raise TypeError(self._advice)

    def __getattr__(self, name: str) -> Any:
        # Protocols are probed for; everything else was meant for an array.
        raise AttributeError(name if name.startswith("_") else f"{self._advice} (.{name})")


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["value"],
    meta_fields=["axis", "size", "over", "model"],
)
@dataclasses.dataclass(frozen=True)
class Shard(NotAnArray):
    """A parameter leaf of stage 3, cut along one of its axes.

    Leading axes may be sliced off (``lax.scan`` over stacked layers): ``axis`` counts
    from the end.

    Attributes:
      value: on a device its shard, globally the leaf padded with zeros along ``axis`` to
        a multiple of the shards.
      axis: the axis that is cut, negative.
      size: length of that axis without padding.
      over: mesh axes it is sharded over.
      model: mesh axes other than the data-parallel ones that shard it: entries of a
        PartitionSpec, one per axis; they count from the end too.
    """

    value: Any
    axis: int
    size: int
    over: tuple[str, ...]
    model: tuple[Any, ...] = ()

    _advice = (
        "a parameter of stage 3 is a Shard, no array: full_params(state) puts parameters together, "
        "eval_step evaluates a loss on shards, .value is the padded array."
    )


def is_compressed(shape: tuple[int, ...], parts: int) -> bool:
    """Whether a leaf is worth cutting into ``parts`` chunks."""
    return len(shape) >= 2 and math.prod(shape) >= MIN_CHUNK * parts


def is_shard(x: Any) -> bool:
    """Whether ``x`` is a :class:`Shard`."""
    return isinstance(x, Shard)


def shard_axis(
    shape: tuple[int, ...], shards: int, among: Sequence[int] = (), tiles: bool = False
) -> int:
    """The axis, negative, along which stage 3 cuts a leaf: the longest that pads least.

    The first axis only if cutting it saves padding: it may count stacked layers. With
    ``tiles`` (:func:`codec.to_blocks`) these stay whole if they can.
    ``among``: axes to choose from, negative; all by default.

    Example:
      >>> [shard_axis(s, 8) for s in ((4, 64, 256), (64, 10), (12, 100))]
      [-1, -2, -1]
      >>> shard_axis((4, 64, 256), 8, tiles=True)
      -2
    """
    tiled = tiles and codec.is_tiled(shape, codec.LANES)
    tile = {-1: codec.LANES, -2: codec.ROWS} if tiled else {}

    def cost(axis: int) -> tuple[float, bool, bool, int]:
        padding = -shape[axis] % shards / shape[axis]
        torn = -(-shape[axis] // shards) % tile.get(axis, 1) > 0
        return (padding if padding > 1 / 16 else 0.0, axis == -len(shape), torn, -shape[axis])

    return min(among or range(-len(shape), 0), key=cost)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One parameter leaf.

    Attributes:
      path: where it stands in the tree, for messages.
      shape, dtype: as the user has them.
      compressed: whether it is cut into chunks.
      blocks, lanes: blocks of a chunk and columns of a block; 0 for dense leaves.
      axis: the axis along which the leaf is cut into chunks, if it is not the flattened
        leaf that is cut.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    compressed: bool
    blocks: int
    lanes: int
    axis: int | None = None

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Layout:
    """The leaves of a parameter tree, and of how many chunks they are made."""

    leaves: tuple[Leaf, ...]
    treedef: Any
    slow: int
    fast: int = 1
    tiles: bool = False

    @property
    def parts(self) -> int:
        """Number of chunks."""
        return self.slow * self.fast

    @classmethod
    def of(cls, params: Any, zero: ZeroConfig, sizes: Mapping[str, int]) -> "Layout":
        """Cuts ``params`` for a run on mesh axes of the given sizes.

        Args:
          params: arrays or ShapeDtypeStructs, as one device holds them; at stage 3
            compressed leaves are :class:`Shard`\\ s.
          zero: the configuration.
          sizes: number of devices on each data-parallel axis.

        Raises:
          ValueError: a leaf is not a floating-point array.
        """
        slow, fast = sizes[zero.slow], 1 if zero.fast is None else sizes[zero.fast]
        parts = slow * fast
        flat, treedef = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_shard)
        leaves = []
        for path, x in flat:
            name = jax.tree_util.keystr(path) or "params"
            shard, x = (x, x.value) if is_shard(x) else (None, x)
            dtype = getattr(x, "dtype", None)
            if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
                raise ValueError(
                    f"parameter {name} is {dtype or type(x).__name__}, not a floating-point array; "
                    "keep it out of params (init and train_step take it as model_state), in a "
                    "loop of your own out of the optimizer (optax.masked)."
                )
            shape = tuple(x.shape)
            if shard is not None and zero.flat:
                blocks, lanes = codec.block_shape(math.prod(shape))
                axis = shard.axis + len(shape)
                shape = (*shape[:axis], shape[axis] * parts, *shape[axis + 1 :])
                leaves.append(Leaf(name, shape, dtype, True, blocks, lanes, axis))
                continue
            compressed = is_compressed(shape, math.prod(sizes[a] for a in zero.axes))
            if zero.stage == 3 and compressed and shard is None:
                raise ValueError(
                    f"parameter {name} of shape {shape} is not sharded, which stage 3 needs: use "
                    "init and train_step, or shard_params in a loop of your own."
                )
            compressed = compressed or shard is not None
            blocks, lanes = codec.block_shape(math.prod(shape), parts) if compressed else (0, 0)
            leaves.append(Leaf(name, shape, dtype, compressed, blocks, lanes))
        return cls(tuple(leaves), treedef, slow, fast, zero.tiles)

    def to_blocks(self, leaf: Leaf, x: jax.Array) -> jax.Array:
        """A whole compressed leaf in blocks, chunk after chunk: ``(N * blocks, 8, lanes)``."""
        if leaf.axis is None:
            return codec.to_blocks(x, self.parts, self.tiles)
        shape = (*x.shape[: leaf.axis], self.parts, -1, *x.shape[leaf.axis + 1 :])
        chunks = jnp.moveaxis(x.reshape(shape), leaf.axis, 0)
        each = jax.vmap(lambda x: codec.to_blocks(x, tiles=self.tiles))(chunks)
        return each.reshape(-1, codec.ROWS, leaf.lanes)

    def from_blocks(self, leaf: Leaf, blocks: jax.Array) -> jax.Array:
        """Inverse of :meth:`to_blocks`."""
        if leaf.axis is None:
            return codec.from_blocks(blocks, leaf.shape, self.tiles)
        each = blocks.reshape(self.parts, -1, *blocks.shape[1:])
        chunks = jax.vmap(lambda x: self.shard(leaf, x))(each)
        return jnp.moveaxis(chunks, 0, leaf.axis).reshape(leaf.shape)

    def own(self, leaf: Leaf, x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        """This device's chunk, in blocks, of the parameter as the device holds it."""
        if leaf.axis is None:
            return coll.own(codec.to_blocks(x, self.parts, self.tiles), axes)
        return codec.to_blocks(x, tiles=self.tiles)

    def shard(self, leaf: Leaf, chunk: jax.Array) -> jax.Array:
        """A chunk, in blocks, as the shard that it is of a leaf that is cut along an axis."""
        assert leaf.axis is not None
        before, after = leaf.shape[: leaf.axis], leaf.shape[leaf.axis + 1 :]
        shape = (*before, leaf.shape[leaf.axis] // self.parts, *after)
        return codec.from_blocks(chunk, shape, self.tiles)

    def values(self, tree: Any, what: str) -> list[Any]:
        """Arrays of ``tree`` at the parameters' places."""
        return [x.value if is_shard(x) else x for x in self.flatten(tree, what)]

    def like(self, tree: Any, values: list[Any]) -> Any:
        """``values`` as a tree with the :class:`Shard`\\ s of ``tree``."""
        nodes = self.flatten(tree, "params")
        pairs = zip(nodes, values, strict=True)
        return self.unflatten(
            [dataclasses.replace(n, value=v) if is_shard(n) else v for n, v in pairs]
        )

    def flatten(self, tree: Any, what: str) -> list[Any]:
        """Subtrees of ``tree`` at the parameters' places.

        Raises:
          ValueError: the structure is not the parameters'.
        """
        try:
            return self.treedef.flatten_up_to(tree)
        except ValueError as e:
            raise ValueError(f"{what} does not have the structure of the parameters: {e}") from e

    def unflatten(self, leaves: list[Any]) -> Any:
        """Tree of the parameters' structure."""
        return jax.tree.unflatten(self.treedef, leaves)
