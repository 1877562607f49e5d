"""Real processes, killed at any moment: what is lost is the steps since the last save."""

import contextlib
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
LAUNCH = str(ROOT / "examples" / "multihost" / "launch.py")
TRAIN = str(ROOT / "examples" / "multihost" / "train.py")

# One device, a state big enough that writing it takes as long as some steps.
PROGRAM = """
import sys
import jax
jax.config.update("jax_platforms", "cpu")
import jax.numpy as jnp
import numpy as np
import onebit_zero_jax as ob
from onebit_zero_jax.sync import digest

directory, last = sys.argv[1], int(sys.argv[2])
mesh, zero = jax.make_mesh((1,), ("data",)), ob.ZeroConfig(stage=2)
tx = ob.onebit_adamw(1e-2, zero=zero, warmup_steps=3, refresh=4)
params = {"w": jnp.ones((512, 512))}
step = ob.train_step(lambda p, x: jnp.mean(jnp.square(p["w"] * x[0, 0] - x[0])), tx, mesh, zero)
with ob.CheckpointManager(directory, keep=2) as manager:
    start = 0
    if manager.latest_step() is None:
        state = ob.init(params, tx, mesh, zero)
    else:
        state, start = manager.restore(params, tx, mesh, zero)
        assert start == int(state.step)
        print("restored", start, flush=True)
    for i in range(start, last):
        batch = np.random.default_rng(i).normal(size=(1, 512)).astype(np.float32)
        state, _ = step(state, batch)
        print("step", i + 1, manager.latest_step() or 0, flush=True)
        manager.save(state, data_position=i + 1)
print("digest", int(digest(state.params["w"])), flush=True)
"""


