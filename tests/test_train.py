"""init, train_step and eval_step on a mesh."""

import functools
from typing import Any

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

from onebit_zero_jax import (
    ZeroConfig,
    eval_step,
    full_params,
    init,
    onebit_adam,
    onebit_adamw,
    shard_batch,
    state_shardings,
    train_step,
)
from onebit_zero_jax.phases import Phases

P = jax.P
PARTS = 2
WARMUP, REFRESH = 2, 3
ZERO = ZeroConfig(stage=2)
LEGS = {"layer_gather", "fast", "reduce", "gather", "dense_leaves", "weights", "metrics", "other"}


pytestmark = pytest.mark.usefixtures("few_optimizations")


def mesh_of(parts=PARTS, kind=AxisType.Auto):
    return jax.make_mesh((parts,), ("data",), (kind,), devices=jax.devices()[:parts])


def make_params():
    rng = np.random.default_rng(0)
    return {
        "w": jnp.asarray(rng.normal(size=(16, 16)) / 4, jnp.float32),
        "b": jnp.zeros(16, jnp.float32),
    }


def make_batches(count, size=8, seed=1):
    rng = np.random.default_rng(seed)
    target = rng.normal(size=(16, 16)) / 4
    x = rng.normal(size=(count, size, 16))
    noise = rng.normal(size=(count, size, 16)) / 4
    return [{"x": a.astype("f4"), "y": (a @ target + 1 + n).astype("f4")} for a, n in zip(x, noise)]


def loss_fn(params, batch):
    return jnp.mean(jnp.square(batch["x"] @ params["w"] + params["b"] - batch["y"]))


def make_tx(zero=ZERO, **kwargs):
    return onebit_adamw(0.02, zero=zero, **{"warmup_steps": WARMUP, "refresh": REFRESH, **kwargs})


@functools.cache
def shared():
    """One step for most tests: its two programs are compiled once."""
    tx = make_tx()
    return tx, train_step(loss_fn, tx, mesh_of(), ZERO)


def start(params=None):
    return init(params or make_params(), shared()[0], mesh_of(), ZERO)


def go(state, batches, step=None):
    """All metrics of some steps."""
    step, seen = step or shared()[1], []
    for batch in batches:
        state, metrics = step(state, batch)
        seen.append(metrics)
    return state, seen


def copied(tree):
    return jax.tree.map(jnp.copy, tree)


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


# ---------------------------------------------------------------- init and shardings


@pytest.mark.parametrize("placed", ["numpy", "one device", "on the mesh"])
def test_init_copies(placed):
    """Steps donate the state, and the user's own arrays stay as they were."""
    mine = jax.tree.map(np.asarray, make_params())
    if placed != "numpy":
        where = jax.devices()[0] if placed == "one device" else jax.NamedSharding(mesh_of(), P())
        mine = jax.device_put(mine, where)
    state, _ = go(first := start(mine), make_batches(4))
    assert all(x.is_deleted() for x in jax.tree.leaves(first.params))
    assert_equal(mine, make_params())
    assert np.any(np.asarray(full_params(state)["w"]) != np.asarray(mine["w"]))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_state_shardings(stage, kind):
    """Known from shapes alone, they are those of the arrays that init makes."""
    zero, mesh, params = ZeroConfig(stage=stage), mesh_of(kind=kind), make_params()
    tx, model_state = make_tx(zero), {"mean": jnp.zeros(3)}
    shapes = jax.eval_shape(lambda: params)
    known = state_shardings(shapes, tx, mesh, zero, model_state)
    state = init(params, tx, mesh, zero, model_state)
    assert jax.tree.structure(known) == jax.tree.structure(state)
    for (path, sharding), x in zip(jax.tree.leaves_with_path(known), jax.tree.leaves(state)):
        assert x.sharding.is_equivalent_to(sharding, x.ndim), path
        assert x.committed, path
    # Master parameters and variance are divided, worker state is one whole leaf each.
    w = state.opt_state.leaves["w"]
    assert w.worker_error.size == PARTS * 256
    if stage:
        assert w.variance.size == 256


def test_explicit_mesh_trains_to_the_same_bits():
    tx, batches = shared()[0], make_batches(4)
    mesh = mesh_of(kind=AxisType.Explicit)
    step = train_step(loss_fn, tx, mesh, ZERO)
    explicit, _ = go(init(make_params(), tx, mesh, ZERO), batches, step)
    auto, _ = go(start(), batches)
    assert_equal(explicit.params, auto.params)


# ---------------------------------------------------------------- phases


