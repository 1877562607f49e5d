"""The cluster benchmark: counting, cleaning up, and (slow, as root) real hosts and links."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "benchmarks"))

import cluster
import cluster_worker
import hosts
from cluster_cases import CASES, SAME_LOSS

from onebit_zero_jax import wire_report

CLUSTER = str(pathlib.Path(__file__).resolve().parent.parent / "benchmarks" / "cluster.py")
needs_hosts = pytest.mark.skipif(hosts.unable() is not None, reason=str(hosts.unable()))


# ---------------------------------------------------------------- without root


def test_links():
    assert hosts.bits_per_second("2.5mbit") == 2.5e6
    assert hosts.bits_per_second("1gbit") == 1e9
    assert hosts.bits_per_second("unlimited") is None
    assert hosts.shaping("unlimited") == []
    assert hosts.shaping("10mbit")[1:6] == ["tbf", "rate", "10000000bit", "burst", "3028b"]
    assert hosts.shaping("1gbit")[5] == "250000b"
    for bad in ("10", "10kbit", "fast", "-1mbit", "0.5mbit", "mbit"):
        with pytest.raises(ValueError, match=bad):
            hosts.bits_per_second(bad)
    assert hosts.steps_for("10mbit", 20e6, 3.0) == 3
    assert hosts.steps_for("unlimited", 20e6, 3.0) == 15
    assert hosts.steps_for("unlimited", 20e6, 60.0) == 15


def test_headers_are_taken_off_as_counted():
    before = {"tx_bytes": 1000, "tx_packets": 2, "rx_bytes": 0, "rx_packets": 0}
    after = {"tx_bytes": 1000 + 5000 + 3 * 66, "tx_packets": 5, "rx_bytes": 9, "rx_packets": 9}
    assert hosts.payload(hosts.difference(after, before)) == 5000


def test_only_own_namespaces_are_touched():
    names = ["obz-7-host0", "obz-7-host12", "obz-81-switch", "obz-7-hostile", "x-obz-7-host0", "b"]
    assert hosts.ours(names) == {"obz-7-host0": 7, "obz-7-host12": 7, "obz-81-switch": 81}


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Namespaces as files of two directories; commands are written down."""
    commands = []
    for name in ("netns", "etc"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(hosts, "NAMESPACES", tmp_path / "netns")
    monkeypatch.setattr(hosts, "CONFIGS", tmp_path / "etc")
    monkeypatch.setattr(hosts, "unable", lambda: None)
    monkeypatch.setenv(hosts.RUN, "")

    def run(*command):
        commands.append(command)
        if command[:3] == ("ip", "netns", "add"):
            (tmp_path / "netns" / command[3]).touch()
        if command[:3] == ("ip", "netns", "del"):
            (tmp_path / "netns" / command[3]).unlink()
        return ""

    monkeypatch.setattr(hosts, "run", run)
    return tmp_path, commands


def left(directory):
    return sorted(p.name for p in directory.rglob("*"))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_hosts_go_whatever_happens(fake, error):
    directory, _ = fake

    def interrupted():
        with hosts.hosts(2):
            assert f"obz-{os.getpid()}-host1" in left(directory)
            raise error

    with pytest.raises(error):
        interrupted()
    assert left(directory) == ["etc", "netns"]


def test_hosts_that_are_half_made_go_too(fake, monkeypatch):
    directory, _ = fake
    run = hosts.run

    def fails(*command):
        if "port1" in command:
            raise RuntimeError("no more interfaces")
        return run(*command)

    monkeypatch.setattr(hosts, "run", fails)
    with pytest.raises(RuntimeError, match="no more"), hosts.hosts(2):
        pass
    assert left(directory) == ["etc", "netns"]


def test_sigterm_goes_through_the_clean_up(fake):
    directory, _ = fake
    before = signal.getsignal(signal.SIGTERM)

    def terminated():
        with hosts.hosts(1):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)

    with pytest.raises(SystemExit) as e:
        terminated()
    assert e.value.code == 128 + signal.SIGTERM
    assert left(directory) == ["etc", "netns"]
    assert signal.getsignal(signal.SIGTERM) == before


def test_hosts_do_not_nest(fake):
    with (
        hosts.hosts(1),
        pytest.raises(RuntimeError, match=r"-host0, .*-switch exist"),
        hosts.hosts(1),
    ):
        pass


def test_clean_ends_processes_of_runs_that_are_gone(fake, monkeypatch, capsys):
    directory, _ = fake
    dead = subprocess.Popen(["true"])
    dead.wait()
    alive = f"obz-{os.getpid()}-host0"
    for name in (f"obz-{dead.pid}-host0", alive, "blue"):
        (directory / "netns" / name).touch()
    process = subprocess.Popen(["sleep", "60"])
    run = hosts.run

    def with_pids(*command):
        if command[1:3] == ("netns", "pids"):
            return f"{process.pid}\n" if process.poll() is None else ""
        return run(*command)

    monkeypatch.setattr(hosts, "run", with_pids)
    assert cluster.main(["--clean"]) == 0
    assert f"removed: obz-{dead.pid}-host0\n" in capsys.readouterr().out
    assert process.returncode == -signal.SIGKILL
    assert left(directory) == ["blue", "etc", "netns", alive]


def test_without_root_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert cluster.main(["time"]) == 0
    assert "cannot run here: network namespaces need root" in capsys.readouterr().out
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(hosts.shutil, "which", lambda tool: None)
    assert cluster.main(["--clean"]) == 0
    assert "ip and tc and setpriv not found" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cluster.main(["time", "--links", "fast"])


