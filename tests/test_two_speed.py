"""Two-speed meshes: full reduction over the fast axis, codes over the slow one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

from onebit_zero_jax import (
    ZeroConfig,
    clip_by_global_norm,
    full_params,
    init,
    onebit_adamw,
    state_shardings,
    train_step,
    wire_report,
)

pytestmark = pytest.mark.usefixtures("few_optimizations")

P = jax.P
SLOW_FAST = ("slow", "fast")
WARMUP, REFRESH = 2, 3
# w: whole blocks on 8 devices. odd: blocks of its own width, with padding. b: dense.
PARAMS = {"w": (64, 128), "odd": (37, 41), "b": (5,)}
EXACT = (8, 8)  # gradients are multiples of 1/8, below 8


def mesh_of(shape, kind=AxisType.Auto):
    names = SLOW_FAST if len(shape) == 2 else ("data",)
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, names, (kind,) * len(shape), devices=devices)


def make_params(names=tuple(PARAMS)):
    rng = np.random.default_rng(0)
    return {k: rng.normal(size=PARAMS[k]).astype(np.float32) for k in names}


def loss_fn(params, batch):
    """Its gradient on a device is the mean of the device's examples."""
    return sum(jnp.sum(p * jnp.mean(batch[k], axis=0)) for k, p in params.items())


def make_batches(count, examples, names=tuple(PARAMS)):
    """Integers: with 8 devices or groups every mean is exact, in any order."""
    rng = np.random.default_rng(1)
    draw = lambda k: rng.integers(-8, 8, (examples, *PARAMS[k])).astype(np.float32)
    return [{k: draw(k) for k in names} for _ in range(count)]


def make(shape, kind=AxisType.Auto, names=tuple(PARAMS), clip=None, **options):
    mesh = mesh_of(shape, kind)
    zero = ZeroConfig(axis_name=SLOW_FAST if len(shape) == 2 else "data", **options)
    tx = onebit_adamw(1e-2, zero=zero, warmup_steps=WARMUP, refresh=REFRESH)
    if clip:
        tx = optax.chain(clip_by_global_norm(clip, zero=zero), tx)
    return init(make_params(names), tx, mesh, zero), train_step(loss_fn, tx, mesh, zero)


def train(shape, batches, **options):
    state, step = make(shape, **options)
    metrics = {}
    for batch in batches:
        state, metrics = step(state, batch)
    return state, metrics


@functools.cache
def reference(stage, gather):
    """One axis of 2 devices, each with the examples of a whole group."""
    state, _ = train((2,), make_batches(7, 8, ("w", "b")), names=("w", "b"), stage=stage,
                     gather=gather)  # fmt: skip
    return jax.tree.map(np.asarray, full_params(state))


@pytest.mark.parametrize(
    "stage, gather, fast", [(0, "momentum", 2), (1, "momentum", 4), (2, "params", 2)]
)
def test_equals_one_axis_on_the_means_of_groups(stage, gather, fast):
    """Where blocks fall alike, to the rounding of the weights' sums: all phases."""
    batches = make_batches(7, 8, ("w", "b"))
    state, _ = train((2, fast), batches, names=("w", "b"), stage=stage, gather=gather)
    got = full_params(state)
    for name, want in reference(stage, gather).items():
        np.testing.assert_allclose(got[name], want, atol=1e-6, err_msg=name)


@functools.cache
def one_axis(**options):
    return jax.tree.map(np.asarray, full_params(train((8,), make_batches(WARMUP, 8), **options)[0]))


@pytest.mark.parametrize(
    "shape, kind",
    [
        ((2, 4), AxisType.Explicit),
        ((8, 1), AxisType.Auto),
        ((1, 8), AxisType.Auto),
    ],
)
def test_dense_steps_do_not_depend_on_the_split(shape, kind):
    batches = make_batches(WARMUP, 8)
    options = {"stage": 2, "gather_bits": "dense"}
    state, _ = train(shape, batches, kind=kind, **options)
    want = one_axis(**options)
    for name, leaf in want.items():
        np.testing.assert_array_equal(full_params(state)[name], leaf, err_msg=name)


@pytest.mark.parametrize("stage, gather", [(1, "momentum"), (2, "params")])
def test_a_mesh_that_divides_nothing(stage, gather):
    """Six devices as 3 x 2: replicas stay equal, what is sent and kept adds up."""
    state, metrics = train((3, 2), make_batches(6, 12), stage=stage, gather=gather)
    for name, leaf in state.params.items():
        copies = [np.asarray(s.data) for s in leaf.addressable_shards]
        assert all(np.array_equal(copies[0], c) for c in copies[1:]), name
        assert np.all(np.isfinite(copies[0]))
    assert metrics["phase"] == "compressed"
    assert 0 < float(metrics["residual_ratio"]) < 1


def test_worker_state_shrinks_by_the_fast_axis():
    for shape, worker in (((8,), 8192), ((2, 4), 2048), ((4, 2), 4096)):
        state, _ = make(shape, stage=2)
        s = state.opt_state.leaves["w"]
        for x, size in (
            (s.worker_error, worker),
            (s.worker_momentum, worker),
            (s.variance, 1024),
            (s.master, 1024),
        ):
            assert all(shard.data.size == size for shard in x.addressable_shards)


