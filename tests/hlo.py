"""Lists the collectives of a compiled XLA program from its text."""

import dataclasses
import math
import re

_OPS = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute")
_INSTRUCTION = re.compile(
    rf"^\s*(?:ROOT )?%?(?P<name>[\w.-]+) = (?P<type>.*?) (?P<op>{'|'.join(_OPS)})"
    r"(?P<start>-start)?\("
)
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_BITS = {"pred": 8, "bf16": 16}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One array that a collective instruction carries.

    Attributes:
      op: HLO name, e.g. "all-to-all".
      dtype, shape: of the result; the pieces of an all-to-all are counted together.
      group: devices that take part together.
      instruction: name of the instruction; XLA merges several all-reduces into one.
      source: ``op_name`` of the metadata, with JAX's named scopes.
    """

    op: str
    dtype: str
    shape: tuple[int, ...]
    group: int
    instruction: str
    source: str

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of the result."""
        return self.size * _itemsize(self.dtype)

    @property
    def sent(self) -> float:
        """Bytes a device sends, with ring algorithms."""
        p = self.group
        factor = {
            "all-reduce": 2 * (p - 1) / p,
            "all-gather": (p - 1) / p,
            "all-to-all": (p - 1) / p,
            "reduce-scatter": p - 1,
            "collective-permute": 1,
        }
        return self.bytes * factor[self.op]


def _itemsize(dtype: str) -> int:
    return _BITS.get(dtype, int(re.sub(r"\D", "", dtype) or 8)) // 8


def _group(line: str) -> int:
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    if listed:
        return len(listed[1].split(","))
    tiled = re.search(r"replica_groups=\[(?:\d+,)*(\d+)\]<=", line)
    if tiled:
        return int(tiled[1])
    return 2 if "source_target_pairs" in line else 1


def collectives(text: str | None) -> list[Collective]:
    """Collectives of ``compiled.as_text()``; those of loops once, with "while" in ``source``.

    Raises:
      ValueError: an asynchronous collective, whose result also holds its operand (XLA's
        CPU backend has none).
    """
    found = []
    for line in (text or "").splitlines():
        match = _INSTRUCTION.match(line)
        if not match:
            continue
        if match["start"]:
            raise ValueError(f"asynchronous collective: {line.strip()[:120]}")
        arrays = [
            (dtype, tuple(int(d) for d in dims.split(",") if d))
            for dtype, dims in _ARRAY.findall(re.sub(r"\{[^}]*\}|/\*.*?\*/", "", match["type"]))
        ]
        if match["op"] == "all-to-all" and len(arrays) > 1:
            # CPU and GPU: one piece per device, each with a leading axis of 1.
            dtype, (_, *rest) = arrays[0]
            arrays = [(dtype, (len(arrays), *rest))]
        source = re.search(r'op_name="([^"]*)"', line)
        for dtype, shape in arrays:
            found.append(
                Collective(
                    match["op"],
                    dtype,
                    shape,
                    _group(line),
                    match["name"],
                    source[1] if source else "",
                )
            )
    return found


def total_sent(found: list[Collective]) -> float:
    """Bytes a device sends, with ring algorithms."""
    return sum(c.sent for c in found)