def test_phases_are_picked_on_the_host():
    state, seen = go(start(), make_batches(14))
    dense = [Phases(WARMUP, REFRESH).is_dense(t) for t in range(14)]
    assert [m["phase"] == "dense" for m in seen] == dense
    assert dense.count(True) == 2 + 4
    assert int(state.step) == 14
    losses = [float(m["loss"]) for m in seen]
    assert losses[-1] < 0.7 * losses[0]


def test_old_and_copied_states_take_up_their_own_phase():
    batches = make_batches(8)
    state, _ = go(start(), batches[:1])
    early = copied(state)
    again = copied(early)
    state, ahead = go(state, batches[1:])
    behind, seen = go(early, batches[1:])
    assert [m["phase"] for m in seen] == [m["phase"] for m in ahead]
    assert_equal(behind.params, state.params)
    for batch, metrics in zip(batches[1:4], ahead):  # two runs in turns on one step
        again, one = go(again, [batch])
        state, _ = go(state, [batch])
        assert one[0]["phase"] == metrics["phase"]


def test_a_warm_up_that_was_skipped_stays_dense():
    bad, good = make_batches(1), make_batches(3)
    bad[0]["x"][0, 0] = np.nan
    state, seen = go(start(), 4 * bad)
    assert [m["phase"] for m in seen] == 4 * ["dense"]
    assert [int(m["skipped_steps"]) for m in seen] == [1, 2, 3, 4]
    assert_equal(state.params, make_params())
    state, seen = go(state, good)  # step 4 is dense by the schedule too
    assert [m["phase"] for m in seen] == ["dense", "compressed", "compressed"]
    assert int(seen[-1]["skipped_steps"]) == 4


def test_no_wait_for_the_device(monkeypatch):
    """Steps after the first compressed one read nothing from the device and copy nothing to it."""
    state, _ = go(start(), make_batches(3))
    batches = [shard_batch(b, mesh_of(), ZERO) for b in make_batches(6)]

    def read(self, *args):
        raise AssertionError("the host waited for the device")

    for name in ("__int__", "__float__", "__bool__", "__index__", "__array__", "block_until_ready"):
        monkeypatch.setattr(type(state.step), name, read)
    with jax.transfer_guard("disallow"):
        state, seen = go(state, batches)
    monkeypatch.undo()
    assert {m["phase"] for m in seen} == {"dense", "compressed"}
    assert int(state.step) == 9


def test_phase_on_the_device_where_the_schedule_is_traced():
    """inject_hyperparams hides warmup_steps from the host; the steps are the same."""
    injected = optax.inject_hyperparams(onebit_adam)
    args = {"b1": 0.875, "b2": 0.9375, "eps": 2.0**-10, "zero": ZERO}
    batches, ends = make_batches(6), []
    for factory in (injected, onebit_adam):
        tx = factory(0.125, warmup_steps=WARMUP, refresh=REFRESH, **args)
        step = train_step(loss_fn, tx, mesh_of(), ZERO)
        state, seen = go(init(make_params(), tx, mesh_of(), ZERO), batches, step)
        ends.append(state.params)
        assert ("device" in {m["phase"] for m in seen}) == (factory is injected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *ends)


# ---------------------------------------------------------------- losses of all kinds


def everything(params, model_state, batch, rng):
    """Dropout, running statistics and auxiliary outputs."""
    mask = jax.random.bernoulli(rng, 0.5, (16,))
    x = batch["x"] * mask
    loss = jnp.mean(jnp.square(x @ params["w"] + params["b"] - batch["y"]))
    here = jax.nn.one_hot(jax.lax.axis_index("data"), PARTS)
    aux = {
        "masks": PARTS * here[:, None] * mask,
        "mean": jnp.mean(batch["x"]),
        "examples": len(batch["x"]),
        "positive": jnp.sum(batch["x"] > 0),
    }
    new = {
        "mean": 0.5 * model_state["mean"] + jnp.mean(batch["x"], 0),
        "calls": model_state["calls"] + 1,
    }
    return loss, (new, aux)


