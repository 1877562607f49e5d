"""Console script ``onebit-zero``: plans a run, compiles it for a pod."""

import argparse
import json
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import jax

from onebit_zero_jax.plan import Plan, plan

_UNITS = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_CHARTS = (".png", ".svg", ".pdf")


def _count(text: str) -> int:
    """``"350m"``, ``"1.3b"``, ``"1e9"``, ``"524288"``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)([kmbt]?)", text.lower().replace(",", ""))
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no number such as 350m, 1.3b or 1e9")
    return round(float(match[1]) * _UNITS[match[2]])


def _bits(text: str) -> int | str:
    return int(text) if text.isdigit() else text


def _refresh(text: str) -> int | None:
    if text != "none" and not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of steps nor none")
    return None if text == "none" else int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="onebit-zero", description="ZeRO with about one bit per parameter on the slow links."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    p = commands.add_parser(
        "plan",
        help="memory, bytes per step and communication time of a run, and whether it pays",
        description="Memory, bytes per step and communication time of a run, from formulas.",
    )
    add = p.add_argument
    add("--params", type=_count, required=True, help="number of parameters: 350m, 1.3b, 1e9")
    add("--devices", type=int, help="devices on the data axis, if there is one")
    add("--slow", type=int, help="devices on the slow axis of a two-speed mesh")
    add("--fast", type=int, help="devices on the fast axis of a two-speed mesh")
    add("--stage", type=int, default=2, help="0 to 3 (default 2)")
    add("--gather", help="params or momentum (default: the stage's)")
    add("--gather-bits", type=_bits, help="1, 2, 3, 4, 8 or dense (default: 4 or 1)")
    add("--error-dtype", default="float32", help="float32, bfloat16 or int8")
    add("--momentum-dtype", default="float32", help="float32 or bfloat16")
    add("--param-dtype", default="float32", help="dtype of the replicas")
    add("--steps", type=_count, default=10_000, help="steps of the run (default 10000)")
    add("--warmup-steps", type=_count, help="dense steps at the start (default 15 %%)")
    add("--refresh", type=_refresh, default=32, help="steps between refreshes, or none")
    add("--slow-gbps", type=float, help="Gbit/s that each device sends over the slow axis")
    add("--host-gbps", type=float, help="in its place: Gbit/s of a host's link")
    add("--devices-per-host", type=int, help="devices that share a host's link")
    add("--fast-gbps", type=float, help="Gbit/s that each device sends over the fast axis")
    add("--tokens", type=_count, help="tokens per step of all devices")
    add("--compute-ms", type=float, help="forward and backward pass of a step")
    add("--flops", type=float, help="in its place: FLOP/s that a device achieves")
    add("--memory-gbytes", type=float, default=819.0, help="GB/s of device memory (default: v5e)")
    add("--coding-ms", type=float, help="measured time of coding (default: estimated)")
    add("--json", action="store_true", help="print JSON")
    add("--chart", type=pathlib.Path, help="write a chart: .png, .svg or .pdf")
    c = commands.add_parser(
        "compile",
        help="compile the train step of a transformer for a pod that is not here",
        description="Compiles the train step of a scanned transformer ahead of time and prints "
        "the wire report, memory and compile time. Needs libtpu, or jax[cuda12]; no chip.",
    )
    add = c.add_argument
    add("--target", required=True, help="tpu:v5e:16x16 (one slice), gpu:h100:HOSTSxGPUS")
    add("--slices", type=int, default=1, help="TPU slices (default 1)")
    add("--model", default="1b", help="10m, 100m, 1b or 7b (default 1b)")
    add("--phase", choices=("compressed", "dense"), default="compressed")
    add("--stage", type=int, default=2, help="0 to 3 (default 2)")
    add("--gather", help="params or momentum (default: the stage's)")
    add("--gather-bits", type=_bits, help="1, 2, 3, 4, 8 or dense (default: 4 or 1)")
    add("--error-dtype", default="float32", help="float32, bfloat16 or int8")
    add("--momentum-dtype", default="float32", help="float32 or bfloat16")
    add("--sequences", type=int, default=1, help="sequences per device (default 1)")
    add("--length", type=int, default=1024, help="tokens of a sequence (default 1024)")
    return parser


def _compile(args: argparse.Namespace) -> Any:
    from onebit_zero_jax import pods

    names = ("stage", "gather", "gather_bits", "error_dtype", "momentum_dtype")
    try:
        return pods.compile_step(
            args.target,
            args.model,
            slices=args.slices,
            phase=args.phase,
            sequences=args.sequences,
            length=args.length,
            **{name: getattr(args, name) for name in names},
        )
    except NotImplementedError as e:
        raise ValueError(str(e)) from e


def _plan(args: argparse.Namespace) -> Plan:
    two = (args.slow, args.fast)
    if (args.devices is None) == (two == (None, None)) or two.count(None) == 1:
        raise ValueError("give --devices, or --slow and --fast.")
    slow_gbps = args.slow_gbps
    if (args.host_gbps is None) != (args.devices_per_host is None):
        raise ValueError("--host-gbps and --devices-per-host go together.")
    if args.host_gbps is not None:
        if slow_gbps is not None:
            raise ValueError("give --slow-gbps (per device) or --host-gbps, not both.")
        if args.devices_per_host < 1:
            raise ValueError(f"--devices-per-host must be at least 1, got {args.devices_per_host}.")
        slow_gbps = args.host_gbps / args.devices_per_host
    if args.compute_ms is not None and args.flops is not None:
        raise ValueError("give --compute-ms or --flops, not both.")
    if args.chart is not None:
        _check_chart(args.chart)
        if slow_gbps is None and args.fast is not None and args.fast_gbps is None:
            raise ValueError("the chart of a two-speed mesh needs --fast-gbps.")

    def seconds(ms: float | None) -> float | None:
        return None if ms is None else ms / 1e3

    warmup = args.warmup_steps
    return plan(
        args.params,
        args.devices if args.devices is not None else two,
        stage=args.stage,
        gather=args.gather,
        gather_bits=args.gather_bits,
        error_dtype=args.error_dtype,
        momentum_dtype=args.momentum_dtype,
        param_dtype=args.param_dtype,
        steps=args.steps,
        warmup_steps=max(1, args.steps * 15 // 100) if warmup is None else warmup,
        refresh=args.refresh,
        slow_gbps=slow_gbps,
        fast_gbps=args.fast_gbps,
        tokens=args.tokens,
        compute_seconds=seconds(args.compute_ms),
        flops=args.flops,
        memory_gbytes=args.memory_gbytes,
        coding_seconds=seconds(args.coding_ms),
    )


def _check_chart(path: pathlib.Path) -> None:
    if path.suffix not in _CHARTS:
        raise ValueError(f"--chart must end in one of {', '.join(_CHARTS)}, got {str(path)!r}.")
    if not path.parent.is_dir():
        raise ValueError(f"--chart: there is no folder {str(path.parent)!r}.")
    try:
        import matplotlib  # noqa: F401
    except ImportError as e:
        raise ValueError(
            "--chart needs matplotlib: pip install 'onebit-zero-jax[examples]'."
        ) from e


def draw(found: Plan, path: pathlib.Path) -> None:
    """Writes a chart of step time against bandwidth, dense and compressed.

    Args:
      found: of :func:`plan`.
      path: file to write, its suffix says as what.
    """
    from matplotlib.figure import Figure

    bandwidths = [10 ** (k / 20 - 2) for k in range(101)]  # 10 Mbit/s to 1 Tbit/s
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes: Any = figure.subplots()
    labels = {
        "dense bf16": "dense bf16 ZeRO",
        "average": f"compressed, average ({100 * found.dense_fraction:.0f} % dense steps)",
        "compressed": "compressed, steady state",
    }
    for kind, style in zip(labels, ("k-", "C0-", "C0--"), strict=True):
        times = [found.step_seconds(kind, b) for b in bandwidths]
        axes.loglog(bandwidths, times, style, label=labels[kind])
    at = found.break_even_gbps
    if bandwidths[0] < at < bandwidths[-1]:
        axes.axvline(at, color="C1", linestyle=":", label=f"break-even, {at:.3g} Gbit/s")
    if found.slow_gbps is not None:
        axes.axvline(found.slow_gbps, color="0.6", linewidth=0.8)
    axes.set_xlabel("bandwidth of the slow axis, Gbit/s per device")
    axes.set_ylabel("seconds per step")
    where = f"{found.slow}" if found.fast == 1 else f"{found.slow} x {found.fast}"
    axes.set_title(f"{found.parameters:,} parameters, {where} devices, stage {found.stage}")
    axes.grid(True, which="both", linewidth=0.3)
    axes.legend()
    # A chart that cannot be written leaves no half of one behind.
    handle, name = tempfile.mkstemp(suffix=path.suffix, dir=path.parent)
    os.close(handle)
    try:
        figure.savefig(name)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the console script.

    Args:
      arguments: of the command line; None: those of the process.
    """
    # Shapes are all that is computed, take no accelerator.
    if "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")
    parser = _parser()
    args = parser.parse_args(arguments)
    try:
        found = _plan(args) if args.command == "plan" else _compile(args)
    except ValueError as e:
        parser.error(str(e))
    if args.command == "compile":
        print(found)
        return
    if args.chart is not None:
        draw(found, args.chart)
    if args.json:
        json.dump(found.to_dict(), sys.stdout, indent=2)
        print()
    else:
        print(found)


if __name__ == "__main__":
    main()
