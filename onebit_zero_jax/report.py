"""``wire_report``: what a compiled program sends over each mesh axis, read from the program."""

import dataclasses
import math
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from onebit_zero_jax.traffic import Collective, collectives, readable_bytes


@dataclasses.dataclass(frozen=True)
class WireReport:
    """Collectives of a compiled program; ``str(report)`` is a table.

    Totals of a program with conditionals take, of each, the branch that sends most.

    Attributes:
      collectives: in the order of the program.
      axes: sizes of the mesh axes.
      parameters: of the model; None if not given.
    """

    collectives: tuple[Collective, ...]
    axes: dict[str, int]
    parameters: int | None = None

    def _heaviest(self) -> "WireReport":
        rows = _heaviest(list(self.collectives), 0)
        return dataclasses.replace(self, collectives=tuple(rows))

    def sent(self, axis: str | None = None) -> float:
        """Bytes that a device sends per run of the program, over ``axis`` or in all.

        Raises:
          ValueError: the mesh has no such axis.
        """
        if axis is None:
            return sum(c.total for c in self._heaviest().collectives)
        _check_axis(self, axis)
        return sum(c.crossing(axis) for c in self._heaviest().collectives)

    def bits_per_parameter(self, axis: str | None = None) -> float:
        """:meth:`sent` in bits per parameter.

        Raises:
          ValueError: the report was made without ``parameters``.
        """
        if self.parameters is None:
            raise ValueError("bits per parameter need wire_report(..., parameters=...).")
        return 8 * self.sent(axis) / self.parameters

    def legs(self, axis: str | None = None) -> dict[str, float]:
        """:meth:`sent` by leg."""
        out: dict[str, float] = {}
        for c in self._heaviest().collectives:
            n = c.total if axis is None else c.crossing(axis)
            out[c.leg] = out.get(c.leg, 0.0) + n
        return out

    def in_phase(self, phase: str) -> "WireReport":
        """The report without what belongs to the other phase.

        Args:
          phase: ``"dense"`` or ``"compressed"``; the program must name its phases.
        """
        kept = tuple(c for c in self.collectives if c.phase in (None, phase))
        return dataclasses.replace(self, collectives=kept)

    @property
    def branches(self) -> dict[str, "WireReport"]:
        """The report of the program as it runs when a branch of an outermost conditional is taken.

        Keys are ``"name of the conditional/number of the branch"``, numbered as in the
        JAX program: 1 is the true branch of ``lax.cond``. Empty without conditionals.
        """
        keys = sorted({c.branch[0] for c in self.collectives if c.branch})
        out = {}
        for name, index in keys:
            kept = [
                c
                for c in self.collectives
                if not c.branch or c.branch[0][0] != name or c.branch[0][1] == index
            ]
            out[f"{name}/{index}"] = dataclasses.replace(self, collectives=tuple(kept))
        return out

    def _totals(self) -> dict[str, Any]:
        def both(axis: str | None) -> dict[str, float]:
            out = {"bytes": self.sent(axis)}
            if self.parameters is not None:
                out["bits_per_parameter"] = self.bits_per_parameter(axis)
            return out

        return {
            **both(None),
            "axes": {axis: both(axis) for axis in self.axes},
            "legs": self.legs(),
        }

    def to_dict(self) -> dict[str, Any]:
        """The report for ``json.dumps``."""
        rows = []
        for c in self.collectives:
            row = dataclasses.asdict(c)
            row["branch"] = [f"{name}/{i}" for name, i in c.branch]
            rows.append(row)
        return {
            "mesh": dict(self.axes),
            "parameters": self.parameters,
            "totals": self._totals(),
            "branches": {name: r._totals() for name, r in self.branches.items()},
            "collectives": rows,
        }

    def __str__(self) -> str:
        head = ["operation", "dtype", "axes", "leg", "phase", "calls", "bytes/step", "async"]
        table = [head]
        for c in self.collectives:
            overlap = {None: "?", 0: "nothing between"}.get(c.overlapped, f"{c.overlapped} between")
            leg = c.leg + "?" * c.leg_inferred + "".join(f" [{name}/{i}]" for name, i in c.branch)
            table.append(
                [
                    c.op + (" between slices" if c.between_slices else ""),
                    c.dtype,
                    ",".join(c.across),
                    leg,
                    c.phase or "-",
                    f"{c.calls}" + ("" if c.counted else "+"),
                    f"{c.total:,.0f}",
                    overlap if c.asynchronous else "-",
                ]
            )
        widths = [max(len(row[k]) for row in table) for k in range(len(head))]
        right = (5, 6)
        lines = [
            "  ".join(
                x.rjust(w) if k in right else x.ljust(w)
                for k, (x, w) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in table
        ]
        mesh = " x ".join(f"{axis} {n}" for axis, n in self.axes.items())
        lines.append("")
        for name, report in {"": self, **self.branches}.items():
            for axis in self.axes:
                bits = ""
                if self.parameters is not None:
                    bits = f", {report.bits_per_parameter(axis):.3f} bits per parameter"
                where = f" with branch {name}" if name else ""
                lines.append(
                    f"over {axis}{where}: {readable_bytes(report.sent(axis))} per device{bits}"
                )
        if any(c.leg_inferred for c in self.collectives):
            lines.append("?: XLA dropped the name; leg of the nearest instruction that kept one")
        if not all(c.counted for c in self.collectives):
            lines.append("+: a loop whose trip count XLA does not know, counted once")
        return "\n".join([f"mesh {mesh}; bytes that a device sends per run", *lines])


def _heaviest(rows: list[Collective], depth: int) -> list[Collective]:
    kept = [c for c in rows if len(c.branch) == depth]
    conditionals: dict[str, dict[int, list[Collective]]] = {}
    for c in rows:
        if len(c.branch) > depth:
            name, index = c.branch[depth]
            conditionals.setdefault(name, {}).setdefault(index, []).append(c)
    for options in conditionals.values():
        branches = [_heaviest(rows, depth + 1) for rows in options.values()]
        kept.extend(max(branches, key=lambda rows: sum(c.total for c in rows)))
    return kept


def _check_axis(report: WireReport, axis: str) -> None:
    if axis not in report.axes:
        raise ValueError(f"the mesh has axes {tuple(report.axes)}, not {axis!r}.")


# ---------------------------------------------------------------- public


def wire_report(compiled: Any, mesh: Mesh | AbstractMesh, parameters: Any = None) -> WireReport:
    r"""Every collective of a compiled program: dtype, bytes, mesh axes, leg, phase, calls.

    Bytes are what one device sends, by ring algorithms among the p devices of a group::

        all-gather (p - 1)/p of the result    reduce-scatter, all-to-all (p - 1)/p of the operand
        all-reduce 2 (p - 1)/p                collective-permute          all of it

    A collective over several mesh axes is counted as if done axis by axis, the fast ones
    within the slow ones: every byte crosses the outermost axis along which sender and
    receiver differ. An all-gather over (slow, fast) sends ``slow - 1`` chunks across the slow
    axis and ``slow (fast - 1)`` across the fast one. Mesh axes are taken as ordered from slow
    to fast. XLA works so between TPU slices; one plain ring over hosts sends up to twice that
    over the slow axis.

    Collectives in loops count times the trip count; both branches of a conditional are
    reported apart, and totals take the heavier one. A start and its done are one
    collective. Between TPU slices XLA sends through ``send``/``recv`` and splits a
    collective in two, within slices and between; both parts are reported. The legs are
    named scopes of this package. Where XLA dropped a name, the leg is that of the nearest
    instruction that kept one.

    Args:
      compiled: ``jax.stages.Compiled`` of any backend, or its HLO text.
      mesh: the mesh that the program was compiled for.
      parameters: number of parameters, or their tree, for bits per parameter.

    Returns:
      A :class:`WireReport`.

    Raises:
      ValueError: no HLO text, a program for another number of devices, an unknown
        notation of device groups.

    Example:
      >>> auto = (jax.sharding.AxisType.Auto,)
      >>> mesh = jax.make_mesh((4,), ("data",), auto, devices=jax.devices()[:4])
      >>> f = jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh,
      ...     in_specs=jax.P("data"), out_specs=jax.P())
      >>> report = wire_report(jax.jit(f).lower(jax.numpy.ones(16)).compile(), mesh)
      >>> [(c.op, c.dtype, c.sent, c.leg) for c in report.collectives], report.sent("data")
      ([('all-reduce', 'f32', 24.0, 'other')], 24.0)
    """
    if not isinstance(mesh, (Mesh, AbstractMesh)):
        raise ValueError(f"mesh must be a jax.sharding.Mesh, got {mesh!r}.")
    text = compiled
    if not isinstance(compiled, str):
        if not isinstance(compiled, jax.stages.Compiled):
            raise ValueError(
                f"compiled must be jit(f).lower(...).compile() or its text, got {compiled!r}."
            )
        text = compiled.as_text()
    if not text:
        raise ValueError("this backend gives no text of its compiled programs.")
    if parameters is not None and not isinstance(parameters, int):
        parameters = sum(math.prod(x.shape) for x in jax.tree.leaves(parameters))
    if parameters is not None and (isinstance(parameters, bool) or parameters < 1):
        raise ValueError(f"parameters must be a positive number or a tree, got {parameters!r}.")
    found, axes = collectives(text, mesh)
    return WireReport(tuple(found), axes, parameters)


def assert_compressed(
    report: WireReport,
    axis: str,
    *,
    max_other: float = 0.1,
    max_bits: float | None = None,
    phase: str | None = None,
) -> None:
    """Raises unless what crosses ``axis`` is packed into uint8; for your own tests.

    uint8 alone proves no compression (``gather_bits="dense"`` sends values as bytes):
    give ``max_bits`` too where the model's dense leaves and metrics (4 KB) are small.

    Args:
      report: of the step's program; with ``lax.cond`` every branch must pass.
      axis: mesh axis.
      max_other: largest share of the bytes crossing ``axis`` that is not uint8: vectors,
        small matrices, flags and metrics stay float32.
      max_bits: largest bits per parameter crossing ``axis``; None: not checked.
      phase: ``"compressed"`` leaves out what the program marks as the dense phase.

    Raises:
      AssertionError: a bound is broken (the message names the largest offender), or
        nothing crosses the axis at all.
      ValueError: unknown axis or phase, bounds out of range.

    Example:
      >>> text = '''HloModule f, num_partitions=2
      ... ENTRY %main (x: f32[4]) -> f32[4] {
      ...   ROOT %y = f32[4] all-reduce(%x), channel_id=1, replica_groups={{0,1}},\
 use_global_device_ids=true
      ... }'''
      >>> report = wire_report(text, jax.sharding.AbstractMesh((2,), ("data",)))
      >>> assert_compressed(report, "data")
      Traceback (most recent call last):
      AssertionError: 100.0 % of the bytes over 'data' are not uint8 (at most 10.0 %); the
      largest: all-reduce %y (f32[4], leg other, 1 call, 16 B).
    """
    if not isinstance(report, WireReport):
        raise ValueError(f"report must come from wire_report, got {report!r}.")
    _check_axis(report, axis)
    if phase not in (None, "dense", "compressed"):
        raise ValueError(f"phase must be 'dense', 'compressed' or None, got {phase!r}.")
    if not 0 <= max_other < 1:
        raise ValueError(f"max_other is a share, at least 0 and below 1, got {max_other!r}.")
    if max_bits is not None and report.parameters is None:
        raise ValueError("max_bits needs wire_report(..., parameters=...).")
    if phase is not None:
        report = report.in_phase(phase)
    for name, taken in (report.branches or {"": report}).items():
        _assert_compressed(taken._heaviest(), axis, max_other, max_bits, name)


def _assert_compressed(
    report: WireReport, axis: str, max_other: float, max_bits: float | None, branch: str
) -> None:
    where = f" with branch {branch}" if branch else ""

    def largest(rows: list[Collective]) -> str:
        return max(rows, key=lambda c: c.crossing(axis)).describe()

    rows = [c for c in report.collectives if c.crossing(axis)]
    if not rows:
        raise AssertionError(f"nothing crosses axis {axis!r}{where}: is this the right program?")
    other = [c for c in rows if c.dtype != "u8"]
    share = sum(c.crossing(axis) for c in other) / sum(c.crossing(axis) for c in rows)
    if share > max_other:
        raise AssertionError(
            f"{100 * share:.1f} % of the bytes over {axis!r}{where} are not uint8 (at most "
            f"{100 * max_other:.1f} %); the largest: {largest(other)}."
        )
    if max_bits is None:
        return
    unknown = [c for c in rows if not c.counted]
    if unknown:
        raise AssertionError(
            f"a loop of unknown trip count sends over {axis!r}: {largest(unknown)}; its bits per "
            "parameter have no bound."
        )
    bits = report.bits_per_parameter(axis)
    if bits > max_bits:
        raise AssertionError(
            f"{bits:.2f} bits per parameter cross {axis!r}{where} (at most {max_bits}); the "
            f"largest: {largest(rows)}."
        )
