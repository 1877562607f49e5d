"""``plan``: memory, bytes and communication time of a run, from formulas, before any machine."""

import dataclasses
import math
from typing import Any

from onebit_zero_jax import formulas
from onebit_zero_jax.config import ZeroConfig
from onebit_zero_jax.formulas import Bytes, Mesh
from onebit_zero_jax.phases import Phases


def plan(
    params: Any,
    axes: int | tuple[int, int],
    *,
    stage: int = 2,
    gather: Any = None,
    gather_bits: Any = None,
    error_dtype: Any = "float32",
    momentum_dtype: Any = "float32",
    param_dtype: Any = "float32",
    steps: int = 10_000,
    warmup_steps: int = 1500,
    refresh: int | None = 32,
    slow_gbps: float | None = None,
    fast_gbps: float | None = None,
    tokens: int | None = None,
    compute_seconds: float | None = None,
    flops: float | None = None,
    memory_gbytes: float = 819.0,
    coding_seconds: float | None = None,
) -> "Plan":
    r"""Memory, bytes per step, communication time and whether compression pays.

    Bytes are those one device sends, counted as :func:`wire_report` counts them. On a
    mesh (slow S, fast L), N = S L, per parameter and without padding and scales::

        compressed   slow (S-1)/N (1 + bits)/8    fast (L-1)/L 4 + (L-1)/L bits/8
        dense bf16   slow (S-1)/N 4               fast (L-1)/L 4

    One axis is S = N, L = 1. Times add up compute, coding and communication, without
    overlap and latency. Coding is estimated as 2.1 times its minimal memory traffic.

    Args:
      params: number of parameters (a matrix and 0.1 % of vectors stand in for the
        model), or the tree: arrays or ``jax.ShapeDtypeStruct``.
      axes: devices on the data axis, or on (slow, fast).
      stage: 0 to 3. Stage 3 shards parameters over the fast axis, or over the one
        there is, and gathers every layer twice a step (``layer`` in the loss).
      gather, gather_bits, error_dtype, momentum_dtype: as in :class:`ZeroConfig`.
      param_dtype: of the replicas, if ``params`` is a number.
      steps, warmup_steps, refresh: of the run, for its average.
      slow_gbps: Gbit/s that each *device* can send over the slow axis (a host's link
        divided by its devices); None: no times, but the break-even.
      fast_gbps: the same for the fast axis; needed with it.
      tokens: tokens per step of all devices, for tokens per second.
      compute_seconds: forward and backward pass of one step; None: from ``flops``.
      flops: FLOP/s that one device achieves; with ``tokens``, compute is
        ``6 parameters tokens / (N flops)``.
      memory_gbytes: GB/s of device memory (819: TPU v5e; 3350: H100), for coding.
      coding_seconds: coding time of a step, measured; None: estimated.

    Returns:
      A :class:`Plan`.

    Raises:
      ValueError: a value out of range; the message names it.

    Example:
      >>> p = plan(1_000_000_000, 8, slow_gbps=10)
      >>> round(p.bits["compressed"], 2), round(p.bits["dense bf16"], 2), p.pays
      (4.48, 28.0, True)
    """
    slow, fast = _check_axes(axes)
    n = slow * fast
    if type(stage) is not int or not 0 <= stage <= 3:
        raise ValueError(f"stage must be 0, 1, 2 or 3, got {stage!r}.")
    zero = ZeroConfig(
        axis_name="slow" if fast == 1 else ("slow", "fast"),
        stage=stage,
        gather=gather,
        gather_bits=gather_bits,
        error_dtype=error_dtype,
        momentum_dtype=momentum_dtype,
    )
    for name, value in (
        ("slow_gbps", slow_gbps),
        ("fast_gbps", fast_gbps),
        ("flops", flops),
        ("memory_gbytes", memory_gbytes),
    ):
        _check(name, value, lambda x: 0 < x < math.inf, "positive and finite")
    for name, value in (("compute_seconds", compute_seconds), ("coding_seconds", coding_seconds)):
        _check(name, value, lambda x: 0 <= x < math.inf, "finite and at least 0")
    for name, whole, least in (
        ("steps", steps, 1),
        ("warmup_steps", warmup_steps, 1),
        ("refresh", refresh, 1),
        ("tokens", tokens, 1),
    ):
        if whole is not None and (type(whole) is not int or whole < least):
            raise ValueError(f"{name} must be an integer of at least {least}, got {whole!r}.")
    if warmup_steps > steps:
        raise ValueError(f"warmup_steps={warmup_steps} exceeds steps={steps}.")
    if slow_gbps is not None and fast > 1 and fast_gbps is None:
        raise ValueError(f"with {fast} devices on the fast axis fast_gbps is needed too.")
    if flops is not None and tokens is None:
        raise ValueError("flops needs tokens: compute is 6 parameters tokens / (devices flops).")

    tree = formulas.tree_of(params, param_dtype)
    mesh = Mesh(slow, fast, flat=zero.flat, sharded=stage == 3)
    count = formulas.count_of(tree)
    layout = formulas.layout_of(tree, zero, mesh)
    dense_steps = sum(Phases(warmup_steps, refresh).is_dense(t) for t in range(steps))
    if compute_seconds is None:
        compute_seconds = 0.0 if flops is None else 6.0 * count * (tokens or 0) / (n * flops)
    wire = {
        "compressed": formulas.bytes_sent(layout, zero, mesh, dense=False),
        "dense step": formulas.bytes_sent(layout, zero, mesh, dense=True),
        "dense bf16": formulas.baseline(count, mesh),
    }
    if coding_seconds is None:
        coding_seconds = formulas.coding_bytes(layout, zero) / (memory_gbytes * 1e9)
    return Plan(
        parameters=count,
        slow=slow,
        fast=fast,
        stage=stage,
        gather=f"{zero.gather_mode}, {zero.bits}" + (" bits" if zero.bits != "dense" else ""),
        memory=formulas.memory(tree, zero, mesh),
        dense_memory=formulas.dense_memory(count, mesh),
        wire=wire,
        dense_fraction=dense_steps / steps,
        slow_gbps=slow_gbps,
        fast_gbps=fast_gbps,
        tokens=tokens,
        compute_seconds=compute_seconds,
        coding_seconds=coding_seconds,
    )


