"""A run of optax.adamw that goes on compressed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference as ref
import test_reference as steps

import onebit_zero_jax as ob

pytestmark = pytest.mark.usefixtures("few_optimizations")

PARTS = 2
RATE = optax.cosine_decay_schedule(0.02, 400)


def mesh_of(parts=PARTS):
    return jax.make_mesh((parts,), ("data",), devices=jax.devices()[:parts])


def params_of():
    rng = np.random.default_rng(0)
    return {"w": 0.1 * rng.normal(size=(16, 16)).astype(np.float32), "b": np.zeros(16, np.float32)}


def loss_fn(params, batch):
    x, y = batch
    return jnp.mean(jnp.square(jnp.tanh(x @ params["w"] + params["b"]) - y))


def batches(seed):
    rng = np.random.default_rng(seed)
    truth = np.random.default_rng(1).normal(size=(16, 16)) / 4
    while True:
        x = rng.normal(size=(32, 16)).astype(np.float32)
        noise = 0.3 * rng.normal(size=(32, 16))
        yield x, (np.tanh(x @ truth) + noise).astype(np.float32)


def adamw_run(tx, params, state, count, data):
    @jax.jit
    def step(params, state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    losses = []
    for _, batch in zip(range(count), data):
        params, state, loss = step(params, state, batch)
        losses.append(float(loss))
    return params, state, losses


@pytest.mark.parametrize("stage", [2, *(pytest.param(s, marks=pytest.mark.slow) for s in (1, 3))])
def test_the_loss_goes_on_without_a_jump(stage):
    zero = ob.ZeroConfig(stage=stage)
    dense = optax.chain(optax.clip(10.0), optax.adamw(RATE, b2=0.95, weight_decay=0.01))
    data = batches(0)
    start = jax.tree.map(jnp.asarray, params_of())
    params, adam, before = adamw_run(dense, start, dense.init(start), 60, data)
    data = list(zip(range(40), data))
    _, _, wanted = adamw_run(dense, params, adam, 40, (b for _, b in data))

    mesh = mesh_of()
    tx = ob.onebit_adamw(RATE, b2=0.95, weight_decay=0.01, zero=zero)
    state = ob.from_adam_state(params, adam, tx, mesh, zero)
    counts = optax.tree.get_all_with_path(state.opt_state, "count")
    assert [int(c) for _, c in counts] == [60]
    step = ob.train_step(loss_fn, tx, mesh, zero)
    got, phases = [], []
    for _, batch in data:
        state, metrics = step(state, batch)
        got.append(float(metrics["loss"]))
        phases.append(metrics["phase"])
    assert phases == ["compressed"] * 31 + ["dense"] + ["compressed"] * 8
    assert int(metrics["skipped_steps"]) == 0
    assert before[0] > 2 * wanted[0]
    assert got[0] == pytest.approx(wanted[0], rel=1e-5)
    # Both runs see the same batches.
    ratio = np.array(got) / np.array(wanted)
    assert np.abs(ratio - 1).max() < 0.06
    assert np.abs(ratio.mean() - 1) < 0.02


@pytest.mark.parametrize(
    "gather, bits", [("params", 4), pytest.param("momentum", 2, marks=pytest.mark.slow)]
)
def test_the_first_step_is_the_reference_step(gather, bits):
    parts, b1 = 2, 0.875
    zero = ob.ZeroConfig(stage=1, gather=gather, gather_bits=bits)
    rng = np.random.default_rng(0)
    params = {k: x.astype(jnp.float32) for k, x in steps.start(rng).items()}
    problem = steps.Problem(rng, parts)
    leaves = [ref.Leaf(steps.SHAPES[k], parts) for k in steps.NAMES]
    adamw = optax.adamw(steps.learning_rate, b1, steps.B2, steps.EPS, weight_decay=steps.DECAY)
    adam, update = adamw.init(params), jax.jit(adamw.update)
    for _ in range(12):
        mean = jax.tree.map(lambda g: np.mean(g, 0), problem.grads(1, params))
        updates, adam = update(mean, adam, params)
        params = optax.apply_updates(params, updates)
    tx = ob.onebit_adamw(
        steps.learning_rate, b1, steps.B2, steps.EPS, steps.DECAY, zero=zero, warmup_steps=99
    )
    state = ob.from_adam_state(params, adam, tx, mesh_of(parts), zero)

    def each(x):
        """What each device holds, stacked."""
        x = np.asarray(x)
        return x.reshape(parts, -1, *x.shape[1:])

    everywhere = jax.sharding.NamedSharding(mesh_of(parts), jax.P())
    opt_state = jax.tree.map(
        lambda x: (
            np.stack([np.asarray(x)] * parts)
            if x.sharding.is_equivalent_to(everywhere, x.ndim)
            else each(x)
        ),
        state.opt_state,
    )
    before = steps.read(zero, leaves, opt_state)
    for leaf, s, name in zip(leaves, before["leaves"], steps.NAMES):
        cut = leaf.cut if leaf.compressed else np.asarray
        np.testing.assert_array_equal(s["v"], cut(adam[0].nu[name]), name)
        if gather == "params" or not leaf.compressed:
            np.testing.assert_array_equal(s["M"], cut(adam[0].mu[name]), name)
            if gather == "params":
                np.testing.assert_array_equal(s["master"], cut(params[name]), name)
        else:
            owed = s["M"] + s["E"] / b1 - cut(adam[0].mu[name])
            alive = s["v"] > 0
            assert np.abs(owed[alive]).max() < 1e-6 * np.abs(s["M"]).max()
    stacked = {k: np.stack([np.asarray(x)] * parts) for k, x in params.items()}
    grads = problem.grads(1, params)
    program = steps.on_devices(lambda g, s, p: tx.update(g, s, p), parts)
    updates, now = jax.device_get(program(grads, opt_state, stacked))
    got, got_updates = steps.read(zero, leaves, now), [steps.same(updates[k]) for k in steps.NAMES]
    # Warm-up ended before: the reference counts refreshes from step 12.
    settings = ref.Settings(
        parts, 1, gather, bits, steps.learning_rate, b1, steps.B2, steps.EPS, steps.DECAY, 12, 32
    )
    want, sizes, changes, change_sizes, _ = ref.step(
        settings,
        leaves,
        before,
        [grads[k] for k in steps.NAMES],
        [np.asarray(params[k]) for k in steps.NAMES],
        {**got, "updates": got_updates},
    )
    assert want["variance_updates"] == 12
    steps.states_close(12, got, want, sizes)
    for name, u, change, size in zip(steps.NAMES, got_updates, changes, change_sizes):
        steps.close((name, "update"), u, change, size)


def test_what_does_not_fit_is_refused():
    zero, mesh, adam = ob.ZeroConfig(), mesh_of(), optax.adamw(1e-3)
    tx, params = ob.onebit_adamw(1e-3, zero=zero), params_of()
    fresh = adam.init(params)
    used = (fresh[0]._replace(count=jnp.int32(3)), *fresh[1:])
    convert = lambda state, tx=tx, zero=zero: ob.from_adam_state(params, state, tx, mesh, zero)

    def changed(**fields):
        return (used[0]._replace(**fields), *used[1:])

    for state, message in (
        (optax.sgd(0.1).init(params), "must hold one optax.ScaleByAdamState, found 0"),
        ((used, used), "found 2"),
        (fresh, "has made 0 steps"),
        (changed(mu={"w": used[0].mu["w"]}), "adam_state.mu does not have the structure"),
        (changed(nu={**used[0].nu, "w": np.zeros((16, 8), np.float32)}), r"\['w'\].*\(16, 8\)"),
        (changed(nu={**used[0].nu, "b": np.full(16, -1.0, np.float32)}), r"\['b'\].*negative"),
        (changed(mu={**used[0].mu, "w": np.full((16, 16), np.nan, np.float32)}), r"not finite"),
    ):
        with pytest.raises(ValueError, match=message):
            convert(state)
    groups = optax.partition({"a": tx, "b": tx}, {"w": "a", "b": "b"})
    with pytest.raises(ValueError, match="2 zero_shard"):
        convert(used, groups)
