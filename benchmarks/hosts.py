"""Hosts on one machine: network namespaces behind a bridge, with links of a given speed.

    with hosts(4):
        set_links(4, "100mbit")
        ...                    # Popen([*inside(0), *COMMAND]); addresses 10.77.0.1 to .4

The bridge has a namespace of its own, so nothing of the machine's own network is touched,
and several programs can each have their hosts: names hold the id of the process.
Links are shaped in both directions by ``tc tbf``; they have no delay but that of their
queues. Needs root and iproute2.
"""

import contextlib
import os
import pathlib
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator

PREFIX, RUN = "obz-", "OBZ_RUN"  # RUN: environment variable, for the commands on the hosts
NAMESPACES, CONFIGS = pathlib.Path("/run/netns"), pathlib.Path("/etc/netns")
HEADERS = 14 + 20 + 32  # Ethernet, IPv4, TCP with timestamps


def name(host: int) -> str:
    return f"{PREFIX}{os.environ[RUN]}-host{host}"


def switch() -> str:
    return f"{PREFIX}{os.environ[RUN]}-switch"


def address(host: int) -> str:
    return f"10.77.0.{host + 1}"


def inside(host: int) -> list[str]:
    """The start of a command line that runs on a host and dies with its parent."""
    return ["setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", name(host)]


