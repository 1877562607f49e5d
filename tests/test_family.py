"""LAMB, Lion and SGD with momentum on ``zero_shard``.

Dense steps against optax, every step against the float64 reference, bytes against AdamW.
"""

import dataclasses
import functools
import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference as ref
from test_reference import B2, NAMES, SHAPES, Problem, close, on_devices, read, same, states_close

from onebit_zero_jax import (
    ZeroConfig,
    full_params,
    init,
    lamb,
    lion,
    onebit_adamw,
    onebit_lamb,
    onebit_lion,
    onebit_sgdm,
    resize,
    sgdm,
    state_shardings,
    train_step,
    zero_shard,
)

pytestmark = pytest.mark.usefixtures("few_optimizations")

PARTS = 4
DECAY, RATE = 0.0625, 0.01
EXACT = ZeroConfig(stage=2, gather_bits="dense")


# ---------------------------------------------------------------- dense steps are optax


def make_params():
    rng = np.random.default_rng(0)
    draw = lambda *s: rng.normal(size=s).astype(np.float32)
    # A zero norm has ratio 1; the chunks of the matrices are padded.
    return {"matrix": draw(21, 33), "stack": draw(2, 9, 20), "bias": draw(5), "none": 0 * draw(3)}


def gradients(steps, parts=PARTS):
    rng = np.random.default_rng(1)
    draw = lambda x: rng.normal(size=(parts, *x.shape)).astype(np.float32)
    return [jax.tree.map(draw, make_params()) for _ in range(steps)]


def optax_path(tx, steps, grads):
    """Parameters after every step on the mean gradients."""
    params = make_params()
    state, path, update = tx.init(params), [], jax.jit(tx.update)
    for g in grads[:steps]:
        updates, state = update(jax.tree.map(lambda x: x.mean(0), g), state, params)
        params = optax.apply_updates(params, updates)
        path.append(params)
    return path


def test_dense_steps_are_optax():
    schedule = lambda count: RATE / (1 + count)
    pairs = {
        "lamb": (
            onebit_lamb(schedule, weight_decay=DECAY, zero=EXACT),
            optax.lamb(schedule, weight_decay=DECAY),
        ),
        "lion": (
            onebit_lion(schedule, weight_decay=DECAY, zero=EXACT),
            optax.lion(schedule, weight_decay=DECAY),
        ),
        "lion, one decay": (
            onebit_lion(schedule, b1=0.95, b2=0.95, weight_decay=DECAY, zero=EXACT),
            optax.lion(schedule, b1=0.95, b2=0.95, weight_decay=DECAY),
        ),
        "sgdm": (
            onebit_sgdm(schedule, momentum=0.8, weight_decay=DECAY, zero=EXACT),
            optax.chain(
                optax.trace(0.8),
                optax.add_decayed_weights(DECAY),
                optax.scale_by_learning_rate(schedule),
            ),
        ),
    }
    steps = 5

    def start(params):
        return {k: ours.init(params) for k, (ours, _) in pairs.items()}

    def step(grads, states, params):
        updates, states = {}, dict(states)
        for k, (ours, _) in pairs.items():
            u, states[k] = ours.update(grads, states[k], params[k], phase="dense")
            updates[k] = optax.apply_updates(params[k], u)
        return updates, states

    stacked = jax.tree.map(lambda x: np.stack([x] * PARTS), make_params())
    states, step = on_devices(start, PARTS)(stacked), on_devices(step, PARTS)
    params, grads = {k: stacked for k in pairs}, gradients(steps)
    want = {k: optax_path(theirs, steps, grads) for k, (_, theirs) in pairs.items()}
    for t, g in enumerate(grads):
        params, states = step(g, states, params)
        for k in pairs:
            got = jax.tree.map(same, jax.device_get(params[k]))
            check = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6, err_msg=k)
            jax.tree.map(check, got, want[k][t])


