"""What benchmarks/cluster.py trains: a name, a mesh of hosts and processes, a method."""

import dataclasses
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to train on ``hosts x per_host`` processes, of one device each.

    Attributes:
      method: ``"jit"``: plain ``jit``, parameters replicated, AdamW's state sharded;
        ``"dense"``: ``examples/dense_zero.py`` in float32; ``"half"``: the same sending
        bfloat16 as its bits; ``"onebit"``: this package.
      zero: fields of ``ZeroConfig``, for ``"onebit"``.
    """

    hosts: int
    per_host: int
    method: Literal["jit", "dense", "half", "onebit"]
    zero: tuple[tuple[str, Any], ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        return ("hosts", "local") if self.per_host > 1 else ("hosts",)

    @property
    def phases(self) -> tuple[str, ...]:
        return ("dense", "compressed") if self.method == "onebit" else ("dense",)


def _onebit(hosts: int, per_host: int, **zero: Any) -> Case:
    return Case(hosts, per_host, "onebit", tuple(zero.items()))


CASES = {
    "dense float32, plain jit": Case(4, 1, "jit"),
    "dense float32": Case(4, 1, "dense"),
    "dense 16 bits": Case(4, 1, "half"),
    "stage 1": _onebit(4, 1, stage=1),
    "stage 2": _onebit(4, 1, stage=2),
    "stage 3, flat": _onebit(4, 1, stage=3),
    "stage 3, flat, layers 8 bits": _onebit(4, 1, stage=3, layer_bits=8),
    "2 x 2, dense float32": Case(2, 2, "dense"),
    "2 x 2, dense 16 bits": Case(2, 2, "half"),
    "2 x 2, stage 2": _onebit(2, 2, stage=2),
    "2 x 2, stage 3": _onebit(2, 2, stage=3),
}

# Cases that compute the same numbers as another, but for rounding: one loss run for all.
SAME_LOSS = {
    "dense float32, plain jit": "dense float32",
    "2 x 2, dense float32": "dense float32",
    "2 x 2, dense 16 bits": "dense 16 bits",
}