def test_aux_rng_and_model_state():
    tx, batches = shared()[0], make_batches(2)
    step = train_step(
        everything, tx, mesh_of(), ZERO, has_aux=True, with_rng=True, has_model_state=True
    )
    model_state = {"mean": jnp.ones(16), "calls": jnp.zeros((), jnp.int32)}
    state = init(make_params(), tx, mesh_of(), ZERO, model_state)
    key, masks = jax.random.key(3), []
    for batch in batches:
        before = np.asarray(state.model_state["mean"])
        state, metrics = step(state, batch, key)
        aux = metrics["aux"]
        masks.append(np.asarray(aux["masks"]))
        assert aux["mean"] == pytest.approx(batch["x"].mean(), abs=1e-6)
        assert (int(aux["examples"]), int(aux["positive"])) == (8, (batch["x"] > 0).sum())
        np.testing.assert_allclose(
            state.model_state["mean"], 0.5 * before + batch["x"].mean(0), rtol=1e-5, atol=1e-6
        )
    assert int(state.model_state["calls"]) == 2
    # One key gives other masks on each device and in each step, and the same ones again.
    rows = np.concatenate(masks)
    assert set(rows.ravel()) == {0.0, 1.0}
    assert len({row.tobytes() for row in rows}) == 2 * PARTS
    # A skipped step leaves no statistics behind.
    before = copied(state.model_state)
    batches[1]["x"][0, 0] = np.inf
    state, metrics = step(state, batches[1], key)
    assert int(metrics["skipped_steps"]) == 1
    assert_equal(state.model_state, before)
    _, metrics = step(init(make_params(), tx, mesh_of(), ZERO, model_state), batches[0], key)
    assert_equal(metrics["aux"]["masks"], masks[0])


def test_accumulation_is_one_big_batch():
    """In the dense phase, to rounding."""
    tx, batches = shared()[0], make_batches(WARMUP, size=16)
    big, one = go(start(), batches)
    step = train_step(loss_fn, tx, mesh_of(), ZERO, accumulate=4)
    small, four = go(start(), batches, step)
    # A code of 4 bits may fall on either side of a rounding boundary.
    level = 2 / 15 * np.abs(np.asarray(big.params["w"]) - np.asarray(make_params()["w"])).max()
    np.testing.assert_allclose(small.params["w"], big.params["w"], atol=level)
    np.testing.assert_allclose(small.params["b"], big.params["b"], rtol=1e-5, atol=1e-6)
    for a, b in zip(one, four):
        assert a["bytes_sent"] == b["bytes_sent"]
        for name in ("loss", "gradient_norm"):
            assert float(b[name]) == pytest.approx(float(a[name]), rel=1e-5)


def test_micro_batches_have_keys_of_their_own():
    def loss(params, batch, rng):
        mask = jax.random.bernoulli(rng, 0.5, (64,)).astype(jnp.float32)
        return loss_fn(params, batch), {"mean": mask, "square": mask**2}

    tx, (batch,) = shared()[0], make_batches(1)
    step = train_step(loss, tx, mesh_of(), ZERO, has_aux=True, with_rng=True, accumulate=2)
    _, metrics = step(start(), batch, jax.random.key(0))
    # Averages of four independent masks take all values from 0 to 4 quarters.
    assert set(np.asarray(metrics["aux"]["mean"])) == {0, 0.25, 0.5, 0.75, 1}


def test_compute_dtype():
    seen = []

    def loss(params, batch):
        seen.extend(x.dtype for x in jax.tree.leaves(params))
        return loss_fn(params, batch)

    step = train_step(loss, shared()[0], mesh_of(), ZERO, compute_dtype=jnp.bfloat16)
    state, (metrics,) = go(start(), make_batches(1), step)
    assert set(seen) == {jnp.dtype(jnp.bfloat16)}
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.float32)}
    _, (full,) = go(start(), make_batches(1))
    assert metrics["loss"].dtype == jnp.float32
    assert float(metrics["loss"]) == pytest.approx(float(full["loss"]), rel=2e-2)
    assert float(metrics["loss"]) != float(full["loss"])


def test_a_loss_that_scans_from_a_constant():
    def loss(params, batch):
        def add(total, x):
            return total + jnp.mean(jnp.square(x @ params["w"] + params["b"])), None

        return jax.lax.scan(add, 0.0, batch["x"])[0]

    step = train_step(loss, shared()[0], mesh_of(), ZERO)
    (batch,) = make_batches(1)
    _, (metrics,) = go(start(), [batch], step)
    expected = (batch["x"] @ np.asarray(make_params()["w"])) ** 2
    assert float(metrics["loss"]) == pytest.approx(expected.mean(1).sum() / PARTS, rel=1e-5)


def test_frozen_parameters():
    groups: Any = {"train": make_tx(), "freeze": optax.set_to_zero()}
    tx = optax.partition(groups, {"w": "train", "b": "freeze"})
    step = train_step(loss_fn, tx, mesh_of(), ZERO)
    state, seen = go(init(make_params(), tx, mesh_of(), ZERO), make_batches(5), step)
    assert {m["phase"] for m in seen} == {"dense", "compressed"}
    assert_equal(state.params["b"], make_params()["b"])
    assert (np.asarray(state.params["w"]) != np.asarray(make_params()["w"])).all()


