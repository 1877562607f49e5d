"""Conversions to, from and within stage 3: read device by device, not by the package's order."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from onebit_zero_jax import (
    ZeroConfig,
    abstract_state,
    full_params,
    init,
    resize,
    train_step,
    zero_shard,
)
from onebit_zero_jax.layout import is_shard
from onebit_zero_jax.state import DenseState, zero_states
from onebit_zero_jax.sync import assert_in_sync

pytestmark = pytest.mark.usefixtures("few_optimizations")

B1, B2 = 0.8, 0.95
SLOW_FAST = ("slow", "fast")
# "w" pads on its axis, "even" nowhere, "u" is dense on 8 and 6 devices, "still" is frozen.
SHAPES = {"even": (32, 256), "w": (30, 50), "u": (16, 20), "b": (5,), "still": (20, 30)}
SETUPS = {
    "fast": ((2, 2), {"stage": 3}),
    "fast, 4 x 2": ((4, 2), {"stage": 3}),
    "fast, 2 x 3": ((2, 3), {"stage": 3}),
    "flat": ((4,), {"stage": 3}),
    "flat, 2 x 2": ((2, 2), {"stage": 3, "shard_params_over": SLOW_FAST}),
    "flat, 3 x 2": ((3, 2), {"stage": 3, "shard_params_over": SLOW_FAST}),
    "stage 2": ((4,), {"stage": 2}),
    "stage 2, 2 x 2": ((2, 2), {"stage": 2}),
    "momentum": ((2, 2), {"stage": 1}),
}


@functools.cache
def setup(name):
    shape, options = SETUPS[name]
    axes = SLOW_FAST if len(shape) == 2 else ("data",)
    mesh = jax.make_mesh(shape, axes, devices=jax.devices()[: int(np.prod(shape))])
    zero = ZeroConfig(axis_name=axes, **options)
    core = zero_shard(
        optax.chain(optax.trace(0.5), optax.scale(-0.02)),
        zero=zero, b1=B1, b2=B2, warmup_steps=3, refresh=None,
    )  # fmt: skip
    labels = {k: "freeze" if k == "still" else "train" for k in SHAPES}
    tx = optax.partition({"train": core, "freeze": optax.set_to_zero()}, labels)
    return tx, mesh, zero


def to(state, name):
    return resize(state, *setup(name))


def make_params():
    rng = np.random.default_rng(0)
    return {k: rng.normal(size=s).astype("f4") for k, s in SHAPES.items()}


def make_batch(step):
    rng = np.random.default_rng(100 + step)
    return {k: rng.normal(size=(24, s[0])).astype("f4") for k, s in SHAPES.items()}


def loss_fn(params, batch):
    def one(p, x):
        x = x.reshape(x.shape[0], -1, *(1,) * (p.ndim - 1))
        return jnp.mean(jnp.square(p - 2 * x))

    return sum(one(params[k], batch[k]) for k in SHAPES)


@functools.cache
def step_of(name):
    tx, mesh, zero = setup(name)
    return train_step(loss_fn, tx, mesh, zero)


def run(state, name, first, last):
    losses = []
    for t in range(first, last):
        state, metrics = step_of(name)(state, make_batch(t))
        losses.append(float(metrics["loss"]))
    return state, losses


@functools.cache
def trained(name="fast"):
    tx, mesh, zero = setup(name)
    return run(init(make_params(), tx, mesh, zero), name, 0, 6)[0]


def copied(state):
    return jax.tree.map(jnp.copy, state)


def values(state, name):
    """Per leaf, what the devices hold, put together here; what is left over must be 0."""
    _, mesh, zero = setup(name)
    slow, fast = (*mesh.devices.shape, 1)[:2]
    opt = zero_states(state.opt_state)[0]
    out = {}
    for key, shape in SHAPES.items():
        param = state.params[key]
        leaf = {"y": np.asarray(full_params(state)[key])}
        if is_shard(param):
            padding = np.asarray(param.value)[*(slice(n, None) for n in shape)]
            assert not np.any(padding)
        if key == "still":
            out[key] = leaf
            continue
        s = opt.leaves[key]
        inner = opt.inner[0].trace[key]
        if isinstance(s, DenseState):
            leaf.update(M=s.momentum, v=s.variance, trace=inner)
            out[key] = jax.tree.map(np.asarray, leaf)
            continue
        axis = param.axis + len(shape) if is_shard(param) else None
        pieces = 1 if axis is None else slow * fast if zero.flat else fast
        sizes = list(shape)
        if axis is not None:
            sizes[axis] = -(-shape[axis] // pieces)

        def on(x, i, j, mesh=mesh, fast=fast):
            """The data of device (i, j)."""
            device = mesh.devices.reshape(-1, fast)[i, j]
            (data,) = (s.data for s in x.addressable_shards if s.device == device)
            return np.asarray(data).ravel()

        def whole(runs, pieces=pieces, sizes=sizes, axis=axis, shape=shape):
            """From chunks in order."""
            runs = np.concatenate(runs).reshape(pieces, -1)
            size = int(np.prod(sizes))
            assert not np.any(runs[:, size:])
            x = runs[:, :size].reshape(pieces, *sizes)
            if axis is None:
                return x[0]
            x = np.concatenate(list(x), axis=axis)
            kept, left = np.split(x, [shape[axis]], axis=axis)
            assert not np.any(left)
            return kept

        def owners(x, on=on, whole=whole, slow=slow, fast=fast):
            return whole([on(x, i, j) for j in range(fast) for i in range(slow)])

        def workers(x, on=on, whole=whole, slow=slow, fast=fast):
            return np.stack([whole([on(x, i, j) for j in range(fast)]) for i in range(slow)])

        leaf.update(M=owners(s.momentum), v=owners(s.variance), x=owners(s.master))
        leaf.update(e=workers(s.worker_error), m=workers(s.worker_momentum), trace=owners(inner))
        # Weights by the formula, piece by piece where a piece is what a device knows.
        v_hat = leaf["v"].astype("f8") / (1 - B2 ** int(opt.variance_updates))
        padded = v_hat
        if axis is not None:
            rest = pieces * sizes[axis] - shape[axis]
            padded = np.pad(v_hat, [(0, rest if k == axis else 0) for k in range(2)])
        apart = np.split(padded, fast, axis) if axis is not None and not zero.flat else [padded]
        rows, cols = (np.asarray(f) for f in s.factors)
        rows, cols = (np.split(f, len(apart)) for f in (rows, cols))
        for v, row, col in zip(apart, rows, cols, strict=True):
            r, c = v.mean(1, keepdims=True), v.mean(0, keepdims=True)
            alive = (r * c) > 0
            want = np.where(alive, (np.where(alive, r * c, 1) / r.mean()) ** -0.5, 0)
            np.testing.assert_allclose(row * col, want, rtol=1e-5)
        out[key] = leaf
    return out


def check(before, after):
    for key, a in before.items():
        b = after[key]
        for name in set(a) & set(b):
            if name in ("e", "m"):
                mean, want = b[name].mean(0), a[name].mean(0)
                np.testing.assert_allclose(mean, want, atol=1e-6 * np.abs(a[name]).max(), rtol=0)
            elif ("e" in a) == ("e" in b):
                np.testing.assert_array_equal(b[name], a[name])


CHAIN = ["stage 2", "flat", "fast, 2 x 3", "flat, 3 x 2", "fast", "fast, 4 x 2", "flat, 2 x 2"]


@pytest.mark.parametrize(
    "chain",
    [
        ["flat", "fast, 2 x 3"],
        pytest.param([*CHAIN, "stage 2"], marks=pytest.mark.slow),
    ],
    ids=["short", "long"],
)
def test_values_and_means_are_kept(chain):
    state = trained()
    now = values(state, "fast")
    assert all(np.any(now[k]["e"]) for k in ("even", "w", "u"))
    for name in chain:
        state, before = to(state, name), now
        now = values(state, name)
        check(before, now)
        assert_in_sync(state)
        tx, mesh, zero = setup(name)
        fresh = abstract_state(make_params(), tx, mesh, zero)
        assert jax.tree.structure(state) == jax.tree.structure(fresh)
        for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(fresh), strict=True):
            assert (x.shape, x.dtype, x.sharding) == (y.shape, y.dtype, y.sharding)
    assert int(state.step) == 6
    total = np.asarray(zero_states(trained().opt_state)[0].residual).sum(0)
    got = np.asarray(zero_states(state.opt_state)[0].residual).sum(0)
    np.testing.assert_allclose(got, total, rtol=1e-6)


@pytest.mark.slow
def test_there_and_back_is_the_same_run():
    """Between two stages on one split nothing is averaged: the next step is the same step."""
    below = to(trained(), "stage 2, 2 x 2")
    check(values(trained(), "fast"), values(below, "stage 2, 2 x 2"))
    back = to(below, "fast")
    for x, y in zip(jax.tree.leaves(back), jax.tree.leaves(trained()), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=0)
    here, losses = run(copied(trained()), "fast", 6, 7)
    there, again = run(copied(back), "fast", 6, 7)
    assert losses == again
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5),
        full_params(here),
        full_params(there),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in SETUPS if n not in ("fast", "momentum")])
def test_the_loss_goes_on_without_a_jump(name):
    _, stayed = run(copied(trained()), "fast", 6, 12)
    _, moved = run(copied(to(trained(), name)), name, 6, 12)
    np.testing.assert_allclose(moved[0], stayed[0], rtol=1e-6)
    np.testing.assert_allclose(moved, stayed, rtol=0.01)


@pytest.mark.slow
def test_to_gather_momentum():
    state = to(trained(), "momentum")
    before, after = values(trained(), "fast"), full_params(state)
    for key in ("even", "w", "u"):
        np.testing.assert_array_equal(after[key], before[key]["x"])
    _, stayed = run(copied(trained()), "fast", 6, 9)
    _, moved = run(copied(state), "momentum", 6, 9)
    np.testing.assert_allclose(moved, stayed, rtol=0.02)


def test_links_with_state_of_shards_are_refused():
    def build(name):
        tx, mesh, zero = setup(name)
        return optax.chain(optax.trace(0.9), tx), mesh, zero

    def start(name):
        return init(make_params(), *build(name))

    state = start("fast")
    for new in ("stage 2", "fast, 4 x 2"):
        with pytest.raises(ValueError, match=r"\.trace\['even'\] is state of a link in front"):
            resize(state, *build(new))
    same = resize(state, *build("fast"))
    jax.tree.map(np.testing.assert_array_equal, state, same)


def test_half_precision_parameters_need_their_masters():
    half = dataclasses.replace(
        trained(), params=jax.tree.map(lambda x: x.astype("bfloat16"), trained().params)
    )
    with pytest.raises(ValueError, match="is bfloat16: gather='momentum' keeps no float32 master"):
        to(half, "momentum")
