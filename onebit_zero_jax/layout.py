"""How a parameter tree is cut into blocks and chunks.

A leaf is *compressed* if it is a matrix (two axes or more) with enough values for
every device; its values are flattened and padded to N equal chunks of whole blocks, one
for each device. On a two-speed mesh of S x L devices, device (s, f) owns chunk
``f * S + s``: the S chunks of one f, a *super-chunk*, are what the full reduction over
the fast axis leaves on every device (s, f), and what codes of the slow axis cover.
Every other leaf is *dense*: reduced in float32, kept whole.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from onebit_zero_jax import codec

# A chunk below this many values is sent dense: its scales would cost more than its signs.
MIN_CHUNK = 64


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One parameter leaf.

    Attributes:
      path: where it stands in the tree, for messages.
      shape, dtype: as the user has them.
      compressed: whether it is cut into chunks.
      blocks, lanes: blocks of a chunk and columns of a block; 0 for dense leaves.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    compressed: bool
    blocks: int
    lanes: int

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Layout:
    """The leaves of a parameter tree on ``slow * fast`` devices."""

    leaves: tuple[Leaf, ...]
    treedef: Any
    slow: int
    fast: int = 1

    @property
    def parts(self) -> int:
        """Number of devices, and of chunks."""
        return self.slow * self.fast

    @classmethod
    def of(cls, params: Any, slow: int, fast: int = 1) -> "Layout":
        """Cuts ``params`` (arrays or ShapeDtypeStructs) for ``slow * fast`` devices.

        Raises:
          ValueError: a leaf is not a floating-point array.
        """
        parts = slow * fast
        flat, treedef = jax.tree_util.tree_flatten_with_path(params)
        leaves = []
        for path, x in flat:
            name = jax.tree_util.keystr(path) or "params"
            dtype = getattr(x, "dtype", None)
            if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
                raise ValueError(
                    f"parameter {name} is {dtype or type(x).__name__}, not a floating-point array; "
                    "keep it out of the optimizer's tree (model_state, or optax.masked)."
                )
            size = math.prod(x.shape)
            compressed = len(x.shape) >= 2 and size >= MIN_CHUNK * parts
            blocks, lanes = codec.block_shape(size, parts) if compressed else (0, 0)
            leaves.append(Leaf(name, tuple(x.shape), dtype, compressed, blocks, lanes))
        return cls(tuple(leaves), treedef, slow, fast)

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