@pytest.mark.parametrize(
    "axis_name",
    [
        pytest.param("data", id="flat", marks=pytest.mark.slow),
        pytest.param(("slow", "fast"), id="fast"),
    ],
)
def test_trust_ratio_of_shards_is_that_of_the_leaf(axis_name):
    """Stage 3: pieces lie over both axes, and some of their padding is the shards' own."""
    zero = ZeroConfig(axis_name=axis_name, stage=3, gather_bits="dense")
    shape = (2, 2)[: len(zero.axes)]
    mesh = jax.make_mesh(shape, zero.axes, devices=jax.devices()[: math.prod(shape)])
    parts, steps = mesh.size, 3
    tx = onebit_lamb(RATE, weight_decay=DECAY, zero=zero)
    linear = lambda p, batch: sum(jnp.sum(p[k] * batch[k].mean(0)) for k in p)
    grads = gradients(steps, parts)
    state, step = init(make_params(), tx, mesh, zero), train_step(linear, tx, mesh, zero)
    for g in grads:
        state, _ = step(state, g)
    want = optax_path(optax.lamb(RATE, weight_decay=DECAY), steps, grads)[-1]
    check = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6)
    jax.tree.map(check, jax.device_get(full_params(state)), want)


# ---------------------------------------------------------------- every step is the reference

STEPS, WARMUP, REFRESH = 60, 8, 3
B1, LION_B2, EPS = 0.875, 0.96875, 1e-6  # exact in binary
MAX_RATIO = 0.0625


def lamb_change(rate, x, M, size_M, root):
    bottom = root + EPS
    u = np.clip(ref.over(M, bottom), -10, 10) + DECAY * x
    size = ref.over(size_M, bottom)
    size = size + DECAY * np.abs(x)
    norm, length = np.linalg.norm(x), np.linalg.norm(u)
    ratio = min(norm / length, MAX_RATIO) if norm and length else 1.0
    slack = 1 + np.linalg.norm(size) / length if length else 1.0
    return -rate * ratio * u, rate * ratio * (size + slack * np.abs(u))


def lion_change(rate, x, M, size_M, root):
    return -rate * (np.sign(M) + DECAY * x), rate * (1 + DECAY * np.abs(x))


def sgdm_change(rate, x, M, size_M, root):
    change = M / (1 - B1) + DECAY * x
    return -rate * change, rate * (size_M / (1 - B1) + DECAY * np.abs(x))


LAMB = {"b1": B1, "b2": B2, "eps": EPS, "max_ratio": MAX_RATIO}
LION = {"b1": B1, "b2": LION_B2}
LION_RULE = {"inner": lion_change, "momentum_decay": LION_B2}
LION_RULE |= {"bias_correction": False, "error_feedback": False}


