"""A cluster with thin cables on one machine: speed, bytes and time to a loss, by link.

    sudo python benchmarks/cluster.py time --links 10mbit,100mbit,1gbit,unlimited
    sudo python benchmarks/cluster.py loss --steps 400
    python benchmarks/cluster.py table            # of benchmarks/results/cluster.jsonl
    sudo python benchmarks/cluster.py --clean     # what a killed run left

Hosts are network namespaces behind a bridge (benchmarks/hosts.py), one or two processes of
one CPU device each, joined by jax.distributed and gloo; they train the model of
examples/train_gpt.py. Needs root and iproute2.

``time`` times steps of both phases over each link. Share of time communicating: that of a
step spent in collectives, waiting for others included. Bytes: what the interfaces of all
hosts sent, beside ``wire_report`` of the compiled program: TCP payload, that is the
interface's bytes less 66 for each packet it counted (Ethernet 14, IPv4 20, TCP 32).
``loss`` trains over unlimited links and records the held-out loss; what a link does to the
time does nothing to the numbers. The table puts both together: time to a loss is the steps
it took, each phase's at the pace of that link.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import shlex
import subprocess
import sys
import tempfile
from typing import Any

import hosts
from cluster_cases import CASES

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "examples" / "multihost"))

RESULTS = HERE / "results" / "cluster.jsonl"
LINKS = "10mbit,100mbit,1gbit,unlimited"


# ---------------------------------------------------------------- runs


def provenance() -> dict[str, Any]:
    """Where a row comes from: date, versions, machine, command."""
    names = ("jax", "jaxlib", "optax", "numpy", "flax")
    versions = {n: importlib.metadata.version(n) for n in names}
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=HERE, capture_output=True, text=True
    )
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": {"python": platform.python_version(), **versions},
        "commit": git.stdout.strip(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "command": shlex.join(["python", "benchmarks/cluster.py", *sys.argv[1:]]),
    }


def run_case(args: argparse.Namespace, name: str, cache: str) -> list[dict[str, Any]]:
    """One case on fresh hosts; what each process found."""
    from launch import launch

    case = CASES[name]
    processes = case.hosts * case.per_host
    settings = f"--case {shlex.quote(name)} --links {args.links} --seconds {args.seconds} "
    settings += f"--steps {args.steps} --sequences {args.sequences} --width {args.width} "
    settings += f"--seed {args.seed}"
    with tempfile.TemporaryDirectory() as out, hosts.hosts(case.hosts):
        environment = {
            "PYTHONPATH": str(HERE.parent),
            # The other processes and later links compile the same programs.
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "TF_CPP_MIN_LOG_LEVEL": "2",
        }
        command = ["env", *(f"{k}={v}" for k, v in environment.items()), sys.executable]
        command += [str(HERE / "cluster_worker.py"), args.command, *shlex.split(settings)]
        code = launch(
            [*command, "--out", out],
            processes,
            coordinator=hosts.address(0),
            prefix=lambda rank: hosts.inside(rank // case.per_host),
        )
        if code:
            raise SystemExit(f"{name}: a process failed with code {code}")
        found = [json.loads(pathlib.Path(out, f"{i}.json").read_text()) for i in range(processes)]
    return found


def timing_rows(found: list[dict[str, Any]], per_host: int) -> list[dict[str, Any]]:
    """One row per phase and link: means over processes, sums over hosts."""
    rows = []
    first = found[::per_host]  # A host's interface is read by one of its processes.
    for k, row in enumerate(found[0]["rows"]):
        all_rows = [f["rows"][k] for f in found]
        on_hosts = [f["rows"][k] for f in first]
        seconds = max(r["seconds"] for r in all_rows)
        payload = sum(r["payload"] for r in on_hosts)
        predicted = sum(r["predicted"] for r in on_hosts)
        rows.append(
            {
                "link": row["link"],
                "phase": row["phase"],
                "steps": row["steps"],
                "seconds_per_step": round(seconds, 5),
                "communicating": round(
                    sum(r["communicating"] for r in all_rows) / len(all_rows), 4
                ),
                "interface_bytes": round(sum(r["interface"]["tx_bytes"] for r in on_hosts)),
                "interface_packets": round(sum(r["interface"]["tx_packets"] for r in on_hosts)),
                "payload_bytes": round(payload),
                "predicted_bytes": round(predicted),
                "payload_over_predicted": round(payload / predicted, 4),
            }
        )
    return rows


def record(args: argparse.Namespace) -> None:
    chosen = args.cases or list(CASES)
    with tempfile.TemporaryDirectory() as own:
        cache = args.cache or own
        for name in chosen:
            case = CASES[name]
            found = run_case(args, name, cache)
            tokens = args.sequences * 64 * case.hosts * case.per_host
            head = {
                "kind": args.command,
                "case": name,
                "hosts": case.hosts,
                "per_host": case.per_host,
                "parameters": found[0]["parameters"],
                "tokens_per_step": tokens,
                "seed": args.seed,
            }
            if args.command == "time":
                rows = timing_rows(found, case.per_host)
                for r in rows:
                    r["tokens_per_second"] = round(tokens / r["seconds_per_step"], 1)
            else:
                rows = [{"steps": args.steps, "curve": found[0]["curve"]}]
            with args.out.open("a") as f:
                for r in rows:
                    f.write(json.dumps({**head, **r, **provenance()}) + "\n")
            for r in rows:
                print(name, json.dumps(r), flush=True)


# ---------------------------------------------------------------- tables


def latest(rows: list[dict[str, Any]]) -> dict[tuple[str, ...], dict[str, Any]]:
    """The newest row of each measurement: later lines replace earlier ones."""
    keys = ("kind", "case", "link", "phase")
    return {tuple(str(r.get(k)) for k in keys): r for r in rows}


def time_to(curve: list[dict[str, Any]], target: float) -> tuple[int, int] | None:
    """Dense and compressed steps until the held-out loss is at most ``target``; None: never."""
    for point in curve:
        if point["loss"] <= target:
            return point["dense_steps"], point["step"] - point["dense_steps"]
    return None


def table(rows: list[dict[str, Any]], target: float) -> str:
    """Markdown: a line per case and link."""
    found = latest(rows)
    head = ["case", "link", "tokens/s dense step", "compressed", "communicating", "compressed"]
    head += ["MB/step by interfaces", "over predicted", "compressed MB", "over predicted"]
    head += ["final loss", f"s to loss {target:g}"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name, link in dict.fromkeys((r["case"], r["link"]) for r in rows if r["kind"] == "time"):
        phases = [found.get(("time", name, link, p)) for p in ("dense", "compressed")]
        curve = found.get(("loss", name, "None", "None"), {}).get("curve", [])
        reached = time_to(curve, target)
        seconds: Any = "-"
        if reached:
            paces = [p["seconds_per_step"] if p else 0.0 for p in phases]
            seconds = f"{sum(n * s for n, s in zip(reached, paces, strict=True)):.0f}"
        cells = [name, link]
        cells += [f"{p['tokens_per_second']:.0f}" if p else "" for p in phases]
        cells += [f"{p['communicating']:.0%}" if p else "" for p in phases]
        for p in phases:
            cells += (
                [f"{p['interface_bytes'] / 1e6:.3f}", f"{p['payload_over_predicted']:.3f}"]
                if p
                else ["", ""]
            )
        cells += [f"{curve[-1]['loss']:.4f}" if curve else "-", seconds]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", nargs="?", choices=("time", "loss", "table"))
    parser.add_argument("--clean", action="store_true", help="remove what a killed run left")
    parser.add_argument("--cases", nargs="+", choices=CASES, help="default: all")
    parser.add_argument("--links", default=LINKS)
    parser.add_argument("--seconds", type=float, default=3.0, help="timed per phase and link")
    parser.add_argument("--steps", type=int, default=400, help="of a loss run")
    parser.add_argument("--sequences", type=int, default=4, help="of 64 bytes, per process")
    parser.add_argument("--width", type=int, default=96, help="of the model; the demo's is 96")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", type=float, default=2.5, help="held-out loss of the table")
    parser.add_argument("--cache", help="directory of compiled programs, kept; default: none")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    args = parser.parse_args(argv)
    if args.command == "table":
        print(table([json.loads(line) for line in args.out.open()], args.target))
        return 0
    if args.command is None and not args.clean:
        parser.error("say what to do: time, loss, table or --clean")
    for link in args.links.split(","):
        try:
            hosts.bits_per_second(link)
        except ValueError as e:
            parser.error(str(e))
    reason = hosts.unable()
    if reason:
        print(f"benchmarks/cluster.py cannot run here: {reason}.")
        return 0
    if args.clean:
        print(f"removed: {', '.join(hosts.clean()) or 'nothing, there was none'}")
    if args.command:
        record(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
