"""Two real processes over ``jax.distributed`` train exactly as one process does."""

import json
import pathlib
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent

PROGRAM = """
import json, sys
import jax
processes, rank, port = map(int, sys.argv[1:])
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4 // processes)
if processes > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, rank)
import jax.numpy as jnp
import numpy as np
import onebit_zero_jax as ob


# Rises once, at step 26: the program finds it at step 15, hosts read it at 24.
rate = lambda t: 1e-2 * (1 - (t % 26) / 52)
# Small integers: sums of gradients over devices are exact in any order.
loss_fn = lambda p, x: jnp.sum(p["w"] * x[0]) + jnp.sum(p["b"] * x[0, 0, :3])


def run(shape, axis, stage, steps):
    names = axis if isinstance(axis, tuple) else (axis,)
    mesh, zero = jax.make_mesh(shape, names), ob.ZeroConfig(axis_name=axis, stage=stage)
    tx = ob.onebit_adamw(rate, zero=zero, warmup_steps=3)
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(32, 32)).astype(np.float32), "b": np.zeros(3, np.float32)}
    state = ob.init(params, tx, mesh, zero)
    step = ob.train_step(loss_fn, tx, mesh, zero)
    dense, weights = [], []
    for t in range(steps):
        batch = rng.integers(-8, 8, (4, 32, 32)).astype(np.float32)
        mine = 4 // processes
        state, metrics = step(state, batch[rank * mine : (rank + 1) * mine])
        dense += [t] if metrics["phase"] == "dense" else []
        if t in (5, steps - 1):
            weights.append(np.asarray(ob.full_params(state)["w"]).tolist())
    ob.assert_in_sync(state)
    return {"dense": dense, "early": weights[0], "end": weights[-1]}


two_speed = ("slow", "fast")
runs = [((4,), "data", 2, 30), ((2, 2), two_speed, 3, 6)]
print(json.dumps([run(*r) for r in runs]))
"""


def launch(processes: int) -> list[dict]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(processes), str(rank), str(port)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    try:
        # Together: a process that waits for its pipe keeps the others from shutting down.
        with ThreadPoolExecutor(processes) as pool:
            results = list(pool.map(lambda p: p.communicate(timeout=200), running))
    finally:
        for p in running:
            p.kill()
    for p, (_, err) in zip(running, results, strict=True):
        assert p.returncode == 0, err[-3000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in results]


def test_two_processes_equal_one():
    """Of one axis, and of a two-speed mesh at stage 3 over its fast axis."""
    (alone,) = launch(1)
    first, second = launch(2)
    assert first == second
    assert [run["dense"] for run in first] == [[0, 1, 2, 26], [0, 1, 2]]
    for one, two in zip(alone, first, strict=True):
        assert one["dense"] == two["dense"]
        # Weights are sums of real numbers, here and there in another order.
        np.testing.assert_allclose(one["early"], two["early"], atol=1e-6)
        np.testing.assert_allclose(one["end"], two["end"], atol=1e-6)
    assert alone[0]["early"] == first[0]["early"]
