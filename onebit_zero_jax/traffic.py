"""The collectives of a compiled program: what each sends, between which devices of a mesh."""

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from onebit_zero_jax import hlo
from onebit_zero_jax.hlo import Array, Instruction, Module
from onebit_zero_jax.wire import LEGS

# What does arithmetic, as against moving or renaming data.
_COMPUTE = {"fusion", "dot", "convolution", "while", "call", "conditional", "sort", "reduce"}
_COMPUTE |= {
    "reduce-window",
    "scatter",
    "select-and-scatter",
    "triangular-solve",
    "cholesky",
    "fft",
}
_KERNEL = re.compile(r'custom_call_target="(?:__|tpu_custom_call|mosaic|[^"]*triton)')
_SCOPE = r"(?:^|[/;:(])({})(?=[/;:)]|$)"
_LEG = re.compile(_SCOPE.format("|".join(LEGS)))
_PHASE = re.compile(_SCOPE.format("phase_dense|phase_compressed"))
# A dropped name stack is looked for this many instructions away,
_REACH = 8
# among the legs that send by the collective at hand.
_LEGS_OF = {
    "all-gather": {"gather"},
    "all-to-all": {"reduce"},
    "reduce-scatter": {"fast", "reduce"},
    "all-reduce": {"fast", "reduce", "dense_leaves", "weights", "metrics"},
    "collective-permute": {"fast", "reduce"},  # what XLA adds to a reduce-scatter of odd size
}


@dataclasses.dataclass(frozen=True)
class Collective:
    """What one collective instruction sends of one dtype and leg.

    Attributes:
      op: HLO name, e.g. ``"all-to-all"``; ``"reduce-scatter"`` for TPU's fused
        all-reduce-scatter, the collective behind a ``send`` between TPU slices.
      instruction: name in the program.
      dtype: HLO dtype, e.g. ``"u8"``.
      size: values in the result (on one device).
      group: devices that take part together.
      sent: bytes that a device sends per call.
      across: of these, the bytes that cross each mesh axis; axes not crossed are left out.
      leg: ``"fast"`` (the full reduction over the fast axis), ``"reduce"``, ``"gather"``,
        ``"dense_leaves"``, ``"weights"``, ``"metrics"``, several joined by ``+`` where XLA
        merged them beyond telling apart, or ``"other"``.
      leg_inferred: XLA dropped the name; the leg is that of the nearest instruction with one.
      phase: ``"dense"``, ``"compressed"``, or None where the program does not say.
      branch: conditionals around it: name of the conditional, number of the branch.
      calls: runs per run of the program: the trip counts of the loops around it.
      counted: False if XLA does not know such a trip count, taken as 1 in ``calls``.
      asynchronous: it is a pair of a start and a done.
      overlapped: compute instructions scheduled between the two; None if synchronous or unknown.
      between_slices: a host transfer between TPU slices.
    """

    op: str
    instruction: str
    dtype: str
    size: int
    group: int
    sent: float
    across: dict[str, float]
    leg: str
    leg_inferred: bool
    phase: str | None
    branch: tuple[tuple[str, int], ...]
    calls: int
    counted: bool
    asynchronous: bool
    overlapped: int | None
    between_slices: bool

    @property
    def total(self) -> float:
        """Bytes that a device sends per run of the program."""
        return self.sent * self.calls

    def crossing(self, axis: str) -> float:
        """Of ``total``, the bytes that cross ``axis``."""
        return self.across.get(axis, 0.0) * self.calls

    def describe(self) -> str:
        """One line for error messages."""
        where = "".join(f", branch {i} of {name}" for name, i in self.branch)
        phase = f", {self.phase} phase" if self.phase else ""
        calls = f"{self.calls} call{'s' * (self.calls > 1)}"
        what = f"{self.dtype}[{self.size}], leg {self.leg}{phase}{where}, {calls}"
        return f"{self.op} %{self.instruction} ({what}, {readable_bytes(self.total)})"


def readable_bytes(n: float) -> str:
    """``12.3 MB``."""
    for unit in ("B", "kB", "MB"):
        if n < 1000:
            return f"{n:.3g} {unit}" if unit != "B" else f"{n:.0f} B"
        n /= 1000
    return f"{n:.4g} GB"


# ---------------------------------------------------------------- devices of a group


