"""The host picks phases from the optimizer's own count, whatever wraps or replaces its state."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import onebit_zero_jax as ob

ZERO = ob.ZeroConfig()
BATCH = np.ones((4, 32), np.float32)


def mesh_of():
    return jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])


def params_of():
    return {"w": np.ones((32, 32), np.float32)}


def loss_fn(params, x):
    return jnp.mean(jnp.square(x @ params["w"]))


def test_a_fresh_optimizer_state_warms_up_again():
    tx = ob.onebit_adam(1e-2, zero=ZERO, warmup_steps=3, refresh=None)
    mesh = mesh_of()
    step = ob.train_step(loss_fn, tx, mesh, ZERO)
    state = ob.init(params_of(), tx, mesh, ZERO)
    phases = []
    for i in range(10):
        if i == 5:
            fresh = ob.init(params_of(), tx, mesh, ZERO).opt_state
            state = dataclasses.replace(state, opt_state=fresh)
        before = np.asarray(state.params["w"])
        state, metrics = step(state, BATCH)
        phases.append(metrics["phase"])
        assert np.all(np.asarray(state.params["w"]) != before)
    assert phases == (["dense"] * 3 + ["compressed"] * 2) * 2
    assert int(state.step) == 10


def test_an_empty_group_does_not_count():
    """A partition group without leaves neither holds the run in warm-up nor freezes model state."""

    def loss_with_state(params, model_state, x):
        return loss_fn(params, x), {"mean": model_state["mean"] + jnp.mean(x)}

    one = ob.onebit_adam(1e-2, zero=ZERO, warmup_steps=2, refresh=None)
    tx = optax.partition({"empty": one, "all": one}, {"w": "all"})
    mesh = mesh_of()
    state = ob.init(params_of(), tx, mesh, ZERO, model_state={"mean": np.zeros((), np.float32)})
    step = ob.train_step(loss_with_state, tx, mesh, ZERO, has_model_state=True)
    phases = []
    for _ in range(4):
        state, metrics = step(state, BATCH)
        phases.append(metrics["phase"])
    assert phases == ["dense", "dense", "compressed", "compressed"]
    assert float(state.model_state["mean"]) == 4.0


def test_metrics_are_the_callers_own():
    tx = ob.onebit_adam(1e-2, zero=ZERO, warmup_steps=9)
    mesh = mesh_of()
    step = ob.train_step(loss_fn, tx, mesh, ZERO)
    state, metrics = step(ob.init(params_of(), tx, mesh, ZERO), BATCH)
    sent = dict(metrics["bytes_sent"])
    metrics["bytes_sent"]["reduce"] = -1
    assert step(state, BATCH)[1]["bytes_sent"] == sent


def test_a_reduced_loss_is_refused_on_explicit_meshes_too():
    tx = ob.onebit_adam(1e-2, zero=ZERO)
    for kind in (jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto):
        mesh = jax.make_mesh((2,), ("data",), (kind,), devices=jax.devices()[:2])
        step = ob.train_step(lambda p, x: jax.lax.pmean(loss_fn(p, x), "data"), tx, mesh, ZERO)
        with pytest.raises(ValueError, match="same loss on every device"):
            step(ob.init(params_of(), tx, mesh, ZERO), BATCH)