def unable() -> str | None:
    """Why hosts cannot be made here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc", "setpriv") if shutil.which(tool) is None]
    return f"{' and '.join(missing)} not found (iproute2, util-linux)" if missing else None


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


# ---------------------------------------------------------------- links


def bits_per_second(rate: str) -> float | None:
    """Of ``"10mbit"``, ``"1gbit"``; None for ``"unlimited"``.

    Raises:
      ValueError: another form, or less than 1 Mbit/s.
    """
    if rate == "unlimited":
        return None
    for unit, factor in (("mbit", 1e6), ("gbit", 1e9)):
        if rate.endswith(unit) and rate.removesuffix(unit).replace(".", "", 1).isdigit():
            bits = float(rate.removesuffix(unit)) * factor
            if bits >= 1e6:
                return bits
    raise ValueError(f"a link is 'unlimited' or like '10mbit' or '1gbit' (1mbit or more): {rate!r}")


def shaping(rate: str) -> list[str]:
    """Arguments of ``tc qdisc replace`` for a link; [] for an unlimited one.

    The burst, which goes out at once, is 2 ms of the rate but two packets at least: with a
    larger one the few bytes of a compressed step would not see the link.
    """
    bits = bits_per_second(rate)
    if bits is None:
        return []
    burst = max(2 * 1514, round(bits * 2e-3 / 8))
    return ["root", "tbf", "rate", f"{round(bits)}bit", "burst", f"{burst}b", "latency", "400ms"]


def set_links(count: int, rate: str) -> None:
    """Shapes the links of all hosts, both ways; at any time, from anywhere."""
    for host in range(count):
        for space, device in ((name(host), "eth0"), (switch(), f"port{host}")):
            if shaping(rate):
                run("tc", "-n", space, "qdisc", "replace", "dev", device, *shaping(rate))
            elif " tbf " in run("tc", "-n", space, "qdisc", "show", "dev", device):
                run("tc", "-n", space, "qdisc", "del", "dev", device, "root")


def steps_for(rate: str, bits: float, seconds: float) -> int:
    """How many steps that each send about ``bits`` to time: ``seconds`` of them, 3 to 15."""
    speed = bits_per_second(rate)
    return min(15, max(3, round(seconds / (0.2 + (bits / speed if speed else 0.0)))))


def counters(device: str = "eth0") -> dict[str, int]:
    """Bytes and packets an interface of this host has sent and received so far."""
    path = pathlib.Path("/sys/class/net") / device / "statistics"
    names = ("tx_bytes", "tx_packets", "rx_bytes", "rx_packets")
    return {n: int((path / n).read_text()) for n in names}


def payload(sent: dict[str, int]) -> int:
    """TCP payload of what an interface sent: its bytes without the headers it counted.

    A large send is one packet to the interface (segmentation offload), with one set of headers.
    """
    return sent["tx_bytes"] - HEADERS * sent["tx_packets"]


def difference(after: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    return {k: after[k] - before[k] for k in after}


# ---------------------------------------------------------------- life


def ours(names: Iterable[str]) -> dict[str, int]:
    """Of names of namespaces, those made here, with the ids of the processes that made them."""
    found = {n: re.fullmatch(rf"{PREFIX}(\d+)-(switch|host\d+)", n) for n in names}
    return {n: int(m[1]) for n, m in sorted(found.items()) if m}


def existing(run: int | None = None) -> list[str]:
    """Namespaces of a process; None: of processes that are gone."""
    names: set[str] = set()
    for root in (NAMESPACES, CONFIGS):
        if root.is_dir():
            names.update(os.listdir(root))
    gone = lambda pid: not pathlib.Path("/proc", str(pid)).exists()
    return [n for n, pid in ours(names).items() if (gone(pid) if run is None else pid == run)]


def clean(found: list[str]) -> None:
    """Ends every process in the namespaces, and removes these with their links."""
    for space in found:
        with contextlib.suppress(RuntimeError):  # A name whose namespace is gone.
            deadline = time.monotonic() + 10
            while pids := run("ip", "netns", "pids", space).split():
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                if time.monotonic() > deadline:
                    raise TimeoutError(f"processes {pids} of {space} do not end")
                time.sleep(0.05)
    for space in found:
        if (NAMESPACES / space).exists():
            run("ip", "netns", "del", space)  # Its interfaces go with it.
        shutil.rmtree(CONFIGS / space, ignore_errors=True)


def _make(count: int) -> None:
    run("ip", "netns", "add", switch())
    run("ip", "-n", switch(), "link", "add", "bridge", "type", "bridge")
    run("ip", "-n", switch(), "link", "set", "bridge", "up")
    for host in range(count):
        # gloo binds to what the host's name resolves to.
        (CONFIGS / name(host)).mkdir(parents=True, exist_ok=True)
        table = f"127.0.0.1 localhost\n{address(host)} {os.uname().nodename}\n"
        (CONFIGS / name(host) / "hosts").write_text(table)
        run("ip", "netns", "add", name(host))
        peer = ["peer", "name", f"port{host}", "netns", switch()]
        run("ip", "-n", name(host), "link", "add", "eth0", "type", "veth", *peer)
        run("ip", "-n", switch(), "link", "set", f"port{host}", "master", "bridge", "up")
        run("ip", "-n", name(host), "addr", "add", f"{address(host)}/24", "dev", "eth0")
        run("ip", "-n", name(host), "link", "set", "lo", "up")
        run("ip", "-n", name(host), "link", "set", "eth0", "up")


@contextlib.contextmanager
def hosts(count: int) -> Iterator[None]:
    """``count`` hosts with unlimited links; removed at the end, whatever happens.

    SIGTERM and SIGHUP end the program through here, as Ctrl-C does. After SIGKILL of this
    program its commands die with it (:func:`inside`); ``clean(existing())`` removes the rest.

    Raises:
      RuntimeError: not possible here, or this process has hosts already.
    """
    reason = unable()
    if reason:
        raise RuntimeError(reason)
    os.environ[RUN] = str(os.getpid())
    if existing(os.getpid()):
        raise RuntimeError(f"{', '.join(existing(os.getpid()))} exist already")

    def stop(signum: int, frame: object) -> None:
        raise SystemExit(128 + signum)

    signals = (signal.SIGTERM, signal.SIGHUP)
    before = {s: signal.signal(s, stop) for s in signals}
    try:
        _make(count)
        yield
    finally:
        # A second Ctrl-C must not interrupt this.
        for s in (*signals, signal.SIGINT):
            before.setdefault(s, signal.getsignal(s))
            signal.signal(s, signal.SIG_IGN)
        clean(existing(os.getpid()))
        for s, handler in before.items():
            signal.signal(s, handler)
