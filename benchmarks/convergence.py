"""Does the loss follow AdamW? Paired runs of many seeds against dense AdamW, on one device.

    python benchmarks/convergence.py run digits --configs main --seeds 10
    python benchmarks/convergence.py sweep digits          # the rate of dense AdamW
    python benchmarks/convergence.py table benchmarks/results/*.jsonl
    python benchmarks/convergence.py plot benchmarks/results/*.jsonl --out loss_bits.png
    python benchmarks/convergence.py quick                 # the short form that gates CI

Workers are an axis of arrays: ``jax.vmap(axis_name="data")`` stands in for the mesh and runs
the package's own step, collectives included; replicated state is held once. A seed fixes
initial parameters and batches, for dense AdamW and for every configuration alike, and the
difference of held-out losses is taken seed by seed. Every run is a line of the JSON-lines
file, written when it ends; runs that are already there are skipped.
"""

import argparse
import dataclasses
import json
import math
import pathlib
from typing import Any

import jax
import numpy as np
from scipy import stats
from stacked import INNER, Config, Stacked
from tasks import TASKS, Task

RESULTS = pathlib.Path(__file__).parent / "results"


# ---------------------------------------------------------------- configurations


def _zero(**fields: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(fields.items())


def _configs() -> dict[str, dict[str, Config]]:
    dense = {"dense": Config(zero=None)}
    params = {f"params {b}": Config(_zero(stage=2, gather_bits=b)) for b in (8, 4, 3, 2, 1)}
    momentum = {f"momentum {b}": Config(_zero(stage=1, gather_bits=b)) for b in (1, 2)}
    dense_gather = _zero(stage=2, gather_bits="dense")
    return {
        "main": {
            **dense,
            "params 4": params["params 4"],
            "params 2": params["params 2"],
            "momentum 1": momentum["momentum 1"],
            "params dense": Config(dense_gather),
            "params 3": params["params 3"],
            "momentum 2": momentum["momentum 2"],
        },
        "more bits": {
            "all steps dense": Config(dense_gather, warmup=1.0),
            "params 8": params["params 8"],
            "params 1": params["params 1"],
        },
        "variance": {
            "params 4, refresh restarts M": Config(patch="refresh restarts M"),
            "exact reduce": Config(dense_gather, patch="exact reduce"),
            **{
                f"params 4, warm-up {w:.0%}, refresh {r}": Config(warmup=w, refresh=r)
                for w in (0.1, 0.25)
                for r in (16, 32, 64, None)
                if (w, r) != (0.25, 32)
            },
        },
        "storage": {
            f"params 4, error {e}, m {m}": Config(_zero(stage=2, error_dtype=e, momentum_dtype=m))
            for e, m in (("bfloat16", "float32"), ("int8", "float32"), ("int8", "bfloat16"))
        },
        "replica": {
            **{
                f"params {b}, bf16 replicas, rate x {r:g}": Config(
                    _zero(stage=2, gather_bits=b), replica="bfloat16", rate=r
                )
                for r in (1.0, 0.1)
                for b in (4, 8)
            },
            **{f"params 4, rate x {r:g}": Config(rate=r) for r in (0.5, 0.1)},
            **{
                f"momentum 1, rate x {r:g}": Config(momentum["momentum 1"].zero, rate=r)
                for r in (0.5, 0.1)
            },
            **{f"dense, rate x {r:g}": Config(zero=None, rate=r) for r in (0.5, 0.1)},
        },
        "workers": {
            f"{name}, {w} workers": dataclasses.replace(c, workers=w)
            for name, c in (
                ("params 4", params["params 4"]),
                ("momentum 1", momentum["momentum 1"]),
            )
            for w in (2, 32, 64)
        },
        "ablations": {
            "params 4, no weight": Config(patch="no weight"),
            "params 4, blocks of 128": Config(patch="blocks of 128"),
            "params 2, blocks of 128": Config(params["params 2"].zero, patch="blocks of 128"),
            "momentum 1, one scale, no weight, no refresh": Config(
                momentum["momentum 1"].zero, refresh=None, patch="published"
            ),
        },
        "b2": {
            **{f"dense, b2 {b:g}": Config(zero=None, b2=b) for b in (0.95, 0.999)},
            **{f"params 4, b2 {b:g}": Config(b2=b) for b in (0.95, 0.999)},
        },
        "inner": {
            f"{name} inside, {end}": Config(zero, inner=name, warmup=warmup)
            for name in INNER
            for end, zero, warmup in (
                ("params 4", params["params 4"].zero, 0.25),
                ("all steps dense", dense_gather, 1.0),
            )
        },
    }


# ---------------------------------------------------------------- runs


def run_all(
    task: Task, configs: dict[str, Config], seeds: list[int], out: pathlib.Path | None
) -> list[dict[str, Any]]:
    """Runs what ``out`` does not hold yet; seed by seed, so that a part is usable."""
    done = {(r["config"], r["seed"]) for r in read([out])} if out else set()
    evaluate, rows = jax.jit(task.evaluate), []
    programs = {name: Stacked(task, config) for name, config in configs.items()}
    for seed in seeds:
        for name in configs:
            if (name, seed) in done:
                continue
            row = {
                "task": task.name,
                "config": name,
                "base": configs[name].base(),
                "seed": seed,
                "steps": task.steps,
                "workers": configs[name].workers,
                "rate": task.rate * configs[name].rate,
                **programs[name].run(seed, task.rate, evaluate),
            }
            rows.append(row)
            print(
                f"{task.name}, {name}, seed {seed}: {row['loss']:.5f} ({row['seconds']} s)",
                flush=True,
            )
            if out:
                with out.open("a") as f:
                    f.write(json.dumps(row) + "\n")
    return rows


# ---------------------------------------------------------------- reading results


def read(paths: list[Any]) -> list[dict[str, Any]]:
    lines = [line for p in paths if p and p.exists() for line in p.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def interval(values: np.ndarray) -> float:
    """Half the width of the 95 % confidence interval of the mean (Student's t)."""
    n = len(values)
    return float(stats.t.ppf(0.975, n - 1) * values.std(ddof=1) / n**0.5) if n > 1 else math.inf


def compare(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per task and configuration: mean over seeds of the loss over dense AdamW's, in percent."""
    found = {(r["task"], r["config"], r["seed"]): r for r in rows}
    out = []
    for task, config in dict.fromkeys((r["task"], r["config"]) for r in rows):
        mine = [r for r in rows if (r["task"], r["config"]) == (task, config)]
        pairs = [
            (r, found[task, r["base"], r["seed"]])
            for r in mine
            if (task, r["base"], r["seed"]) in found
        ]
        if not pairs:
            continue
        over = np.array([100 * (a["loss"] / b["loss"] - 1) for a, b in pairs])
        out.append(
            {
                "task": task,
                "config": config,
                "seeds": len(pairs),
                "loss": float(np.mean([a["loss"] for a, _ in pairs])),
                "over_dense_percent": float(over.mean()),
                "interval": interval(over),
                "bits_steady": mine[0]["bits_steady"],
                "bits_run": mine[0]["bits_run"],
            }
        )
    return out


def print_table(rows: list[dict[str, Any]], base: str = "dense") -> None:
    print(f"| task | configuration | seeds | loss | over {base}, % | bits steady | bits run |")
    print("|---|---|---|---|---|---|---|")
    for r in rows:
        over = f"{r['over_dense_percent']:+.2f}"
        over += f" ± {r['interval']:.2f}" if r["seeds"] > 1 else ""
        over = "0" if r["config"] == base else over
        print(
            f"| {r['task']} | {r['config']} | {r['seeds']} | {r['loss']:.4f} | {over} "
            f"| {r['bits_steady']:.2f} | {r['bits_run']:.2f} |"
        )


def plot(rows: list[dict[str, Any]], path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    tasks = list(dict.fromkeys(r["task"] for r in rows))
    figure, axes = plt.subplots(1, len(tasks), figsize=(5 * len(tasks), 4), squeeze=False)
    for ax, task in zip(axes[0], tasks, strict=True):
        for r in rows:
            if r["task"] != task or r["config"].startswith("dense") or r["seeds"] < 3:
                continue
            at = r["bits_steady"], r["over_dense_percent"], r["interval"]
            ax.errorbar(*at, fmt="o", capsize=3, label=r["config"])
        ax.axhspan(-0.25, 0.25, alpha=0.2)
        ax.set(title=task, xlabel="bits per parameter, compressed step", xscale="log")
        ax.set_yscale("symlog", linthresh=2)
        ax.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        ax.xaxis.set_minor_formatter(lambda x, _: f"{x:g}")
        ax.legend(fontsize=6)
        ax.grid(alpha=0.3)
    axes[0][0].set_ylabel("held-out loss over dense AdamW, %")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


# ---------------------------------------------------------------- commands


def sweep(task: Task, rates: list[float], seeds: list[int], out: pathlib.Path) -> None:
    evaluate, dense = jax.jit(task.evaluate), Stacked(task, Config(zero=None))
    for rate in rates:
        losses = [dense.run(seed, rate, evaluate)["loss"] for seed in seeds]
        row = {"task": task.name, "steps": task.steps, "rate": rate, "losses": losses}
        print(f"{task.name}, rate {rate:g}: {np.mean(losses):.4f}", flush=True)
        with out.open("a") as f:
            f.write(json.dumps(row) + "\n")


def quick() -> list[dict[str, Any]]:
    """Dense AdamW and the default of stage 2 on the quadratic, 6 seeds; in memory."""
    configs = _configs()["main"]
    chosen = {name: configs[name] for name in ("dense", "params 4")}
    return compare(run_all(TASKS["quadratic"](), chosen, list(range(6)), None))


def main(argv: list[str] | None = None) -> None:
    doc = __doc__ or ""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    seeds = lambda text: list(range(*map(int, text.split("-"))))
    add = commands.add_parser("run").add_argument
    add("task", choices=TASKS)
    add("--configs", default="main", help="groups or names, separated by ';'")
    add("--seeds", type=seeds, default="10", help="5 is 0 to 4, 5-8 is 5 to 7")
    add("--out", type=pathlib.Path, help="default: results/TASK.jsonl")
    add = commands.add_parser("sweep").add_argument
    add("task", choices=TASKS)
    add("--rates", type=lambda s: [float(x) for x in s.split(",")], default="1e-3,2e-3,4e-3,8e-3")
    add("--seeds", type=seeds, default="100-102")
    add = commands.add_parser("table").add_argument
    add("files", nargs="+", type=pathlib.Path)
    add("--base", help="compare with this configuration, not with dense AdamW")
    add = commands.add_parser("plot").add_argument
    add("files", nargs="+", type=pathlib.Path)
    add("--out", type=pathlib.Path, required=True)
    commands.add_parser("quick")
    args = parser.parse_args(argv)
    if args.command == "quick":
        print_table(quick())
        return
    if args.command in ("table", "plot"):
        rows = read(args.files)
        if getattr(args, "base", None):
            rows = [{**r, "base": args.base} for r in rows]
        rows = compare(rows)
        if args.command == "plot":
            plot(rows, args.out)
        else:
            print_table(rows, args.base or "dense")
        return
    jax.config.update("jax_platforms", "cpu")
    task = TASKS[args.task]()
    RESULTS.mkdir(exist_ok=True)
    if args.command == "sweep":
        sweep(task, args.rates, args.seeds, RESULTS / "sweep.jsonl")
        return
    groups = _configs()
    every = {name: c for group in groups.values() for name, c in group.items()}
    configs: dict[str, Config] = {}
    for name in args.configs.split(";"):
        configs.update(groups[name] if name in groups else {name: every[name]})
    run_all(task, configs, args.seeds, args.out or RESULTS / f"{task.name}.jsonl")


if __name__ == "__main__":
    main()
