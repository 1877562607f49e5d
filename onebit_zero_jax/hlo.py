"""Reads compiled XLA programs (HLO text) far enough to find their collectives.

Knows the text that XLA's CPU, GPU and TPU backends print: tuple types with layouts, calls
into fusions, loops and branches, ``-start``/``-done`` pairs, the three notations of replica
groups, and the host transfers (``send``/``recv``) that carry collectives between TPU slices.
"""

import dataclasses
import math
import re
from collections.abc import Iterator

import numpy as np

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_NAME = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"(?:^|\s)([a-z][a-z0-9\-]*)\(")
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+)\s*(?:\(.*->.*)?\{\s*$")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
)
_CALLED_LIST = re.compile(r"(?:branch_computations|called_computations|calls)=\{([^}]*)\}")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=?]*)\]")
_GROUPS = re.compile(
    r"replica_groups=(?:(\{(?:\{[\d,\s]*\},?\s*)*\})|\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?)"
)
_MESH_GROUPS = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((?:\[([\d,]+)\]T\(([\d,]+)\)|([\d,]+))\))?"
    r" \{([^}]*)\}"
)
_MESH_AXIS = re.compile(r"'?(\w+)'?(?::\((\d+)\)(\d+))?")
_PAIRS = re.compile(r'source_target_pairs="?\{((?:\{\d+,\d+\},?)*)\}')


