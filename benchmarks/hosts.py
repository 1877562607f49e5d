"""Hosts on one machine: network namespaces behind a bridge, with links of a given speed.

    with hosts(4):
        set_links(4, "100mbit")
        ...                    # ip netns exec obz-host0 COMMAND; addresses 10.77.0.1 to .4

The bridge has a namespace of its own, so nothing of the machine's own network is touched.
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

PREFIX = "obz-"
SWITCH = PREFIX + "switch"
NAMESPACES, CONFIGS = pathlib.Path("/run/netns"), pathlib.Path("/etc/netns")
HEADERS = 14 + 20 + 32  # Ethernet, IPv4, TCP with timestamps


def name(host: int) -> str:
    return f"{PREFIX}host{host}"


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
        for space, device in ((name(host), "eth0"), (SWITCH, f"port{host}")):
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


def ours(names: Iterable[str]) -> list[str]:
    """Of names of namespaces, those made here: ``obz-switch`` and ``obz-host0``, ..."""
    return sorted(n for n in names if re.fullmatch(rf"{PREFIX}(switch|host\d+)", n))


def existing() -> list[str]:
    found: set[str] = set()
    for root in (NAMESPACES, CONFIGS):
        if root.is_dir():
            found.update(os.listdir(root))
    return ours(found)


def clean() -> list[str]:
    """Ends every process on a host, removes hosts, links and bridge; names of what there was."""
    found = existing()
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
    return found


def _make(count: int) -> None:
    run("ip", "netns", "add", SWITCH)
    run("ip", "-n", SWITCH, "link", "add", "bridge", "type", "bridge")
    run("ip", "-n", SWITCH, "link", "set", "bridge", "up")
    for host in range(count):
        # gloo binds to what the host's name resolves to.
        (CONFIGS / name(host)).mkdir(parents=True, exist_ok=True)
        table = f"127.0.0.1 localhost\n{address(host)} {os.uname().nodename}\n"
        (CONFIGS / name(host) / "hosts").write_text(table)
        run("ip", "netns", "add", name(host))
        peer = ["peer", "name", f"port{host}", "netns", SWITCH]
        run("ip", "-n", name(host), "link", "add", "eth0", "type", "veth", *peer)
        run("ip", "-n", SWITCH, "link", "set", f"port{host}", "master", "bridge", "up")
        run("ip", "-n", name(host), "addr", "add", f"{address(host)}/24", "dev", "eth0")
        run("ip", "-n", name(host), "link", "set", "lo", "up")
        run("ip", "-n", name(host), "link", "set", "eth0", "up")


@contextlib.contextmanager
def hosts(count: int) -> Iterator[None]:
    """``count`` hosts with unlimited links; removed at the end, whatever happens.

    SIGTERM and SIGHUP end the program through here, as Ctrl-C does. After SIGKILL of this
    program its commands die with it (:func:`inside`) and :func:`clean` removes the rest.

    Raises:
      RuntimeError: not possible here, or hosts are there already.
    """
    reason = unable()
    if reason:
        raise RuntimeError(reason)
    if existing():
        raise RuntimeError(
            f"{', '.join(existing())} exist: another run, or what is left of one; --clean removes "
            "them."
        )

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
        clean()
        for s, handler in before.items():
            signal.signal(s, handler)