HLO = """HloModule f, num_partitions=4
add { a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b) }
ENTRY main {
  x = f32[1024] parameter(0)
  r = f32[256] reduce-scatter(x), channel_id=1, replica_groups={{0,1,2,3}}, \
use_global_device_ids=true, dimensions={0}, to_apply=add
  ROOT g = f32[1024] all-gather(r), channel_id=2, replica_groups={{0,1,2,3}}, \
use_global_device_ids=true, dimensions={0}
}"""


def test_what_gloo_sends():
    """Bytes per host of a reduce-scatter and an all-gather of 4 KB."""
    flat = jax.sharding.AbstractMesh((4,), ("hosts",))
    case = CASES["dense float32"]
    # 3 KB each; two of four ranks swap 1 KB after halving and doubling.
    assert cluster_worker.per_host(wire_report(HLO, flat), case) == (6144, 6144 + 512)
    two = jax.sharding.AbstractMesh((2, 2), ("hosts", "local"))
    pairs = CASES["2 x 2, dense float32"]
    gather = "\n".join(line for line in HLO.splitlines() if "reduce-scatter" not in line)
    gather = gather.replace("all-gather(r)", "all-gather(x)").replace(
        "x = f32[1024]", "x = f32[256]"
    )
    # Each way 1 KB of each process crosses; as one ring of four, 3 KB leave the host.
    assert cluster_worker.per_host(wire_report(gather, two), pairs) == (2048, 3072)
    with pytest.raises(NotImplementedError, match="both axes"):
        cluster_worker.per_host(wire_report(HLO, two), pairs)


def test_table_takes_the_newest_rows_and_adds_the_phases():
    shared = {"kind": "time", "case": "stage 2", "link": "10mbit", "hosts": 4}
    shared |= {"communicating": 0.5, "tokens_per_second": 100.0, "interface_bytes": 8000}
    shared |= {"payload_over_predicted": 1.05, "payload_over_gloo": 1.0}
    rows = [
        shared | {"phase": "dense", "seconds_per_step": 9.0},
        shared | {"phase": "compressed", "seconds_per_step": 0.25, "tokens_per_second": 200.0},
        shared | {"phase": "dense", "seconds_per_step": 2.0},
    ]
    curve = [
        {"step": 20, "loss": 3.0, "dense_steps": 20},
        {"step": 40, "loss": 2.4, "dense_steps": 28},
    ]
    rows.append({"kind": "loss", "case": "stage 2", "curve": curve})
    assert cluster.time_to(curve, 2.5) == (28, 12)
    assert cluster.time_to(curve, 2.0) is None
    lines = cluster.table(rows, 2.5).splitlines()
    assert lines[2] == "| stage 2 | dense | 2.0 | 1.050 | 1.000 |"
    assert lines[-1] == "| stage 2 | 200 (50%) | 2.4000 | 59 |"  # 28 at 2 s, 12 at 0.25 s
    assert cluster.table(rows, 2.0).splitlines()[-1].endswith("| 2.4000 | - |")
    assert set(SAME_LOSS) | set(SAME_LOSS.values()) <= set(CASES)


# ---------------------------------------------------------------- real hosts


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, CLUSTER, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


SMALL = ("--width", "48", "--seconds", "0.5", "--links", "50mbit,unlimited")


@pytest.mark.slow
@needs_hosts
@pytest.mark.timeout(900)
def test_interfaces_agree_with_the_report(tmp_path):
    out = tmp_path / "rows.jsonl"
    cases = ("--cases", "stage 2", "2 x 2, dense float32")
    process = start("time", *cases, *SMALL, "--out", str(out))
    text, _ = process.communicate()
    assert process.returncode == 0, text[-3000:]
    rows = [json.loads(line) for line in out.open()]
    assert len(rows) == 6  # two phases and one, over two links
    for row in rows:
        assert row["payload_over_gloo"] == pytest.approx(1, abs=0.08), row
        assert 0 < row["communicating"] < 1
    seconds = {(r["case"], r["phase"], r["link"]): r["seconds_per_step"] for r in rows}
    dense = ("2 x 2, dense float32", "dense")
    assert seconds[*dense, "50mbit"] > 1.2 * seconds[*dense, "unlimited"]
    assert hosts.existing(process.pid) == []


@pytest.mark.slow
@needs_hosts
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["interrupt", "terminate", "kill a worker", "kill the launcher"])
def test_nothing_is_left(how, tmp_path):
    process = start("loss", "--cases", "stage 2", *SMALL, "--out", str(tmp_path / "rows.jsonl"))
    spaces = [f"obz-{process.pid}-host{i}" for i in range(4)]
    workers = []
    try:
        while len(workers) < 4:
            assert process.poll() is None
            time.sleep(0.2)
            with contextlib.suppress(RuntimeError):
                workers = [p for s in spaces for p in hosts.run("ip", "netns", "pids", s).split()]
        time.sleep(5)
        if how == "interrupt":
            os.killpg(process.pid, signal.SIGINT)
        elif how == "terminate":
            process.terminate()
        elif how == "kill a worker":
            os.kill(int(workers[-1]), signal.SIGKILL)
        else:
            process.kill()
        text, _ = process.communicate(timeout=60)
        assert process.returncode != 0
        if how == "kill the launcher":
            assert {*spaces, f"obz-{process.pid}-switch"} <= set(hosts.existing())
            assert f"removed: {spaces[0]}" in start("--clean").communicate()[0]
        assert hosts.existing(process.pid) == []
        for worker in workers:
            assert not pathlib.Path("/proc", worker).exists(), text[-2000:]
    finally:
        process.kill()
        hosts.clean(hosts.existing(process.pid))