@dataclasses.dataclass(frozen=True)
class Array:
    """Type of one array of an instruction's result."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes without the padding of a layout; values below 8 bits are packed."""
        return -(-self.size * _bits(self.dtype) // 8)


def _bits(dtype: str) -> int:
    if dtype == "pred":
        return 8
    digits = re.search(r"\d+", dtype)  # bf16, u8, s4, f8e4m3fn: the first number
    return int(digits[0]) if digits else 0  # token, opaque


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name, op: as printed.
      type: text of the result's type.
      operands: names of instructions.
      attrs: the text behind the operands.
      called: names of the computations it runs.
      literal: what stands in place of operands in a constant or parameter.
      root: whether it is its computation's result.
    """

    name: str
    op: str
    type: str
    operands: tuple[str, ...] = ()
    attrs: str = ""
    called: tuple[str, ...] = ()
    literal: str = ""
    root: bool = False

    @property
    def arrays(self) -> list[Array]:
        """Arrays of the result, tuples flattened, tokens left out."""
        return arrays_of(self.type)

    @property
    def op_name(self) -> str:
        """JAX's name stack, ``""`` where XLA dropped it."""
        found = re.search(r'op_name="([^"]*)"', self.attrs)
        return found[1] if found else ""


def arrays_of(text: str) -> list[Array]:
    """Array types in a text such as ``(f32[2,3]{1,0:T(8,128)}, u8[])``.

    Example:
      >>> [(a.dtype, a.shape, a.bytes) for a in arrays_of("(bf16[2,3]{1,0:T(8,128)}, s4[3])")]
      [('bf16', (2, 3), 12), ('s4', (3,), 2)]
    """
    text = re.sub(r"/\*.*?\*/|\{[^{}]*\}", "", text)
    return [
        Array(dtype, tuple(int(d.lstrip("<=")) for d in dims.split(",") if d))
        for dtype, dims in _ARRAY.findall(text)
        if dtype != "token"
    ]


@dataclasses.dataclass(frozen=True)
class Module:
    """A program: computations by name, in the order in which instructions run if ``scheduled``.

    Attributes:
      partitions, replicas: devices of one program (of one slice on multi-slice TPUs).
    """

    computations: dict[str, list[Instruction]]
    entry: str
    partitions: int
    replicas: int
    scheduled: bool

    def op_names(self, instruction: Instruction) -> Iterator[str]:
        """``op_name`` of the instruction, and those inside the fusion that it calls."""
        if instruction.op_name:
            yield instruction.op_name
        if instruction.op == "fusion":
            for name in instruction.called:
                yield from (x.op_name for x in self.computations.get(name, []) if x.op_name)


def parse(text: str) -> Module:
    """Parses the text of an HLO module.

    Args:
      text: of ``compiled.as_text()``.

    Raises:
      ValueError: not HLO text.

    Example:
      >>> module = parse('''HloModule f, is_scheduled=true, num_partitions=2
      ... ENTRY %main (x: f32[4]) -> f32[4] {
      ...   %x = f32[4]{0} parameter(0)
      ...   ROOT %y = f32[4]{0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add
      ... }''')
      >>> [(i.name, i.op, i.operands) for i in module.computations[module.entry]]
      [('x', 'parameter', ()), ('y', 'all-reduce', ('x',))]
    """
    header = re.search(r"^HloModule .*$", text, re.MULTILINE)
    if not header:
        raise ValueError(
            f"not the text of an HLO module: {text[:60]!r}; pass jit(f).lower(...).compile() or "
            "its as_text()."
        )

    def count(what: str) -> int:
        found = re.search(rf"\b{what}=(\d+)", header[0])
        return int(found[1]) if found else 1

    computations: dict[str, list[Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if not line or line[0] == "}":
            current = None
        elif current is not None:
            instruction = _instruction(line)
            if instruction:
                current.append(instruction)
        elif not line[0].isspace():
            match = _HEADER.match(line)
            if match:
                current = computations.setdefault(match[2], [])
                entry = match[2] if match[1] else entry
    if not entry:
        raise ValueError("the HLO text has no ENTRY computation; pass the whole text.")
    return Module(
        computations,
        entry,
        count("num_partitions"),
        count("replica_count"),
        "is_scheduled=true" in header[0],
    )


def _instruction(line: str) -> Instruction | None:
    name = _NAME.match(line)
    opcode = _OPCODE.search(line, name.end() - 1) if name else None
    if not name or not opcode:
        return None
    depth, end = 1, len(line)
    for paren in re.finditer(r"[()]", line[opcode.end() :]):
        depth += 1 if paren[0] == "(" else -1
        if not depth:
            end = opcode.end() + paren.start()
            break
    inside = re.sub(r"/\*.*?\*/", "", line[opcode.end() : end])
    leaf = opcode[1] in ("parameter", "constant", "iota")
    operands = [] if leaf else re.findall(r"%([\w.\-]+)", inside)
    if not operands and not leaf:
        operands = re.findall(r"([A-Za-z_][\w.\-]*)\s*(?:,|$)", inside)
    attrs = line[end + 1 :]
    lists = [x.strip().lstrip("%") for xs in _CALLED_LIST.findall(attrs) for x in xs.split(",")]
    return Instruction(
        name[1],
        opcode[1],
        line[name.end() : opcode.start()].strip(),
        tuple(operands),
        attrs,
        (*_CALLED.findall(attrs), *(x for x in lists if x)),
        inside if leaf else "",
        "ROOT " in line[: name.end()],
    )


def trip_count(module: Module, body: list[Instruction], loop: Instruction) -> int | None:
    """Iterations of a ``while`` in ``body``, where they can be told.

    XLA notes them down on CPU and GPU. On TPU they are read from a counter compared with a
    constant: ``while (i < stop) i += step``.
    """
    found = re.search(r'known_trip_count"?[:=]\{"?n"?:"?(\d+)', loop.attrs)
    if found:
        return int(found[1])

    def value(within: list[Instruction], name: str) -> int | None:
        x = next((x for x in within if x.name == name), None)
        while x is not None and x.op in ("copy", "bitcast", "convert") and x.operands:
            source = x.operands[0]
            x = next((y for y in within if y.name == source), None)
        number = x.literal if x is not None and x.op == "constant" else ""
        return int(number) if re.fullmatch(r"-?\d+", number) else None

    def element(within: list[Instruction], name: str) -> int | None:
        x = next((x for x in within if x.name == name), None)
        index = re.search(r"index=(\d+)", x.attrs) if x and x.op == "get-tuple-element" else None
        return int(index[1]) if index else None

    def called(which: str) -> list[Instruction]:
        name = re.search(rf"\b{which}=%?([\w.\-]+)", loop.attrs)
        return module.computations.get(name[1], []) if name else []

    test, inside = called("condition"), called("body")
    compare = next((x for x in test if x.root and x.op == "compare"), None)
    if compare is None or "direction=LT" not in compare.attrs or len(compare.operands) != 2:
        return None
    counter, stop = element(test, compare.operands[0]), value(test, compare.operands[1])
    start = next((x for x in body if x.name in loop.operands and x.op == "tuple"), None)
    end = next((x for x in inside if x.root and x.op == "tuple"), None)
    if counter is None or stop is None or start is None or end is None:
        return None
    first = value(body, start.operands[counter])
    add = next((x for x in inside if x.name == end.operands[counter] and x.op == "add"), None)
    if first is None or add is None or element(inside, add.operands[0]) != counter:
        return None
    step = value(inside, add.operands[1])
    return max(0, -(-(stop - first) // step)) if step is not None and step > 0 else None


def groups(attrs: str) -> list[tuple[int, ...]] | None:
    """Groups of devices that take part together, pairs of a permutation; None: all devices.

    Args:
      attrs: attributes of a collective.

    Raises:
      ValueError: a notation of replica groups that this reader does not know.

    Example:
      >>> groups("replica_groups={{0,1},{2,3}}"), groups("replica_groups=[2,2]<=[2,2]T(1,0)")
      ([(0, 1), (2, 3)], [(0, 2), (1, 3)])
    """
    pairs = _PAIRS.search(attrs)
    if pairs:
        return [(int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", pairs[1])]
    if "replica_groups=mesh[" in attrs:
        return _mesh_groups(attrs)
    found = _GROUPS.search(attrs)
    if not found:
        if "replica_groups=" in attrs:
            raise _unknown_groups(attrs)
        return None
    if found[1]:
        listed = re.findall(r"\{([\d,\s]+)\}", found[1])
        return [tuple(int(i) for i in g.split(",")) for g in listed] or None
    shape, dims = ([int(i) for i in found[k].split(",")] for k in (2, 3))
    ids = np.arange(math.prod(dims)).reshape(dims)
    if found[4]:
        ids = ids.transpose([int(i) for i in found[4].split(",")])
    return [tuple(int(i) for i in row) for row in ids.reshape(-1, shape[-1])]


def _mesh_groups(attrs: str) -> list[tuple[int, ...]]:
    """Groups along axes of a mesh that XLA names, or along parts ``'x':(before)size`` of axes."""
    found = _MESH_GROUPS.search(attrs)
    if not found:
        raise _unknown_groups(attrs)
    sizes = {name: int(n) for name, n in re.findall(r"'?(\w+)'?=(\d+)", found[1])}
    if found[4]:
        ids = np.array([int(i) for i in found[4].split(",")])
    else:
        ids = np.arange(math.prod(sizes.values()))
    if found[2]:
        dims, order = ([int(i) for i in found[k].split(",")] for k in (2, 3))
        ids = ids.reshape(dims).transpose(order)
    # Every axis as (before, part, after), of which parts are taken.
    taken = [(m[1], int(m[2] or 1), int(m[3] or 0)) for m in _MESH_AXIS.finditer(found[5])]
    if len({name for name, *_ in taken}) != len(taken) or any(n not in sizes for n, *_ in taken):
        raise _unknown_groups(attrs)
    parts = {name: (before, size or sizes[name]) for name, before, size in taken}
    shape: list[int] = []
    for name, n in sizes.items():
        before, size = parts.get(name, (1, 1))
        shape += [before, size, n // before // size]
    places = list(sizes)
    along = [3 * places.index(name) + 1 for name, *_ in taken]
    ids = np.moveaxis(ids.reshape(shape), along, range(len(shape) - len(along), len(shape)))
    width = math.prod(size for _, size in parts.values())
    return [tuple(int(i) for i in row) for row in ids.reshape(-1, width)]


def _unknown_groups(attrs: str) -> ValueError:
    start = attrs.index("replica_groups=")
    return ValueError(f"unknown notation of replica groups: {attrs[start : start + 80]!r}.")


@dataclasses.dataclass(frozen=True)
class Transfer:
    """What a ``send`` between TPU slices carries.

    Attributes:
      op: the collective it is part of.
      groups: device ids (``jax.Device.id``) that take part together, or pairs.
      rendezvous: what pairs it with its ``recv``.
    """

    op: str
    groups: list[tuple[int, ...]]
    rendezvous: str


_TRANSFERS = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}
# Device k of slice s (from 1) has the id s * 100000 + k.
SLICE_STRIDE = 100_000


def transfer(instruction: Instruction) -> Transfer | None:
    """The collective between slices behind a ``send`` or ``recv``; None if it is none.

    Raises:
      ValueError: a kind of transfer or target that this reader does not know.

    Example:
      >>> attrs = ('frontend_attributes={_xla_host_transfer_rendezvous="psum_0",'
      ...     '_xla_megascale_target="{1,2}x{0:1}",_xla_megascale_transfer_type="ALL_REDUCE"}')
      >>> transfer(Instruction("send", "send", "", (), attrs)).groups
      [(100000, 200000), (100001, 200001)]
    """
    kind = re.search(r'_xla_megascale_transfer_type="(\w+)"', instruction.attrs)
    if not kind:
        return None
    rendezvous = re.search(r'_host_transfer_rendezvous="([^"]*)"', instruction.attrs)
    product = re.search(r'_xla_megascale_target="?\{([\d,:]+)\}x\{([\d,:]+)\}', instruction.attrs)
    listed = re.search(r'_xla_megascale_target="?\{((?:\{[\d,>\-]+\},?)+)\}', instruction.attrs)
    if kind[1] not in _TRANSFERS or not rendezvous or not (product or listed):
        raise ValueError(
            f"unknown transfer between slices in {instruction.name}: {instruction.attrs[:300]!r}."
        )
    if product:
        slices, devices = _range(product[1]), _range(product[2])
        found = [tuple(s * SLICE_STRIDE + k for s in slices) for k in devices]
    else:
        assert listed is not None
        members = re.findall(r"\{([\d,>\-]+)\}", listed[1])
        found = [tuple(int(i) for i in re.split(r",|->", g)) for g in members]
    return Transfer(_TRANSFERS[kind[1]], found, rendezvous[1])


def _range(text: str) -> list[int]:
    """``"1,2"`` or ``"0:7"`` (both ends included)."""
    out: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition(":")
        out.extend(range(int(first), int(last or first) + 1))
    return out
