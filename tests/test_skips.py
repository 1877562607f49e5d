"""Steps skipped in a row, and float16 with dynamic loss scaling."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from onebit_zero_jax import ZeroConfig, init, onebit_adamw, train_step
from onebit_zero_jax.skips import SkipLimit

pytestmark = pytest.mark.usefixtures("few_optimizations")

ZERO = ZeroConfig(stage=2)


def mesh():
    return jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])


@jax.custom_vjp
def times_in_backward(x, factor):
    """``x``; its gradient is multiplied by ``factor``."""
    return x


times_in_backward.defvjp(
    lambda x, factor: (x, factor), lambda factor, g: (g * factor, jnp.zeros_like(factor))
)


def loss_fn(params, batch):
    """In float16: the backward pass of a small loss underflows unless it is scaled."""
    scale = batch["scale"][0]
    params = jax.tree.map(lambda p: times_in_backward(p, 1 / scale), params)
    half = jax.tree.map(lambda p: p.astype(jnp.float16), params)
    out = batch["x"].astype(jnp.float16) @ half["w"] + half["b"]
    error = (out - batch["y"].astype(jnp.float16)) * jnp.float16(1e-2)
    loss = jnp.mean(jnp.square(error.astype(jnp.float32)))
    return times_in_backward(loss * 1e-4, scale)


@functools.cache
def stepper():
    # Gradients of about 1e-10 are far below the usual eps.
    tx = onebit_adamw(0.01, eps=1e-14, zero=ZERO, warmup_steps=3, refresh=8, weight_decay=0.0)
    return tx, train_step(loss_fn, tx, mesh(), ZERO)


def start():
    params = {"w": jnp.zeros((16, 16)), "b": jnp.zeros(16)}
    return init(params, stepper()[0], mesh(), ZERO)


def batch_of(step, scale, poison=0.0):
    rng = np.random.default_rng(step)
    x = rng.normal(size=(8, 16)).astype("f4")
    y = x @ np.full((16, 16), 0.25, "f4") + poison
    return {"x": x, "y": y, "scale": np.full(8, scale, "f4")}


def scaled_run(steps, scale, dynamic=True, poison=0.0):
    """Loss scaling on the host: half of it after a skipped step, twice after 10 good ones."""
    state, limit, scales, skipped, good = start(), SkipLimit(60), [], 0, 0
    for t in range(steps):
        state, metrics = stepper()[1](state, batch_of(t, scale, poison))
        limit(state)
        scales.append(scale)
        before, skipped = skipped, int(metrics["skipped_steps"])
        good = good + 1 if skipped == before else 0
        if dynamic and skipped > before:
            scale = max(scale / 2, 1.0)
        elif dynamic and good and good % 10 == 0:
            scale *= 2
    return state, scales, skipped


def test_float16_with_dynamic_loss_scaling():
    """A scale that overflows and one that underflows, kept as they are, both move nothing."""
    state, scales, skipped = scaled_run(60, 2.0**40)
    assert 1 <= skipped <= 20
    assert int(state.opt_state.applied) == 60 - skipped
    assert min(scales) < 2.0**40
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
