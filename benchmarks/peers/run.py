"""The same model, data and links with PyTorch and DeepSpeed, beside this package.

    python -m venv PEERS
    DS_BUILD_OPS=0 PEERS/bin/pip install -r benchmarks/peers/requirements.txt
    sudo python benchmarks/peers/run.py time --python PEERS/bin/python
    sudo python benchmarks/peers/run.py loss --python PEERS/bin/python
    python benchmarks/peers/run.py table

Run by the Python of this package, which writes first parameters, batches and learning
rates to a file; the workers (worker.py) run by ``--python``. Hosts, links and counting are
those of benchmarks/cluster.py. Four hosts of one process.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent / "examples"), str(HERE.parent.parent)]

import cluster  # noqa: E402
import hosts  # noqa: E402
from peers.methods import METHODS  # noqa: E402

HOSTS = 4
RESULTS = cluster.HERE / "results" / "peers.jsonl"


def export(path: Path, args: argparse.Namespace) -> None:
    """First parameters, batches, held-out batch and rates, as benchmarks/cluster.py has them."""
    import jax
    import numpy as np
    import optax
    import train_gpt as demo
    from flax import nnx

    jax.config.update("jax_platforms", "cpu")
    demo.WIDTH = args.width
    _, params = nnx.split(demo.GPT(nnx.Rngs(args.seed)), nnx.Param)
    arrays = {
        "/".join(str(getattr(k, "key", k)) for k in path if getattr(k, "key", None) is not None): x
        for path, x in jax.tree_util.tree_leaves_with_path(params)
    }
    text = demo.read_text()
    cut = len(text) * 9 // 10
    batches = demo.batches(text[:cut], args.sequences * HOSTS, args.seed + 2)
    held_out = demo.batches(text[cut:], 128, 1)
    rates = optax.warmup_cosine_decay_schedule(
        0.0, demo.PEAK_RATE, max(1, args.steps // 8), args.steps, demo.PEAK_RATE / 20
    )
    arrays["batches"] = np.stack([next(batches) for _ in range(args.steps)])
    arrays["held_out"] = np.concatenate([next(held_out) for _ in range(2)])
    arrays["rates"] = np.array([rates(i) for i in range(args.steps)], np.float32)
    values: Any = {k: np.asarray(x) for k, x in arrays.items()}
    np.savez(path, **values)


def record(args: argparse.Namespace) -> None:
    tokens = args.sequences * 64 * HOSTS
    with tempfile.TemporaryDirectory() as directory:
        start = Path(directory, "start.npz")
        export(start, args)
        for method in args.methods:
            environment = ["env", "GLOO_SOCKET_IFNAME=eth0", "DS_ACCELERATOR=cpu"]
            command = [*environment, args.python, str(HERE / "worker.py"), args.command]
            command += ["--method", method, "--links", args.links, "--steps", str(args.steps)]
            command += ["--seconds", str(args.seconds), "--start", str(start)]
            found = cluster.run_hosts(HOSTS, 1, command)
            head = {
                "kind": args.command,
                "case": method,
                "hosts": HOSTS,
                "per_host": 1,
                "parameters": found[0]["parameters"],
                "tokens_per_step": tokens,
                "seed": args.seed,
                **cluster.provenance(()),
            }
            head["versions"] |= found[0]["versions"]
            if args.command == "time":
                rows = cluster.timing_rows(found, 1, tokens)
            else:
                rows = [{"steps": args.steps, "curve": found[0]["rows"]}]
            cluster.write(args.out, head, rows)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("time", "loss", "table"))
    parser.add_argument("--python", help="interpreter with requirements.txt installed")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--links", default=cluster.LINKS)
    parser.add_argument("--seconds", type=float, default=3.0, help="timed per phase and link")
    parser.add_argument("--steps", type=int, default=300, help="of a loss run")
    parser.add_argument("--sequences", type=int, default=4, help="of 64 bytes, per process")
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    if args.command == "table":
        files = [args.out, cluster.RESULTS]
        rows = [json.loads(line) for path in files for line in path.open()]
        print(table([r for r in rows if r["per_host"] == 1]))
        return 0
    reason = hosts.unable() or (None if args.python else "give --python")
    if reason:
        print(f"benchmarks/peers/run.py cannot run here: {reason}.")
        return 0
    record(args)
    return 0


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a line per method; what lasts, that is compressed steps where there are any."""
    found = cluster.latest(rows)
    links = list(dict.fromkeys(r["link"] for r in rows if r["kind"] == "time"))
    head = ["method", "loss at equal tokens", "kB/host, dense step", "kB/host, compressed"]
    head += [f"tokens/s, {link}" for link in links]
    lines = []
    for name in dict.fromkeys(r["case"] for r in rows):
        same = cluster.SAME_LOSS.get(name, name)
        curve = found.get(("loss", same, "None", "None"), {}).get("curve", [])
        cells = [name, f"{curve[-1]['loss']:.4f}" if curve else "-"]
        for phase in ("dense", "compressed"):
            row = found.get(("time", name, links[0], phase))
            cells.append(f"{row['interface_bytes'] / row['hosts'] / 1e3:.0f}" if row else "")
        for link in links:
            steady = [found.get(("time", name, link, p)) for p in ("compressed", "dense")]
            row = next((r for r in steady if r), None)
            cells.append(f"{row['tokens_per_second']:.0f}" if row else "-")
        lines.append(cells)
    return cluster.markdown(head, lines)


if __name__ == "__main__":
    sys.exit(main())
