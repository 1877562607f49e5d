"""A cluster with thin cables on one machine: speed, bytes and time to a loss, by link.

    sudo python benchmarks/cluster.py time --links 10mbit,100mbit,1gbit,unlimited
    sudo python benchmarks/cluster.py loss --steps 300
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
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import hosts
from cluster_cases import CASES, SAME_LOSS

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "examples"))

RESULTS = HERE / "results" / "cluster.jsonl"
LINKS = "10mbit,100mbit,1gbit,unlimited"


# ---------------------------------------------------------------- runs


def provenance(packages: Iterable[str]) -> dict[str, Any]:
    """Where a row comes from: date, versions, machine, command."""
    versions = {n: importlib.metadata.version(n) for n in packages}
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=HERE, capture_output=True, text=True
    )
    script = Path(sys.argv[0]).resolve().relative_to(HERE.parent)
    # Without what says where things lie on this machine and changes no figure.
    places = ("--cache", "--out", "--python")
    pairs = zip(["", *sys.argv[1:]], sys.argv[1:], strict=False)
    arguments = [a for before, a in pairs if not {before, a} & set(places)]
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": {"python": platform.python_version(), **versions},
        "commit": git.stdout.strip(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "load": round(os.getloadavg()[0], 1),
        "command": shlex.join(["python", str(script), *arguments]),
    }


def run_hosts(count: int, per_host: int, command: list[str]) -> list[dict[str, Any]]:
    """Runs ``command`` on fresh hosts; what each process wrote to ``--out``.

    Raises:
      RuntimeError: a process failed.
    """
    from multihost.launch import launch

    with tempfile.TemporaryDirectory() as out, hosts.hosts(count):
        code = launch(
            [*command, "--out", out],
            count * per_host,
            coordinator=hosts.address(0),
            prefix=lambda rank: hosts.inside(rank // per_host),
        )
        if code:
            raise RuntimeError(f"a process failed with code {code}: {shlex.join(command)}")
        found = [Path(out, f"{i}.json") for i in range(count * per_host)]
        return [json.loads(path.read_text()) for path in found]


def timing_rows(
    found: list[dict[str, Any]], per_host: int, tokens_per_step: int
) -> list[dict[str, Any]]:
    """One row per phase and link: means over processes, sums over hosts."""
    rows = []
    for k, row in enumerate(found[0]["rows"]):
        every = [f["rows"][k] for f in found]
        on_hosts = every[::per_host]  # Processes of a host share its interface.
        total = lambda key, rs=on_hosts: sum(r[key] for r in rs)
        seconds = max(r["seconds"] for r in every)
        out = {
            "link": row["link"],
            "phase": row["phase"],
            "steps": row["steps"],
            "seconds_per_step": round(seconds, 5),
            "tokens_per_second": round(tokens_per_step / seconds, 1),
            "interface_bytes": round(sum(r["interface"]["tx_bytes"] for r in on_hosts)),
            "interface_packets": round(sum(r["interface"]["tx_packets"] for r in on_hosts)),
            "payload_bytes": round(total("payload")),
        }
        if "predicted" in row:
            out |= {
                "communicating": round(sum(r["communicating"] for r in every) / len(every), 4),
                "predicted_bytes": round(total("predicted")),
                "gloo_bytes": round(total("predicted_gloo")),
                "payload_over_predicted": round(total("payload") / total("predicted"), 4),
                "payload_over_gloo": round(total("payload") / total("predicted_gloo"), 4),
            }
        rows.append(out)
    return rows


def write(out: Path, head: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    with out.open("a") as f:
        for r in rows:
            f.write(json.dumps({**head, **r}) + "\n")
            print(head["case"], json.dumps(r), flush=True)


def record(args: argparse.Namespace) -> None:
    chosen = args.cases or [n for n in CASES if args.command == "time" or n not in SAME_LOSS]
    settings = f"--links {args.links} --seconds {args.seconds} --steps {args.steps} "
    settings += f"--sequences {args.sequences} --width {args.width} --seed {args.seed}"
    with tempfile.TemporaryDirectory() as own:
        environment = {
            "PYTHONPATH": str(HERE.parent),
            "JAX_COMPILATION_CACHE_DIR": args.cache or own,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        command = ["env", *(f"{k}={v}" for k, v in environment.items()), sys.executable]
        command += [str(HERE / "cluster_worker.py"), args.command, *shlex.split(settings)]
        for name in chosen:
            case = CASES[name]
            found = run_hosts(case.hosts, case.per_host, [*command, "--case", name])
            tokens = args.sequences * 64 * case.hosts * case.per_host
            head = {
                "kind": args.command,
                "case": name,
                "hosts": case.hosts,
                "per_host": case.per_host,
                "parameters": found[0]["parameters"],
                "tokens_per_step": tokens,
                "seed": args.seed,
                **provenance(("jax", "jaxlib", "optax", "numpy", "flax")),
            }
            if args.command == "time":
                rows = timing_rows(found, case.per_host, tokens)
            else:
                rows = [{"steps": args.steps, "curve": found[0]["curve"]}]
            write(args.out, head, rows)


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


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return "\n".join(lines + ["| " + " | ".join(cells) + " |" for cells in rows])


def table(rows: list[dict[str, Any]], target: float) -> str:
    """Markdown: bytes of each phase; speed, and seconds to a held-out loss, by link."""
    found = latest(rows)
    timed = [r for r in rows if r["kind"] == "time"]
    cases, links = (list(dict.fromkeys(r[k] for r in timed)) for k in ("case", "link"))
    sizes, speeds = [], []
    for name in cases:
        phases = [p for p in ("dense", "compressed") if ("time", name, links[0], p) in found]
        for phase in phases:
            r = found["time", name, links[0], phase]
            kilobytes = r["interface_bytes"] / r["hosts"] / 1e3
            ratios = [f"{r[k]:.3f}" for k in ("payload_over_predicted", "payload_over_gloo")]
            sizes.append([name, phase, f"{kilobytes:.1f}", *ratios])
        at = [[found.get(("time", name, link, p)) for p in phases] for link in links]
        steady = [r[-1] for r in at]
        both = [
            f"{r['tokens_per_second']:.0f} ({r['communicating']:.0%})" if r else "-" for r in steady
        ]
        curve = found.get(("loss", SAME_LOSS.get(name, name), "None", "None"), {}).get("curve", [])
        steps = time_to(curve, target)
        seconds = []
        for at_link in at:
            known = [r["seconds_per_step"] for r in at_link if r]
            enough = steps and len(known) == len(at_link)
            total = sum(n * pace for n, pace in zip(steps or (), known, strict=False))
            seconds.append(f"{total:.0f}" if enough else "-")
        loss = f"{curve[-1]['loss']:.4f}" if curve else "-"
        speeds.append([name, *both, loss, *seconds])
    head = ["case", "phase", "kB/host and step", "payload / wire_report", "payload / gloo"]
    names = [f"tokens/s, {link}" for link in links]
    names += ["final loss", *(f"s to {target:g}, {link}" for link in links)]
    return markdown(head, sizes) + "\n\n" + markdown(["case", *names], speeds)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", nargs="?", choices=("time", "loss", "table"))
    parser.add_argument("--clean", action="store_true", help="remove what a killed run left")
    parser.add_argument("--cases", nargs="+", choices=CASES, help="default: all")
    parser.add_argument("--links", default=LINKS)
    parser.add_argument("--seconds", type=float, default=3.0, help="timed per phase and link")
    parser.add_argument("--steps", type=int, default=300, help="of a loss run; a quarter dense")
    parser.add_argument("--sequences", type=int, default=4, help="of 64 bytes, per process")
    parser.add_argument("--width", type=int, default=96, help="of the model; the demo's is 96")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", type=float, default=2.5, help="held-out loss of the table")
    parser.add_argument("--cache", help="directory of compiled programs, kept; default: none")
    parser.add_argument("--out", type=Path, default=RESULTS)
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
        left = hosts.existing()
        hosts.clean(left)
        print(f"removed: {', '.join(left) or 'nothing, there was none'}")
    if args.command:
        record(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