@pytest.fixture(scope="module")
def env(tmp_path_factory):
    """Restarts need not compile again."""
    cache = str(tmp_path_factory.mktemp("cache"))
    return os.environ | {
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def begin(*command, env):
    return subprocess.Popen(
        [sys.executable, *command],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(*command, env, timeout=280):
    p = begin(*command, env=env)
    try:
        out, _ = p.communicate(timeout=timeout)
    finally:
        if p.poll() is None:
            kill(p)
    assert p.returncode == 0, out[-3000:]
    return out


def kill(p):
    """The process and all it started, at once; what it had printed."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(p.pid, signal.SIGKILL)
    with p.stdout:
        out = "" if p.stdout.closed else p.stdout.read()
    p.wait()
    return out


def run_until(p, pattern, then=0.0):
    """Output up to a line that matches, and some seconds more."""
    lines = []
    for line in p.stdout:
        lines.append(line)
        if re.search(pattern, line):
            time.sleep(then)
            return "".join(lines)
    raise AssertionError(f"ended before {pattern!r}:\n{''.join(lines)[-3000:]}")


def completed(directory):
    return [int(name) for name in os.listdir(directory) if name.isdigit()]


def test_killed_while_saving_goes_on_as_if_nothing_had_been(tmp_path, env):
    whole = finish("-c", PROGRAM, str(tmp_path / "whole"), "12", env=env)
    p = begin("-c", PROGRAM, str(tmp_path / "killed"), "12", env=env)
    out = run_until(p, r"^step 6 ", then=0.01)
    kill(p)
    known = int(re.findall(r"^step \d+ (\d+)$", out, re.MULTILINE)[-1])
    assert max(completed(tmp_path / "killed")) >= known >= 1
    out = finish("-c", PROGRAM, str(tmp_path / "killed"), "12", env=env)
    assert int(re.findall(r"restored (\d+)", out)[0]) >= known
    assert re.findall("digest.*", out) == re.findall("digest.*", whole)
    assert not [n for n in os.listdir(tmp_path / "killed") if not n.isdigit()]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_again_and_again_at_random_moments(tmp_path, env):
    """During start, restore, steps and saves; what was complete before a kill is there after."""
    seed = random.randrange(10**6)
    rng = random.Random(seed)
    print("seed", seed)
    began = time.monotonic()
    whole = finish("-c", PROGRAM, str(tmp_path / "whole"), "60", env=env)
    # A little longer than the whole takes without compiling.
    longest, least, out = time.monotonic() - began, 0, ""
    for _ in range(12):
        p = begin("-c", PROGRAM, str(tmp_path / "killed"), "60", env=env)
        time.sleep(rng.uniform(0, longest))
        out = kill(p)
        assert "Traceback" not in out
        for name, known in re.findall(r"^(restored|step \d+) (\d+)$", out, re.MULTILINE):
            assert int(known) >= (least if name == "restored" else 0)
        if (tmp_path / "killed").exists():
            newest = max(completed(tmp_path / "killed"), default=0)
            assert newest >= least
            least = newest
    out = finish("-c", PROGRAM, str(tmp_path / "killed"), "60", env=env)
    assert re.findall("digest.*", out) == re.findall("digest.*", whole)


# ---------------------------------------------------------------- many processes


def launched(tmp_path, name, *flags, n=2):
    common = ["--steps", "40", "--save-every", "4", "--check-every", "10", "--peer-timeout", "20"]
    where = ["--checkpoints", str(tmp_path / name), "--out", str(tmp_path / f"{name}.json")]
    return [LAUNCH, "-n", str(n), "--", sys.executable, TRAIN, *common, *where, *flags]


def report(tmp_path, name):
    return json.loads((tmp_path / f"{name}.json").read_text())


def children(pid):
    """Process ids of the launcher's processes, in the order of their ranks."""
    return [int(c) for c in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_hosts_that_die_and_come_back(tmp_path, env):
    """Two processes of two devices; one is killed, the launcher ends the other, all start again."""
    rng = random.Random(0)
    finish(*launched(tmp_path, "whole", "--local-devices", "2"), env=env)
    command = launched(tmp_path, "killed", "--local-devices", "2")
    moments = [r"step 10:", r"restored step", r"\] step 30:"]
    for victim, moment in enumerate(moments):
        p = begin(*command, env=env)
        run_until(p, moment, then=rng.uniform(0, 0.5))
        os.kill(children(p.pid)[victim % 2], signal.SIGKILL)
        began = time.monotonic()
        out, _ = p.communicate(timeout=60)
        assert time.monotonic() - began < 30
        assert p.returncode == 128 + signal.SIGKILL
        assert f"process {victim % 2} ended with signal SIGKILL; ending the others" in out
    out = finish(*command, env=env)
    assert int(re.findall(r"restored step (\d+)", out)[0]) >= 24
    assert report(tmp_path, "killed") == report(tmp_path, "whole")
    # On one process of two devices: another split, then done.
    more = launched(tmp_path, "killed", "--local-devices", "2", "--steps", "44", "--resize", n=1)
    assert "restored step 40" in finish(*more, env=env)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("lost", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_peer_ends_the_others_without_a_launcher(tmp_path, env, lost):
    """As on many machines, where nobody ends the others: dead or silent, within the timeout."""
    address = f"127.0.0.1:{random.randrange(20000, 30000)}"
    flags = ["--local-devices", "1", "--steps", "100000", "--peer-timeout", "10"]
    cluster = ["--coordinator", address, "--processes", "2", "--process-id"]
    both = [begin(TRAIN, *flags, *cluster, str(rank), env=env) for rank in range(2)]
    try:
        run_until(both[0], "step 20:")
        os.killpg(both[1].pid, lost)
        began = time.monotonic()
        out, _ = both[0].communicate(timeout=100)
        seconds = time.monotonic() - began
        print(f"{lost.name}: ended after {seconds:.1f} s with {both[0].returncode}")
        print(out[-1500:])
        assert seconds < 30
        assert both[0].returncode not in (0, None)
        assert re.search("stopped after|detected fatal errors", out)
    finally:
        for p in both:
            if not p.stdout.closed:
                kill(p)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_slurm_is_found(tmp_path, env):
    """What srun sets is all that the script needs."""
    both = [
        begin(
            *[TRAIN, "--local-devices", "1", "--steps", "2", "--batch", "8"],
            env=env
            | {
                "SLURM_JOB_ID": str(random.randrange(10**6)),
                "SLURM_STEP_NODELIST": "localhost",
                "SLURM_NTASKS": "2",
                "SLURM_PROCID": str(rank),
                "SLURM_LOCALID": "0",
                "JAX_COORDINATOR_PORT": str(random.Random(os.getpid()).randrange(20000, 30000)),
            },
        )
        for rank in range(2)
    ]
    try:
        outs = [p.communicate(timeout=280)[0] for p in both]
    finally:
        for p in both:
            if p.poll() is None:
                kill(p)
    assert [p.returncode for p in both] == [0, 0], outs
    assert ["done" in out.splitlines() for out in outs] == [True, False]


# Two processes of two devices, or one of four. Arguments: processes, rank, port, folder.
TOGETHER = """
import sys
import jax
processes, rank, port = map(int, sys.argv[1:4])
folder = sys.argv[4]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4 // processes)
if processes > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, rank)
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
import onebit_zero_jax as ob
from onebit_zero_jax.checkpoint_content import digests, flat

devices = np.asarray(jax.devices())
meshes = Mesh(devices.reshape(2, 2), ("hosts", "local")), Mesh(devices, ("data",))
zeros = ob.ZeroConfig(axis_name=("hosts", "local")), ob.ZeroConfig(stage=1)
two, one = (ob.onebit_adamw(1e-2, zero=z, warmup_steps=1, refresh=None) for z in zeros)
params = {"w": jnp.ones((32, 30)), "b": jnp.zeros(3)}
if processes > 1:
    step = ob.train_step(lambda p, x: jnp.sum(jnp.square(p["w"] * x[0])), two, meshes[0], zeros[0])
    state = ob.init(params, two, meshes[0], zeros[0])
    for t in range(3):
        batch = np.random.default_rng((t, rank)).normal(size=(2, 32, 30)).astype(np.float32)
        state, _ = step(state, batch)
    ob.save(folder, state)
    moved = ob.resize(state, one, meshes[1], zeros[1])
    ob.assert_in_sync(moved)
    few = Mesh(devices[::2], ("data",))
    half, _ = ob.restore(folder, params, one, few, zeros[1], resize=True)
    assert half.opt_state.leaves["w"].worker_error.sharding.mesh.size == 2
    try:
        ob.resize(state, one, few, zeros[1])
    except ValueError as e:
        assert "several processes" in str(e)
    else:
        raise AssertionError("devices of a lost process were accepted")
    same, _ = ob.restore(folder, params, two, meshes[0], zeros[0])
    assert digests(flat(same)) == digests(flat(state))
else:
    moved, _ = ob.restore(folder, params, one, meshes[1], zeros[1], resize=True)
print("moved", sorted(digests(flat(moved)).items()))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_processes_save_restore_and_resize_together(tmp_path, env):
    port, folder = str(random.randrange(20000, 30000)), str(tmp_path / "saved")
    both = [begin("-c", TOGETHER, "2", str(r), port, folder, env=env) for r in range(2)]
    try:
        outs = [p.communicate(timeout=280)[0] for p in both]
    finally:
        for p in both:
            if p.poll() is None:
                kill(p)
    assert [p.returncode for p in both] == [0, 0], outs
    outs.append(finish("-c", TOGETHER, "1", "0", port, folder, env=env))
    moved = [re.findall("moved.*", out) for out in outs]
    assert moved[0] == moved[1] == moved[2]
    assert moved[0]


# ---------------------------------------------------------------- the launcher


def launcher(*command, n=3):
    began = time.monotonic()
    p = subprocess.run(
        [sys.executable, LAUNCH, "-n", str(n), "--", sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=60,
    )
    return p.returncode, p.stdout, time.monotonic() - began


def test_launcher_prefixes_lines_and_tells_ranks():
    code, out, _ = launcher("-c", "import sys; print('I am', sys.argv[6], 'of', sys.argv[4])")
    assert code == 0
    assert sorted(out.splitlines()[1:]) == [f"[{r}] I am {r} of 3" for r in range(3)]


@pytest.mark.parametrize(
    ("death", "code", "how"),
    [("sys.exit(3)", 3, "code 3"), ("os.kill(os.getpid(), 9)", 137, "signal SIGKILL")],
)
def test_launcher_ends_all_when_one_dies(death, code, how):
    """Those that ignore SIGTERM too."""
    program = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"if sys.argv[6] == '1': time.sleep(1); {death}\n"
        "print('pid', os.getpid(), flush=True)\n"
        "time.sleep(100)\n"
    )
    got, out, seconds = launcher("-c", program)
    assert got == code
    assert f"process 1 ended with {how}; ending the others" in out
    assert seconds < 30
    pids = [int(pid) for pid in re.findall(r"pid (\d+)", out)]
    assert len(pids) == 2
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