@dataclasses.dataclass(frozen=True)
class Plan:
    """What :func:`plan` found; ``str(plan)`` is a table.

    Attributes:
      parameters, slow, fast, stage, gather: what was asked for.
      memory: persistent bytes per device by item.
      dense_memory: the same of dense bf16 ZeRO, float32 master and moments sharded.
      wire: bytes a device sends per step, ``[kind][leg][axis]``; kinds ``"compressed"``
        and ``"dense step"`` (warm-up and refreshes), and the baseline ``"dense bf16"``.
      dense_fraction: share of dense steps in the run.
      slow_gbps, fast_gbps: Gbit/s per device.
      tokens, compute_seconds, coding_seconds: per step.
    """

    parameters: int
    slow: int
    fast: int
    stage: int
    gather: str
    memory: dict[str, float]
    dense_memory: dict[str, float]
    wire: dict[str, Bytes]
    dense_fraction: float
    slow_gbps: float | None
    fast_gbps: float | None
    tokens: int | None
    compute_seconds: float
    coding_seconds: float

    def sent(self, kind: str, axis: str) -> float:
        """Bytes a device sends over ``"slow"`` or ``"fast"``; ``kind`` of ``wire`` or "average"."""
        if kind == "average":
            f = self.dense_fraction
            return f * self.sent("dense step", axis) + (1 - f) * self.sent("compressed", axis)
        return sum(by_axis[axis] for by_axis in self.wire[kind].values())

    @property
    def bits(self) -> dict[str, float]:
        """Bits per parameter that a device sends over the slow axis, by kind."""
        kinds = ("compressed", "dense step", "average", "dense bf16")
        return {k: 8 * self.sent(k, "slow") / self.parameters for k in kinds}

    def communication_seconds(self, kind: str, slow_gbps: float | None = None) -> float:
        """Time to send, both axes one after the other.

        Raises:
          ValueError: no bandwidth is known.
        """
        slow_gbps = slow_gbps or self.slow_gbps
        if slow_gbps is None:
            raise ValueError("times need slow_gbps.")
        time = 8 * self.sent(kind, "slow") / (slow_gbps * 1e9)
        if self.fast_gbps is not None:
            time += 8 * self.sent(kind, "fast") / (self.fast_gbps * 1e9)
        return time

    def step_seconds(self, kind: str, slow_gbps: float | None = None) -> float:
        """Compute, coding and communication, one after the other."""
        coding = 0.0 if kind == "dense bf16" else self.coding_seconds
        return self.compute_seconds + coding + self.communication_seconds(kind, slow_gbps)

    @property
    def break_even_gbps(self) -> float:
        """Gbit/s per device over the slow axis below which compression pays, on average.

        ``inf``: at any; 0: at none.
        """
        saved = 8e-9 * (self.sent("dense bf16", "slow") - self.sent("average", "slow"))
        spent = self.coding_seconds
        if self.fast_gbps is not None:
            more = self.sent("average", "fast") - self.sent("dense bf16", "fast")
            spent += 8e-9 * more / self.fast_gbps
        if saved <= 0:
            return 0.0
        return saved / spent if spent > 0 else math.inf

    @property
    def pays(self) -> bool | None:
        """Whether an average step is faster than a dense one; None without a bandwidth."""
        if self.slow_gbps is None:
            return None
        return self.step_seconds("average") < self.step_seconds("dense bf16")

    @property
    def recommendation(self) -> str:
        """What to do, in plain words."""
        at = self.break_even_gbps
        if at == 0:
            out = ["Compression does not pay at any bandwidth."]
        elif math.isinf(at):
            out = ["Compression pays at any bandwidth."]
        else:
            out = [f"Compression pays below {at:.3g} Gbit/s per device over the slow axis."]
        if self.pays is not None:
            dense, ours = self.step_seconds("dense bf16"), self.step_seconds("average")
            if self.pays:
                out.append(
                    f"At {self.slow_gbps:g} Gbit/s a step takes {ours:.3g} s instead of "
                    f"{dense:.3g} s: {dense / ours:.2f} times faster."
                )
            else:
                out.append(
                    f"Dense is faster here ({dense:.3g} s against {ours:.3g} s a step): use jit "
                    "with NamedSharding."
                )
        more = sum(self.memory.values()) - sum(self.dense_memory.values())
        if more > 0:
            out.append(
                f"It costs {more / 1e9:.3g} GB of memory per device over dense bf16 ZeRO; "
                "error_dtype, momentum_dtype and a fast axis make it less."
            )
        if self.stage == 3 and self.fast == 1:
            worker = self.memory["worker error"] + self.memory["worker momentum"]
            out.append(
                "Flat stage 3 is a bad idea: parameters are gathered densely over the slow axis, "
                f"twice per step, and {worker / 1e9:.3g} GB of worker state stay whole on every "
                "device. Give the mesh a fast axis, or use stage 2."
            )
        return " ".join(out)

    def to_dict(self) -> dict[str, Any]:
        """The plan for ``json.dumps``; an infinite break-even is None."""
        at = self.break_even_gbps
        out: dict[str, Any] = dataclasses.asdict(self)
        out["bits_per_parameter_slow"] = self.bits
        out["break_even_gbps"] = None if math.isinf(at) else at
        if self.slow_gbps is not None:
            kinds = (*self.wire, "average")
            out["communication_seconds"] = {k: self.communication_seconds(k) for k in kinds}
            out["step_seconds"] = {k: self.step_seconds(k) for k in kinds}
        out["pays"] = self.pays
        out["recommendation"] = self.recommendation
        return out

    def __str__(self) -> str:
        where = f"{self.slow}" if self.fast == 1 else f"{self.slow} slow x {self.fast} fast"
        lines = [
            f"{self.parameters:,} parameters on {where} devices, stage {self.stage}, gather "
            f"{self.gather}; {100 * self.dense_fraction:.1f} % of the steps dense",
            "",
            f"{'persistent bytes per device':34}{'GB':>10}{'B/param':>10}",
        ]
        for name, n in self.memory.items():
            lines.append(f"  {name:32}{n / 1e9:10.3f}{n / self.parameters:10.3f}")
        for name, memory in (("total", self.memory), ("dense bf16 ZeRO", self.dense_memory)):
            n = sum(memory.values())
            lines.append(f"  {name:32}{n / 1e9:10.3f}{n / self.parameters:10.3f}")
        axes = ["slow"] if self.fast == 1 else ["slow", "fast"]
        head = "".join(f"{f'MB over {a}':>16}" for a in axes)
        lines += ["", f"{'bytes a device sends per step':34}{head}{'bits/param slow':>18}"]
        for kind in ("compressed", "dense step", "average", "dense bf16"):
            row = "".join(f"{self.sent(kind, a) / 1e6:16.3f}" for a in axes)
            lines.append(f"  {kind:32}{row}{self.bits[kind]:18.3f}")
            for leg, by_axis in self.wire.get(kind, {}).items():
                row = "".join(f"{by_axis[a] / 1e6:16.3f}" for a in axes)
                lines.append(f"    {leg:30}{row}")
        if self.slow_gbps is not None:
            unit = f"{self.slow_gbps:g} Gbit/s slow"
            unit += f", {self.fast_gbps:g} fast" if self.fast_gbps is not None else ""
            lines += ["", f"{f'ms per step at {unit}':34}{'communication':>16}{'step':>16}"]
            for kind in ("compressed", "dense step", "average", "dense bf16"):
                step = self.step_seconds(kind)
                rate = f"{self.tokens / step:18,.0f} tokens/s" if self.tokens and step else ""
                comm = 1e3 * self.communication_seconds(kind)
                lines.append(f"  {kind:32}{comm:16.3f}{1e3 * step:16.3f}{rate}")
            lines.append(
                f"  of it compute {1e3 * self.compute_seconds:.3f}, "
                f"coding {1e3 * self.coding_seconds:.3f}"
            )
        return "\n".join([*lines, "", self.recommendation])


def _check(name: str, value: Any, ok: Any, wanted: str) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not ok(value):
        raise ValueError(f"{name} must be {wanted}, got {value!r}.")


def _check_axes(axes: Any) -> tuple[int, int]:
    sizes = axes if isinstance(axes, tuple) else (axes, 1)
    if len(sizes) != 2 or any(type(x) is not int or x < 1 for x in sizes):
        raise ValueError(
            f"axes must be the devices on the data axis, or (slow, fast), got {axes!r}."
        )
    return sizes
