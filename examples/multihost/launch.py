"""Starts N processes of a command on this machine, as N hosts would run it.

python examples/multihost/launch.py -n 2 -- python examples/multihost/train.py --local-devices 2

Appends ``--coordinator --processes --process-id`` to the command, prefixes every line of
output with the process, and ends all processes as soon as one fails.
"""

import argparse
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def stream(process: subprocess.Popen[str], rank: int) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        print(f"[{rank}] {line}", end="", flush=True)


def end(processes: list[subprocess.Popen[str]], grace: float) -> None:
    """Asks, waits, then kills."""
    for p in processes:
        if p.poll() is None:
            p.terminate()
    deadline = time.monotonic() + grace
    for p in processes:
        try:
            p.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            p.kill()
            p.wait()


def launch(
    command: list[str],
    count: int,
    grace: float = 5.0,
    coordinator: str = "127.0.0.1",
    prefix: Callable[[int], list[str]] = lambda rank: [],
) -> int:
    """Runs ``count`` processes of ``command``; 0 if all succeed, else the first failure's code.

    ``prefix`` starts the command line of a process, e.g. to run it on another host;
    ``coordinator`` is the address of the first.
    """
    port = free_port()
    processes = []
    for rank in range(count):
        flags = ["--coordinator", f"{coordinator}:{port}", "--processes", str(count)]
        processes.append(
            subprocess.Popen(
                [*prefix(rank), *command, *flags, "--process-id", str(rank)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
        )
    readers = [
        threading.Thread(target=stream, args=(p, rank), daemon=True)
        for rank, p in enumerate(processes)
    ]
    for r in readers:
        r.start()
    try:
        while True:
            codes = [p.poll() for p in processes]
            failed = [(rank, code) for rank, code in enumerate(codes) if code]
            if failed:
                rank, code = failed[0]
                how = f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"
                print(f"process {rank} ended with {how}; ending the others", flush=True)
                return 128 - code if code < 0 else code
            if all(code == 0 for code in codes):
                return 0
            time.sleep(0.05)
    finally:
        end(processes, grace)
        for r in readers:
            r.join(timeout=grace)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-n", "--processes", type=int, default=2)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="after --")
    args = parser.parse_args(argv)
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command or args.processes < 1:
        parser.error("give a command after -- and at least one process")

    def stop(signum: int, frame: FrameType | None) -> None:
        sys.exit(128 + signum)  # through launch's finally

    signal.signal(signal.SIGTERM, stop)
    print(f"{args.processes} x {shlex.join(command)}", flush=True)
    return launch(command, args.processes)


if __name__ == "__main__":
    sys.exit(main())
