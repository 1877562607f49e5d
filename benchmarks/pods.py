"""Train steps compiled ahead of time for pods of up to 4096 chips: wire, memory, compile time.

    python benchmarks/pods.py [--only TEXT] [--limit 800] [--results benchmarks/results/pods.jsonl]
    python benchmarks/pods.py --table        # the table of docs/pods.md from the results
    python benchmarks/pods.py --depth tpu:v5e:2x4 --slices 2     # temporaries of stage 3 by depth

TPU rows need libtpu, GPU rows jax[cuda12]; no chip. Every row runs in a process of its own
under a time limit; one that fails is a row that says so. A row measured again replaces the
old one. The compressed phase, bfloat16 compute, one sequence of 256 tokens a chip.
"""

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

LENGTH = 256
RESULTS = pathlib.Path(__file__).parent / "results" / "pods.jsonl"
# An all-reduce above this is no dense leaf and no metric of these models.
SMALL = 1 << 18
SMALL_LEGS = {"dense_leaves", "metrics", "weights"}


@dataclasses.dataclass(frozen=True)
class Row:
    """One program."""

    target: str
    slices: int
    model: str
    stage: int

    @property
    def name(self) -> str:
        return f"{self.target} x {self.slices}, {self.model}, stage {self.stage}"


ROWS = [
    Row("tpu:v5e:2x4", 2, "10m", 2),
    Row("tpu:v5e:16x16", 4, "100m", 2),
    Row("tpu:v5e:16x16", 4, "100m", 3),
    Row("tpu:v5e:16x16", 4, "100m", 1),
    Row("tpu:v5e:16x16", 16, "100m", 2),
    Row("tpu:v5e:16x16", 16, "100m", 3),
    Row("tpu:v5e:16x16", 1, "100m", 2),
    Row("tpu:v5p:4x4x4", 4, "100m", 2),
    Row("tpu:v6e:16x16", 4, "100m", 2),
    Row("gpu:h100:32x8", 1, "100m", 1),
    Row("gpu:h100:32x8", 1, "100m", 2),
    Row("gpu:h100:32x8", 1, "100m", 3),
    Row("tpu:v5e:16x16", 4, "1b", 2),
]


def rewrites(collectives: Any) -> list[str]:
    """Large all-reduces where the program has a psum_scatter or an all_gather."""
    return [
        f"{c.op} {c.dtype} {c.leg} over {','.join(c.across)}: {c.total:.0f} B"
        for c in collectives
        if c.op == "all-reduce" and c.total > SMALL and not set(c.leg.split("+")) <= SMALL_LEGS
    ]


def summary(row: Row, found: Any, expected: float) -> dict[str, Any]:
    """What is kept of a compiled program; ``expected`` are persistent bytes by formula."""
    from onebit_zero_jax import assert_compressed

    report = found.report
    compressed = "yes"
    try:
        assert_compressed(report, next(iter(report.axes)))
    except AssertionError as e:
        compressed = str(e)
    asynchronous = [c for c in report.collectives if c.asynchronous]
    return {
        **dataclasses.asdict(row),
        "row": row.name,
        "ok": True,
        "mesh": dict(report.axes),
        "parameters": report.parameters,
        "bits": {axis: report.bits_per_parameter(axis) for axis in report.axes},
        "compressed": compressed,
        "persistent": found.arguments - 4 * (LENGTH + 1),
        "formula": expected,
        "temporaries": found.temporaries,
        "accessed_over_floor": found.accessed / found.floor if found.accessed else None,
        "compile_seconds": found.seconds,
        "collectives": len(report.collectives),
        "asynchronous": len(asynchronous),
        "overlapped": sum(bool(c.overlapped) for c in asynchronous),
        "rewrites": rewrites(report.collectives),
    }


def measure(row: Row) -> dict[str, Any]:
    """Compiles one row in this process."""
    from onebit_zero_jax import pods

    found = pods.compile_step(
        row.target, row.model, slices=row.slices, stage=row.stage, length=LENGTH
    )
    return summary(row, found, persistent(found, row.target, row.model, row.stage))


def persistent(found: Any, target: str, model: str, stage: int) -> float:
    """Persistent bytes of a device by formula."""
    from onebit_zero_jax import ZeroConfig, formulas, pods

    sizes = tuple(found.report.axes.values())
    slow, fast = sizes if len(sizes) == 2 else (sizes[0], 1)
    axis: Any = ("slow", "fast") if len(sizes) == 2 else "data"
    zero = ZeroConfig(axis_name=axis, stage=stage, tiles=target.startswith("tpu"))
    mesh = formulas.Mesh(slow, fast, zero.flat, stage == 3)
    return sum(formulas.memory(pods.model(model)[0], zero, mesh).values())