# ---------------------------------------------------------------- batches, evaluation, metrics


def test_batches_from_the_host_and_on_the_mesh():
    batches = make_batches(4)
    placed = [shard_batch(b, mesh_of(), ZERO) for b in batches]
    assert all(x.sharding.spec == P("data") for x in jax.tree.leaves(placed))
    again = shard_batch(placed[0], mesh_of(), ZERO)
    assert again["x"] is placed[0]["x"]
    one_device = jax.device_put(batches, jax.devices()[1])
    ends = [go(start(), b)[0].params for b in (batches, placed, one_device)]
    assert_equal(ends[0], ends[1])
    assert_equal(ends[0], ends[2])
    # Batches are not donated.
    assert_equal(placed, batches)


def test_eval_step():
    def with_aux(params, batch):
        return loss_fn(params, batch), {"examples": len(batch["x"]), "mean": jnp.mean(batch["x"])}

    state, (batch,) = start(), make_batches(1)
    evaluate = eval_step(with_aux, mesh_of(), ZERO, has_aux=True)
    evaluate(state, batch)
    out = evaluate(state, batch)  # the state was not donated
    assert float(out["loss"]) == pytest.approx(float(loss_fn(make_params(), batch)), rel=1e-6)
    assert int(out["aux"]["examples"]) == 8
    assert float(out["aux"]["mean"]) == pytest.approx(batch["x"].mean(), abs=1e-6)


def test_metrics():
    batches, state = make_batches(6), start()
    for i, batch in enumerate(batches):
        before = jax.tree.map(np.asarray, state.params)
        state, metrics = go(state, [batch])
        (metrics,) = metrics
        loss, grads = jax.value_and_grad(loss_fn)(before, batch)
        assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-5)
        # A sketch of 1031 values: within 2.2 %, one standard deviation.
        assert float(metrics["gradient_norm"]) == pytest.approx(
            float(optax.tree.norm(grads)), rel=0.09
        )
        ratio = float(metrics["residual_ratio"])
        assert ratio == 0 if i < WARMUP else 0 < ratio < 1
        lost, had = np.asarray(state.opt_state.residual, np.float64).sum(0)
        assert ratio**2 * had == pytest.approx(lost, rel=1e-5)
        assert int(metrics["skipped_steps"]) == 0
        assert set(metrics["bytes_sent"]) == LEGS
        assert (metrics["bytes_sent"]["weights"] > 0) == (metrics["phase"] == "dense")


def test_own_loop_gives_the_same_parameters():
    tx, mesh, batches = shared()[0], mesh_of(), make_batches(6)
    specs = jax.tree.map(lambda s: s.spec, state_shardings(make_params(), tx, mesh, ZERO).opt_state)

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=(P(), specs))
    def step(params, opt_state, batch):
        varying = jax.lax.pcast(params, "data", to="varying")
        updates, opt_state = tx.update(jax.grad(loss_fn)(varying, batch), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    expected = start()
    params, opt_state = make_params(), start().opt_state
    for batch in batches:
        params, opt_state = step(params, opt_state, batch)
        expected, _ = go(expected, [batch])
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7),
            params,
            expected.params,
        )


# ---------------------------------------------------------------- Flax


class Linen(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x):
        return flax.linen.Dense(16)(flax.linen.relu(flax.linen.Dense(16)(x)))


class Nnx(flax.nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = (flax.nnx.Linear(16, 16, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        return self.second(flax.nnx.relu(self.first(x)))


@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_flax_trees(library):
    graph, params = flax.nnx.split(Nnx(flax.nnx.Rngs(0)))
    if library == "linen":
        params = Linen().init(jax.random.key(0), jnp.zeros((1, 16)))["params"]

    def apply(params, x) -> Any:
        if library == "linen":
            return Linen().apply({"params": params}, x)
        return flax.nnx.merge(graph, params)(x)

    def loss(params, batch):
        return jnp.mean(jnp.square(apply(params, batch["x"]) - batch["y"]))

    tx = make_tx(warmup_steps=20)
    step = train_step(loss, tx, mesh_of(), ZERO)
    state, seen = go(init(params, tx, mesh_of(), ZERO), make_batches(20), step)
    assert jax.tree.structure(state.params) == jax.tree.structure(params)
    assert float(seen[-1]["loss"]) < float(seen[0]["loss"])
    assert apply(full_params(state), make_batches(1)[0]["x"]).shape == (8, 16)
