"""Steps skipped in a row, and float16 with dynamic loss scaling."""

import functools
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from onebit_zero_jax import ZeroConfig, init, onebit_adamw, train_step
from onebit_zero_jax.skips import SkipLimit

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "examples"))
from float16 import LossScale, adjust, in_float16

pytestmark = pytest.mark.usefixtures("few_optimizations")

ZERO = ZeroConfig(stage=2)


def mesh():
    return jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])


def tiny_errors(params, batch):
    """In float16: the backward pass of a small loss underflows unless it is scaled."""
    out = batch["x"].astype(jnp.float16) @ params["w"] + params["b"]
    error = (out - batch["y"].astype(jnp.float16)) * jnp.float16(1e-2)
    return jnp.mean(jnp.square(error.astype(jnp.float32))) * 1e-4


@functools.cache
def stepper():
    # Gradients of about 1e-10 are far below the usual eps.
    tx = onebit_adamw(0.01, eps=1e-14, zero=ZERO, warmup_steps=3, refresh=8, weight_decay=0.0)
    return tx, train_step(in_float16(tiny_errors), tx, mesh(), ZERO)


def start():
    params = {"w": jnp.zeros((16, 16)), "b": jnp.zeros(16)}
    return init(params, stepper()[0], mesh(), ZERO)


def batch_of(step, scale, poison=0.0):
    rng = np.random.default_rng(step)
    x = rng.normal(size=(8, 16)).astype("f4")
    y = x @ np.full((16, 16), 0.25, "f4") + poison
    return {"x": x, "y": y, "scale": np.full(2, scale, "f4")}


def scaled_run(steps, first, dynamic=True, poison=0.0):
    """The example's loss scaling: half after a skipped step, twice after 10 good ones."""
    state, limit, scales = start(), SkipLimit(60), []
    scale = LossScale.of(first, mesh())
    for t in range(steps):
        scales.append(float(np.asarray(scale.scale)[0]))
        batch = dict(batch_of(t, first, poison), scale=scale.scale)
        state, metrics = stepper()[1](state, batch)
        limit(state)
        if dynamic:
            scale = adjust(scale, metrics["skipped_steps"], period=10)
    return state, scales, int(metrics["skipped_steps"])


def test_float16_with_dynamic_loss_scaling():
    """A scale that overflows and one that underflows, kept as they are, both move nothing."""
    state, scales, skipped = scaled_run(60, 2.0**40)
    assert 1 <= skipped <= 20
    assert int(state.opt_state.applied) == 60 - skipped
    # Down until it fits, up after ten good steps, and so on.
    ratios = np.divide(scales[1:], scales[:-1])
    assert set(ratios) == {0.5, 1.0, 2.0}
    assert np.sum(ratios == 0.5) >= skipped - 1
    assert np.mean(np.abs(state.params["w"] - 0.25)) < 0.05
    stuck, _, skipped = scaled_run(5, 1.0, dynamic=False)
    assert skipped == 0
    assert not np.any(np.asarray(stuck.params["w"]))
    stuck, _, skipped = scaled_run(5, 2.0**60, dynamic=False)
    assert skipped == 5
    assert not np.any(np.asarray(stuck.params["w"]))


def test_data_that_no_scale_helps_ends_the_run():
    with pytest.raises(
        FloatingPointError, match=r"last 60 steps .* in \['b'\] \(60\), \['w'\] \(60\)"
    ):
        scaled_run(200, 2.0**20, poison=np.nan)


def test_only_steps_in_a_row_count():
    state, limit, step = start(), SkipLimit(3), stepper()[1]
    limit(state)
    for t, poison in enumerate([np.nan, np.nan, 0.0, np.nan, np.nan, np.nan]):
        state, _ = step(state, batch_of(t, 2.0**20, poison))
        if t < 5:
            limit(state)
    with pytest.raises(FloatingPointError, match="last 3 steps were skipped"):
        limit(state)
    # A state from elsewhere starts anew.
    limit(start())


def test_bad_limits():
    for limit in (0, -1, 2.0, True, None):
        with pytest.raises(ValueError, match="limit must be an integer of at least 1"):
            SkipLimit(limit)