def depth(target: str, slices: int, stage: int = 3) -> dict[str, Any]:
    """Temporaries with 12 and 24 scanned layers, and their growth per layer."""
    import math

    import jax

    from onebit_zero_jax import pods

    found: dict[str, Any] = {"target": target, "slices": slices, "stage": stage, "temporaries": {}}
    width = 512
    for layers in (12, 24):
        pods.MODELS["depth"] = (layers, width, 8, 1024)
        compiled = pods.compile_step(target, "depth", slices=slices, stage=stage, length=64)
        found["temporaries"][layers] = compiled.temporaries
        found["state"] = compiled.arguments - 4 * 65  # without the batch
        found["formula"] = persistent(compiled, target, "depth", stage)
        found["fast"] = compiled.report.axes.get("fast", 1)
        print(json.dumps(found), flush=True)
    leaves = jax.tree.leaves(pods.model("depth")[0]["layers"])
    parameters = sum(math.prod(x.shape) for x in leaves) / layers
    low, high = found["temporaries"].values()
    found["growth_bytes_per_parameter"] = (high - low) / (12 * parameters)
    # Gradients of the shards, in float32, wait for the end of the backward pass.
    found["by_design"] = 4 / found["fast"]
    return found


def run(row: Row, limit: float) -> dict[str, Any]:
    """Measures a row in a process of its own; never raises."""
    failed = {**dataclasses.asdict(row), "row": row.name, "ok": False}
    command = [sys.executable, __file__, "--row", row.name]
    environment = {"JAX_PLATFORMS": "cpu", **os.environ}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limit, env=environment
        )
    except subprocess.TimeoutExpired:
        return {**failed, "error": f"no result within {limit:.0f} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        message = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return {**failed, "error": message[-1][:300]}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def read(path: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Rows by name."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {row["row"]: row for row in map(json.loads, lines)}


def write(path: pathlib.Path, row: dict[str, Any]) -> None:
    """Adds or replaces a row."""
    rows = {**read(path), row["row"]: row}
    path.parent.mkdir(exist_ok=True)
    half = path.with_suffix(".new")
    half.write_text("".join(json.dumps(r) + "\n" for r in rows.values()))
    os.replace(half, path)


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    head = (
        "| program | chips | bits/param slow / fast | compressed | state MB (formula) | temp. MB "
        "| bytes / floor | async (overlapped) of collectives | compile s |"
    )
    lines = [head, "|---" * 9 + "|"]
    for r in rows:
        if not r["ok"]:
            lines.append(f"| {r['row']} | | failed: {r['error']} | | | | | | |")
            continue
        chips = 1
        for n in r["mesh"].values():
            chips *= n
        bits = " / ".join(f"{x:.3f}" for x in r["bits"].values())
        over = r["accessed_over_floor"]
        cells = [
            r["row"],
            f"{chips:,}",
            bits,
            "yes" if r["compressed"] == "yes" else "no",
            f"{r['persistent'] / 1e6:.1f} ({r['formula'] / 1e6:.1f})",
            f"{r['temporaries'] / 1e6:.1f}",
            "-" if over is None else f"{over:.1f}",
            f"{r['asynchronous']} ({r['overlapped']}) of {r['collectives']}",
            f"{r['compile_seconds']:.0f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    notes = [f"- {r['row']}: {x}" for r in rows if r["ok"] for x in r["rewrites"]]
    notes += [
        f"- {r['row']}: {r['compressed']}" for r in rows if r["ok"] and r["compressed"] != "yes"
    ]
    return "\n".join([*lines, "", *notes])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--limit", type=float, default=800.0, help="seconds for a row")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="print the results, measure nothing")
    parser.add_argument("--depth", metavar="TARGET", help="temporaries by depth, nothing else")
    parser.add_argument("--slices", type=int, default=1, help="with --depth")
    parser.add_argument("--stage", type=int, default=3, help="with --depth")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        print(json.dumps(measure(next(r for r in ROWS if r.name == args.row))))
        return
    if args.depth:
        print(json.dumps(depth(args.depth, args.slices, args.stage)))
        return
    rows = [r for r in ROWS if args.only in r.name]
    if not rows:
        parser.error(f"--only {args.only!r} names no row: {'; '.join(r.name for r in ROWS)}")
    for row in [] if args.table else rows:
        found = run(row, args.limit)
        found["date"] = datetime.date.today().isoformat()
        for package in ("jax", "libtpu"):
            try:
                found[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                found[package] = None
        write(args.results, found)
        print(row.name, f"{found['compile_seconds']:.0f} s" if found["ok"] else found["error"])
    print(table([r for r in read(args.results).values() if args.only in r["row"]]))


if __name__ == "__main__":
    main()