@pytest.mark.parametrize(
    "factory, options, rule, stage",
    [
        (onebit_lamb, LAMB, {"inner": lamb_change}, 2),
        (onebit_lion, LION, LION_RULE, 2),
        pytest.param(
            onebit_sgdm,
            {"momentum": B1},
            {"inner": sgdm_change, "bias_correction": False},
            1,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["lamb", "lion", "sgdm"],
)
def test_every_step(factory, options, rule, stage, monkeypatch):
    for module in (lion, sgdm):  # their b2 is 0.999, which float32 and float64 read differently
        monkeypatch.setattr(module, "zero_shard", functools.partial(zero_shard, b2=B2))
    zero = ZeroConfig(stage=stage)
    rate = lambda count: 0.05 / (1 + 0.01 * count)
    tx = factory(
        rate, weight_decay=DECAY, zero=zero, warmup_steps=WARMUP, refresh=REFRESH, **options
    )
    rng = np.random.default_rng(3)
    params = {k: np.asarray(0.2 * rng.normal(size=SHAPES[k]), np.float32) for k in NAMES}
    problem = Problem(rng, PARTS)
    leaves = [ref.Leaf(SHAPES[k], PARTS) for k in NAMES]
    settings = ref.Settings(
        *(
            PARTS,
            zero.stage,
            zero.gather_mode,
            zero.bits,
            rate,
            B1,
            B2,
            EPS,
            DECAY,
            WARMUP,
            REFRESH,
        ),
        **rule,
    )
    programs = {
        phase: on_devices(lambda g, s, p, phase=phase: tx.update(g, s, p, phase=phase), PARTS)
        for phase in ("dense", "compressed")
    }
    dense = ref.dense_steps(WARMUP, REFRESH, STEPS)
    start = params
    stacked = jax.tree.map(lambda x: np.stack([x] * PARTS), params)
    state = on_devices(tx.init, PARTS)(stacked)
    got, ties = read(zero, leaves, jax.device_get(state)), 0
    for t in range(STEPS):
        before, params = got, {k: same(stacked[k]) for k in NAMES}
        grads = problem.grads(t, params)
        if t == STEPS - 3:  # compressed: gradients outgrow the frozen variance
            grads = {k: 1e4 * g for k, g in grads.items()}
        updates, state = programs["dense" if t in dense else "compressed"](grads, state, stacked)
        updates, now = jax.device_get((updates, state))
        got, got_updates = read(zero, leaves, now), [same(updates[k]) for k in NAMES]
        want, sizes, changes, change_sizes, tied = ref.step(
            *(settings, leaves, before, [grads[k] for k in NAMES], [params[k] for k in NAMES]),
            {**got, "updates": got_updates},
        )
        states_close(t, got, want, sizes)
        for k, u, change, size in zip(NAMES, got_updates, changes, change_sizes):
            close((t, k, "update"), u, change, size)
        if factory is onebit_lamb:
            bound = (1 + 1e-5) * rate(before["applied"])
            for old, new in zip(before["leaves"], got["leaves"]):
                moved = np.linalg.norm(new["master"] - old["master"])
                assert moved <= bound * np.linalg.norm(old["master"])
        ties += tied
        stacked = {k: stacked[k] + updates[k] for k in NAMES}
    assert ties < 1e-3 * STEPS * sum(leaf.size for leaf in leaves)
    assert got["nonfinite"].sum() == 1  # the NaN of step 10
    # Dead values have had no gradient: neither signs nor noise move them.
    dead = problem.scale["dead"] == 0
    if zero.gather_mode == "params":
        np.testing.assert_array_equal(same(stacked["dead"])[dead], start["dead"][dead])


# ---------------------------------------------------------------- bytes


def sent(tx, zero):
    mesh = jax.make_mesh((PARTS,), ("data",), devices=jax.devices()[:PARTS])
    params = {"w": jnp.ones((32, 32)), "u": jnp.ones((32, 64)), "b": jnp.ones(3)}
    state = jax.eval_shape(lambda p: init(p, tx, mesh, zero), params)
    loss = lambda p, x: jnp.mean((x @ p["w"] @ p["u"]) ** 2) + jnp.sum(p["b"])
    batch = np.ones((PARTS, 32), np.float32)
    return train_step(loss, tx, mesh, zero).bytes_sent(state, batch)


@pytest.mark.parametrize("stage", [1, 2])
def test_bytes_are_those_of_adamw(stage):
    zero = ZeroConfig(stage=stage)
    want = sent(onebit_adamw(RATE, zero=zero), zero)
    assert want["reduce"] > 0
    assert want["gather"] > 0
    assert sent(onebit_sgdm(RATE, zero=zero), zero) == want
    if stage == 2:
        assert sent(onebit_lion(RATE, zero=zero), zero) == want
        # A psum of two floats for each of two matrices
        want = {**want, "metrics": want["metrics"] + 2 * 8 * 2 * (PARTS - 1) // PARTS}
    assert sent(onebit_lamb(RATE, zero=zero), zero) == want


def test_trust_ratio_under_a_mask():
    """``leaf_sums`` takes trees in which optax.masked has left leaves out."""
    mesh = jax.make_mesh((PARTS,), ("data",), devices=jax.devices()[:PARTS])
    ratio = lamb.scale_by_trust_ratio(math.inf)
    masked = optax.masked(ratio, {"w": False, "u": True, "b": True})
    tx = zero_shard(optax.chain(masked, optax.scale(-RATE)), zero=EXACT)
    params = {"w": jnp.ones((32, 32)), "u": jnp.ones((32, 64)), "b": jnp.ones(3)}
    state_shardings(params, tx, mesh, EXACT)  # traces an update; raises if devices differ


def test_resize_of_a_state_without_worker_errors():
    tx, params = onebit_lion(RATE, zero=EXACT), {"w": np.ones((32, 32), np.float32)}
    meshes = [jax.make_mesh((n,), ("data",), devices=jax.devices()[:n]) for n in (PARTS, 2)]
    state = init(params, tx, meshes[0], EXACT)
    ones = lambda s: s._replace(worker_momentum=jnp.ones_like(s.worker_momentum))
    leaves = {"w": ones(state.opt_state.leaves["w"])}
    state = dataclasses.replace(state, opt_state=state.opt_state._replace(leaves=leaves))
    got = resize(state, tx, meshes[1], EXACT).opt_state.leaves["w"]
    assert got.worker_error is None
    np.testing.assert_array_equal(got.worker_momentum.reshape(-1), np.ones(2 * 32 * 32))


# ---------------------------------------------------------------- bad input

MOMENTUM = ZeroConfig(stage=1)


@pytest.mark.parametrize(
    "factory, options, parts",
    [
        (onebit_lamb, {"learning_rate": -1.0}, ["learning_rate must be", "got -1.0"]),
        (onebit_lamb, {"b1": 1.0}, ["b1 must be in [0, 1)", "got 1.0"]),
        (onebit_lamb, {"eps": -1e-8}, ["eps must be finite and at least 0", "got -1e-08"]),
        (onebit_lamb, {"max_ratio": 0}, ["max_ratio must be above 0", "got 0"]),
        (onebit_lamb, {"max_ratio": math.nan}, ["max_ratio must be above 0", "got nan"]),
        (onebit_lamb, {"zero": "data"}, ["zero must be a ZeroConfig, got 'data'"]),
        (onebit_lion, {"b2": 1.0}, ["b2 must be in [0, 1)", "got 1.0"]),
        (onebit_lion, {"b1": "0.9"}, ["b1 must be a number", "got '0.9'"]),
        (onebit_lion, {"b1": 0.99, "b2": 0.9}, ["b1 must be at most b2", "b1=0.99", "b2=0.9"]),
        (onebit_lion, {"zero": MOMENTUM}, ["needs gather='params'", "ZeroConfig(stage=1, gather="]),
        (onebit_lion, {"weight_decay": math.inf}, ["weight_decay must be finite", "got inf"]),
        (onebit_sgdm, {"momentum": 1.0}, ["momentum must be in [0, 1)", "got 1.0"]),
        (onebit_sgdm, {"momentum": None}, ["momentum must be a number", "got None"]),
        (onebit_sgdm, {"weight_decay": -1}, ["weight_decay must be", "got -1"]),
        (onebit_sgdm, {"warmup_steps": 0}, ["warmup_steps must be an integer", "got 0"]),
    ],
)
def test_bad_input(factory, options, parts):
    options = {"learning_rate": RATE, "zero": EXACT, **options}
    with pytest.raises(ValueError, match="(?s)" + ".*".join(map(re.escape, parts))):
        factory(**options)


def test_bad_input_of_zero_shard():
    make = functools.partial(zero_shard, optax.sgd(RATE), zero=EXACT)
    with pytest.raises(ValueError, match=r"momentum_decay must be in \[b1, 1\), b1=0.9, got 0.8"):
        make(b1=0.9, momentum_decay=0.8)
    with pytest.raises(ValueError, match="bias_correction must be True or False, got 1"):
        make(bias_correction=1)
    with pytest.raises(ValueError, match="error_feedback must be True or False, got None"):
        make(error_feedback=None)
    for option in ({"momentum_decay": 0.95}, {"error_feedback": False}):
        with pytest.raises(ValueError, match="needs gather='params'"):
            make(zero=MOMENTUM, **option)
    onebit_lion(RATE, zero=dataclasses.replace(MOMENTUM, gather="params"))


# ---------------------------------------------------------------- the guide


def test_code_of_the_migration_guide():
    text = (Path(__file__).parents[1] / "docs" / "migration.md").read_text()
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(block, names)
    assert math.isfinite(names["metrics"]["loss"])
    batch = np.ones((64, 32), np.float32)
    state = jax.eval_shape(
        lambda p: init(p, names["tx"], names["mesh"], names["zero"]), names["params"]
    )
    assert names["step"].bytes_sent(state, batch)["reduce"] > 0