class _Devices:
    """Where a program's device numbers lie on the mesh."""

    def __init__(self, mesh: Mesh | AbstractMesh, module: Module) -> None:
        self.axes = dict(mesh.shape)
        count = math.prod(self.axes.values())
        program = max(module.partitions, module.replicas)
        if min(module.partitions, module.replicas) > 1:
            raise ValueError(
                f"the program has {module.replicas} replicas of {module.partitions} partitions; "
                "programs of jax.jit have one of the two."
            )
        self.partitioned = module.partitions > 1
        ops = (x for c in module.computations.values() for x in c if x.op == "send")
        sliced = program < count and any(hlo.transfer(x) for x in ops)
        if program != count and not (sliced and count % program == 0):
            raise ValueError(
                f"the program is for {program} devices, the mesh has {count}: {self.axes}. Pass "
                "the mesh it was compiled for."
            )
        # Without devices that know their slice: leading mesh axes go over slices.
        slices: list[Any] = [i // program for i in range(count)]
        ids = list(range(count))
        if sliced and not isinstance(mesh, AbstractMesh):
            found = [getattr(d, "slice_index", None) for d in mesh.devices.flat]
            if None not in found and len(set(found)) == count // program:
                slices, ids = found, [d.id for d in mesh.devices.flat]
        self.slices = [[i for i in range(count) if slices[i] == s] for s in sorted(set(slices))]
        self.by_id = {
            (s + 1) * hlo.SLICE_STRIDE + k: i
            for s, members in enumerate(self.slices)
            for k, i in enumerate(sorted(members, key=lambda i: ids[i]))
        }

    def groups(self, x: Instruction, op: str) -> list[tuple[int, ...]]:
        """Groups (pairs of a permutation) of places in the mesh's row-major order."""
        transfer = hlo.transfer(x) if x.op == "send" else None
        if transfer:
            return [tuple(self.by_id[i] for i in g) for g in transfer.groups]
        found = hlo.groups(x.attrs)
        channel = "channel_id=" in x.attrs
        if self.partitioned and not channel and op != "collective-permute" and x.op != "send":
            return []  # Over replicas, of which there is one.
        over_replicas = op in ("all-reduce", "all-gather", "reduce-scatter") and (
            self.partitioned and "use_global_device_ids=true" not in x.attrs
        )
        out = []
        for members in self.slices:
            if found is None or over_replicas:
                out.append(tuple(members))
            else:
                out.extend(tuple(members[i] for i in g) for g in found)
        return out

    def coordinate(self, place: int, axis: str) -> int:
        """Coordinate of a place along an axis."""
        names = list(self.axes)
        inner = math.prod(self.axes[a] for a in names[names.index(axis) + 1 :])
        return place // inner % self.axes[axis]

    def shares(self, op: str, groups: list[tuple[int, ...]]) -> dict[str, float]:
        """Share of a device's bytes that crosses each axis (in the group where it is most)."""
        out = dict.fromkeys(self.axes, 0.0)
        for group in groups:
            if len(group) == 1:
                continue
            prefixes = [
                {tuple(self.coordinate(i, a) for a in list(self.axes)[:k]) for i in group}
                for k in range(len(self.axes) + 1)
            ]
            p, before = len(group), 1
            for axis, prefix in zip(self.axes, prefixes[1:], strict=True):
                now = len(prefix)
                if op == "collective-permute":
                    part = float(before == 1 and now == 2)
                elif "all-to-all" in op:
                    # Peers that share the outer coordinates and differ in this one.
                    part = (p / before - p / now) / (p - 1)
                else:
                    part = (now - before) / (p - 1)
                out[axis] = max(out[axis], part)
                before = now
        return {axis: share for axis, share in out.items() if share}


def _factor(op: str, p: int) -> float:
    """Bytes sent over bytes of the result, ring algorithms."""
    if op == "all-reduce":
        return 2 * (p - 1) / p
    if op == "reduce-scatter":
        return p - 1
    if op in ("collective-permute", "collective-broadcast"):
        return 1
    return (p - 1) / p


# ---------------------------------------------------------------- walk over a program


class _Reader:
    """Collects the collectives of a module."""

    def __init__(self, module: Module, devices: _Devices) -> None:
        self.module, self.devices = module, devices
        self.found: list[Collective] = []
        self._holds: dict[str, bool] = {}

    def holds(self, name: str) -> bool:
        """Whether a computation runs a collective, itself or in what it calls."""
        if name not in self._holds:
            self._holds[name] = False
            self._holds[name] = any(
                _collective_op(x) or any(self.holds(c) for c in x.called)
                for x in self.module.computations.get(name, [])
            )
        return self._holds[name]

    def walk(
        self, name: str, calls: int = 1, counted: bool = True, branch: tuple[Any, ...] = ()
    ) -> None:
        if not self.holds(name):
            return
        body = self.module.computations[name]
        covered: set[int] = set()  # Later parts of an asynchronous fusion.
        for k, x in enumerate(body):
            op = _collective_op(x)
            if op:
                end = _done(body, k)
                arrays = self._arrays(x, None if end is None else body[end])
                pair = x.op.endswith("-start") or x.op == "send"
                self._add(body, x, x, op, arrays, pair, k, end, (calls, counted, branch))
            elif x.op == "fusion" and k not in covered:
                for inner in self._inside(x):
                    self._add_fused(body, x, inner, k, covered, (calls, counted, branch))
            elif x.op == "while":
                trips = hlo.trip_count(self.module, body, x)
                times = calls * (1 if trips is None else trips)
                for c in x.called:
                    self.walk(c, times, counted and trips is not None, branch)
            elif x.op == "conditional":
                for index, c in self._branches(x):
                    self.walk(c, calls, counted, (*branch, (x.name, index)))
            elif x.op != "fusion":
                wrapped = x.op == "async-start"
                before = len(self.found)
                for c in x.called:
                    self.walk(c, calls, counted, branch)
                if wrapped:
                    between = self._between(body, k, _done(body, k))
                    self.found[before:] = [
                        dataclasses.replace(c, asynchronous=True, overlapped=between)
                        for c in self.found[before:]
                    ]

    def _inside(self, x: Instruction) -> Iterator[Instruction]:
        for name in x.called:
            if self.holds(name):
                for inner in self.module.computations[name]:
                    if _collective_op(inner):
                        yield inner
                    elif inner.called:
                        yield from self._inside(inner)

    def _add_fused(
        self,
        body: list[Instruction],
        x: Instruction,
        inner: Instruction,
        k: int,
        covered: set[int],
        run: tuple[Any, ...],
    ) -> None:
        """TPU: fused all-reduce-scatter, and starts, steps and ends of asynchronous fusions."""
        op, arrays, end = _collective_op(inner), inner.arrays, None
        if any("all-reduce-scatter" in c for c in x.called) and op == "all-reduce":
            op, arrays = "reduce-scatter", x.arrays
        started = x.name.startswith("async-collective-start")
        if started:
            same = (inner.op, _channel(inner))
            for j in range(k + 1, len(body)):
                parts = [(i.op, _channel(i)) for i in self._inside(body[j])]
                if same in parts:
                    covered.add(j)
                    if body[j].name.startswith("async-collective-done"):
                        end = j
                        break
        assert op is not None
        self._add(body, x, inner, op, arrays, started, k, end, run)

    def _branches(self, x: Instruction) -> list[tuple[int, str]]:
        """Branches with JAX's numbers (XLA may have turned the predicate round)."""
        numbered = []
        swap = "true_computation" in x.attrs
        for k, c in enumerate(x.called):
            found = None
            for i in self.module.computations.get(c, []):
                inside = re.search(r"branch_(\d+)_fun", i.op_name)
                if inside and i.op != "parameter":
                    found = int(inside[1])
                    break
            numbered.append((1 - k if swap else k, found, c))
        jax_numbers = [f for _, f, _ in numbered]
        use = None not in jax_numbers and len(set(jax_numbers)) == len(numbered)
        return [(f if use and f is not None else k, c) for k, f, c in numbered]

    def _arrays(self, x: Instruction, done: Instruction | None) -> list[Array]:
        if x.op == "send":
            return x.arrays[:1]
        if not x.op.endswith("-start") or x.op == "all-reduce-start":
            return x.arrays
        if done is not None:
            return done.arrays
        # (operands, results, contexts): halves of what is no context.
        data = [a for a in x.arrays if a.shape or a.dtype != "u32"]
        return data[len(data) // 2 :]

    def _between(self, body: list[Instruction], k: int, end: int | None) -> int | None:
        if end is None or not self.module.scheduled:
            return None
        return sum(
            x.op in _COMPUTE or (x.op == "custom-call" and bool(_KERNEL.search(x.attrs)))
            for x in body[k + 1 : end]
        )

    def _add(
        self,
        body: list[Instruction],
        x: Instruction,
        inner: Instruction,
        op: str,
        arrays: list[Array],
        pair: bool,
        k: int,
        end: int | None,
        run: tuple[Any, ...],
    ) -> None:
        groups = self.devices.groups(inner, op)
        p = max((len(g) for g in groups), default=1)
        if p == 1:
            return
        if x.op == "send":
            factor = {"all-reduce": 2 * (p - 1) / p, "all-gather": p - 1}.get(op, (p - 1) / p)
            factor = 1 if op == "collective-permute" else factor
        else:
            factor = _factor(op, p)
        shares = self.devices.shares(op, groups)
        legs, phase, inferred = self._scopes(body, x, inner, op)
        if len(legs) != len(arrays):
            legs = ["+".join(dict.fromkeys(legs))] * len(arrays)
        rows: dict[tuple[str, str], list[Array]] = {}
        for leg, array in zip(legs, arrays, strict=True):
            rows.setdefault((array.dtype, leg), []).append(array)
        for (dtype, leg), of in rows.items():
            sent = factor * sum(a.bytes for a in of)
            self.found.append(
                Collective(
                    op=op,
                    instruction=x.name,
                    dtype=dtype,
                    size=sum(a.size for a in of),
                    group=p,
                    sent=sent,
                    across={a: sent * share for a, share in shares.items()},
                    leg=leg,
                    leg_inferred=inferred,
                    phase=phase,
                    branch=run[2],
                    calls=run[0],
                    counted=run[1],
                    asynchronous=pair,
                    overlapped=self._between(body, k, end) if pair else None,
                    between_slices=x.op == "send" and hlo.transfer(x) is not None,
                )
            )

    def _scopes(
        self, body: list[Instruction], x: Instruction, named: Instruction, op: str
    ) -> tuple[list[str], str | None, bool]:
        """Legs and phase of a collective, and whether they are those of its neighbours."""
        name = named.op_name or x.op_name
        if name:
            return _legs(name) or ["other"], _phase([name]), False
        where = {y.name: k for k, y in enumerate(body)}
        users: dict[str, list[int]] = {}
        for k, y in enumerate(body):
            for operand in y.operands:
                users.setdefault(operand, []).append(k)
        # Forward to what uses the result, and back to what it was made from; never sideways.
        ahead, behind, seen = {where[x.name]}, {where[x.name]}, set[int]()
        for _ in range(_REACH):
            seen |= ahead | behind
            for k in [k for k in ahead if body[k].op == "send"]:
                end = _done(body, k)
                ahead |= set() if end is None else {end}
            ahead = {j for k in ahead for j in users.get(body[k].name, [])} - seen
            behind = {where[n] for k in behind for n in body[k].operands if n in where} - seen
            names = [n for k in sorted(ahead | behind) for n in self.module.op_names(body[k])]
            legs = {leg for n in names for leg in _legs(n)} & _LEGS_OF.get(op, set())
            if legs:
                return sorted(legs), _phase(names), True
        return ["other"], None, True


def _legs(op_name: str) -> list[str]:
    return [leg.removesuffix("_leg") for leg in _LEG.findall(op_name)]


def _phase(op_names: list[str]) -> str | None:
    found = {phase.removeprefix("phase_") for n in op_names for phase in _PHASE.findall(n)}
    return found.pop() if len(found) == 1 else None


def _collective_op(x: Instruction) -> str | None:
    """The collective that an instruction is, or starts."""
    base = x.op.removesuffix("-start")
    if base in hlo.COLLECTIVES:
        return base
    if x.op == "send":
        transfer = hlo.transfer(x)
        if transfer:
            return transfer.op
        if "source_target_pairs=" in x.attrs:
            return "collective-permute"
    return None


def _channel(x: Instruction) -> str:
    found = re.search(r"channel_id=(\d+)", x.attrs)
    return found[1] if found else ""


def _done(body: list[Instruction], k: int) -> int | None:
    """Where the pair begun at ``k`` ends; for a ``send`` between slices, its ``recv``."""
    x = body[k]
    if not x.op.endswith("-start") and x.op != "send":
        return None
    name, op = x.name, x.op.removesuffix("-start") + "-done"
    if x.op == "send":
        transfer = hlo.transfer(x)
        for y in body:
            other = hlo.transfer(y) if y.op == "recv" and transfer else None
            if other and transfer and other.rendezvous == transfer.rendezvous:
                name, op = y.name, "recv-done"
    for j in range(k + 1, len(body)):
        if body[j].op in (op, "async-done") and name in body[j].operands:
            return j
    return None


def collectives(text: str, mesh: Mesh | AbstractMesh) -> tuple[list[Collective], dict[str, int]]:
    """Collectives of a program, and the sizes of the mesh axes.

    Args:
      text: HLO text.
      mesh: the mesh that the program was compiled for.

    Raises:
      ValueError: see :func:`onebit_zero_jax.wire_report`.
    """
    module = hlo.parse(text)
    devices = _Devices(mesh, module)
    reader = _Reader(module, devices)
    reader.walk(module.entry)
    return reader.found, devices.axes
