"""The stacked run of the convergence benchmark is the run on a mesh."""

import pathlib
import sys

import jax
import numpy as np
import pytest

import onebit_zero_jax as ob
from onebit_zero_jax.phases import Phases

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "benchmarks"))

from stacked import Config, Stacked
from tasks import Task

STEPS, WARMUP, REFRESH, RATE, WORKERS = 8, 3, 3, 1e-2, 4


def task() -> Task:
    """One compressed leaf, one dense leaf, and batches that differ between workers."""

    def init(seed):
        rng = np.random.default_rng(seed)
        return {
            "w": rng.normal(size=(16, 24)).astype(np.float32),
            "b": np.zeros(24, np.float32),
        }

    def batches(seed):
        rng = np.random.default_rng(seed)
        while True:
            yield rng.normal(size=(2 * WORKERS, 16)).astype(np.float32)

    def loss(params, x):
        return (((x @ params["w"] + params["b"]) - 1) ** 2).mean()

    return Task(
        "lines",
        init,
        loss,
        batches,
        lambda params: params["b"][0],
        2 * WORKERS,
        STEPS,
        RATE,
        decay=0.1,
    )


@pytest.mark.parametrize("stage", [1, 2])
def test_stacked_workers_are_devices(stage):
    small, phases = task(), Phases(WARMUP, REFRESH)
    zero = ob.ZeroConfig(stage=stage)
    stacked = Stacked(
        small,
        Config((("stage", stage),), warmup=WARMUP / STEPS, refresh=REFRESH, workers=WORKERS),
    )
    args = np.float32(RATE), np.int32(WARMUP)
    mesh = jax.make_mesh((WORKERS,), ("data",), devices=jax.devices()[:WORKERS])
    tx = ob.onebit_adamw(
        small.schedule(RATE),
        b2=small.b2,
        weight_decay=small.decay,
        zero=zero,
        warmup_steps=WARMUP,
        refresh=REFRESH,
    )
    step = ob.train_step(small.loss, tx, mesh, zero)
    state = ob.init(small.init(0), tx, mesh, zero)
    params = jax.tree.map(jax.numpy.array, small.init(0))
    opt = stacked.init(params, *args)
    seen = set()
    for t, batch in zip(range(STEPS), small.batches(0), strict=False):
        phase = "dense" if phases.is_dense(t) else "compressed"
        opt, params, _ = stacked.step(phase)(opt, params, batch, *args)
        state, metrics = step(state, batch)
        assert metrics["phase"] == phase
        seen.add(phase)
    assert seen == {"dense", "compressed"}
    # Packed codes may differ where a value is within rounding of a level; here none is.
    got, want = jax.device_get((params, state.params))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), got, want)
    # The stacked axis is the mesh's pieces one after the other.
    for a, b in zip(
        jax.tree.leaves(opt.leaves), jax.tree.leaves(state.opt_state.leaves), strict=True
    ):
        np.testing.assert_allclose(np.reshape(a, b.shape), b, rtol=1e-5, atol=1e-6)
    # And the bits the benchmark reports are those of the train step, but for its metrics.
    sent = dict(step.bytes_sent(state, batch))
    sent.pop("metrics")
    size = sum(x.size for x in jax.tree.leaves(params))
    assert stacked.bits("compressed") == pytest.approx(sum(sent.values()) * 8 / size)