def test_shardings_put_state_in_the_order_of_the_values():
    """Worker arrays hold worker 0's leaf, then worker 1's; owner arrays the leaf once."""
    state, step = make((2, 4), stage=2)
    specs = state_shardings(make_params(), step._tx, mesh_of((2, 4)), step._zero).opt_state
    assert specs.leaves["w"].worker_error.spec == P(SLOW_FAST)
    assert specs.leaves["w"].master.spec == P(("fast", "slow"))
    master = np.asarray(state.opt_state.leaves["w"].master).reshape(64, 128)
    np.testing.assert_array_equal(master, make_params()["w"])
    batch = make_batches(1, 8)[0]
    state, _ = step(state, batch)
    # After one step m_i is (1 - b1) times the mean gradient of group i.
    momentum = np.asarray(state.opt_state.leaves["w"].worker_momentum).reshape(2, 64, 128)
    want = batch["w"].reshape(2, 4, 64, 128).mean(axis=1) * np.float32(1 - 0.9)
    np.testing.assert_allclose(momentum, want, rtol=1e-6)


def test_clipping_and_norm_are_those_of_the_mean_gradient():
    batches = make_batches(1, 8)
    _, metrics = train((2, 4), batches, clip=1.0)
    mean = [np.mean(x, axis=0).ravel() for x in batches[0].values()]
    want = np.linalg.norm(np.concatenate(mean))
    assert abs(float(metrics["gradient_norm"]) / want - 1) < 4 * 0.022  # 4 sigma of the sketch


@pytest.mark.parametrize("shape", [(8,), (2, 4)])
def test_nonfinite_on_one_device_skips_everywhere(shape):
    """In a leaf of 64 x 128: XLA's maximum on CPU loses a NaN there."""
    state, step = make(shape, names=("w",), stage=2)
    batches = make_batches(2, 8, ("w",))
    state, _ = step(state, batches[0])
    before = jax.tree.map(np.asarray, state)
    batches[1]["w"][5, 3, 3] = np.nan
    state, metrics = step(state, batches[1])
    assert int(metrics["skipped_steps"]) == 1
    jax.tree.map(np.testing.assert_array_equal, before.params, state.params)
    jax.tree.map(np.testing.assert_array_equal, before.opt_state.leaves, state.opt_state.leaves)


@pytest.mark.parametrize("stage, gather", [(1, "momentum"), (2, "params")])
def test_slow_axis_carries_codes(stage, gather):
    """Bytes of a compressed step per leg, from the traced program."""
    state, step = make((2, 4), names=("w",), stage=stage, gather=gather)
    batch = make_batches(1, 8, ("w",))[0]
    program = step.lower(state, batch, phase="compressed").compile().as_text()
    wide = [line for line in program.splitlines() if "reduce_leg" in line and "all-to-all(" in line]
    assert wide
    assert all("u8[" in line for line in wide)
    sent = step.bytes_sent(state, batch, phase="compressed")
    n, code, scales = 64 * 128, 64 * 128 // 8, 4 * 8
    # Half of what a device holds of the super-chunk (n / 4 values) goes to the other side.
    assert sent["reduce"] == (code + scales) // 4 // 2
    assert sent["fast"] == 4 * n * 3 // 4
    # Own codes to the other side, then those of both to the three neighbours.
    bits = 1 if gather == "momentum" else 4
    own = (bits * code + scales) // 8
    assert sent["gather"] == own + 2 * own * 3


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_what_crosses_the_slow_axis_is_packed(stage):
    """From the compiled program: all but the norm (1031 floats), scalars, flags, the vector."""
    state, step = make((2, 4), names=("w", "b"), stage=stage)
    batch = make_batches(1, 8, ("w", "b"))[0]
    compiled = step.lower(state, batch, phase="compressed").compile()
    report = wire_report(compiled, mesh_of((2, 4)))
    packed = sum(c.crossing("slow") for c in report.collectives if c.dtype == "u8")
    # Of the norm a device sends its quarter; an all-reduce over both axes, 7/8 twice.
    values = 1032 // 4 + 2 * (5 + len(PARAMS) + PARAMS["b"][0])
    assert 0 < report.sent("slow") - packed <= 4 * values
    assert packed > 0
    both = [c.size for c in report.collectives if len(c.across) == 2 and c.dtype != "u8"]
    assert both
    assert max(both) < 1024


def test_bad_axis_names():
    for bad in ((), ("a", "b", "c"), ("a", ""), ("a", 1), ("a", "a")):
        with pytest.raises(ValueError, match="axis_name"):
            ZeroConfig(axis_name=bad)
    assert ZeroConfig(axis_name=("a",)) == ZeroConfig(axis_name="a")
    zero = ZeroConfig(axis_name=SLOW_FAST)
    with pytest.raises(ValueError, match=r"axes \('data',\).*\('slow', 'fast'\)"):
        init(make_params(), onebit_adamw(1e-2, zero=zero), mesh_of((2,)), zero)
