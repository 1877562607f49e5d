"""Digests, and replicas that drifted apart."""

import gc
import pathlib
import resource

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from onebit_zero_jax import ZeroConfig, init, onebit_adamw, resize, train_step
from onebit_zero_jax.sync import assert_in_sync, digest

P = jax.P


def mesh_of(shape, names):
    return jax.make_mesh(shape, names, devices=jax.devices()[: int(np.prod(shape))])


def broken(x, device, change):
    """``x`` with other bits on one device."""
    pieces = [change(s.data) if s.device.id == device else s.data for s in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, pieces)


def flip_lowest_bit(x):
    """Of the last value."""
    bits = np.asarray(x).copy()
    bits.reshape(-1).view(f"u{bits.dtype.itemsize}")[-1] ^= 1
    return jax.device_put(bits, x.device)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
def test_digest_sees_any_bit_and_any_place_but_no_sharding(dtype):
    x = jnp.asarray(np.random.default_rng(0).integers(0, 2, (8, 4)), dtype)
    reference = int(digest(x))
    assert int(jax.jit(digest)(x)) == reference
    mesh = mesh_of((4,), ("data",))
    assert int(digest(jax.device_put(x, jax.NamedSharding(mesh, P("data"))))) == reference
    seen = {reference, int(digest(x[::-1])), int(digest(x[:, ::-1]))}
    for i in range(8):
        for j in range(4):
            changed = np.asarray(x).copy()
            changed[i, j] = 1 - changed[i, j]
            seen.add(int(digest(jnp.asarray(changed))))
    assert len(seen) == 3 + 32


def test_digest_of_scalars_keys_and_nothing():
    assert digest(jnp.float32(0.0)) != digest(jnp.float32(-0.0))
    assert digest(jax.random.key(0)) != digest(jax.random.key(1))
    assert digest(jnp.zeros((0, 3))) == 0


@pytest.fixture(scope="module")
def state():
    mesh, zero = mesh_of((4,), ("data",)), ZeroConfig(stage=1)
    params = {"w": jnp.ones((32, 32)), "b": jnp.zeros(3)}
    return init(params, onebit_adamw(0.1, zero=zero), mesh, zero)


@pytest.mark.parametrize(
    ("name", "pick"),
    [
        (".params['w']", lambda s: s.params["w"]),
        (".params['b']", lambda s: s.params["b"]),
        (".opt_state.leaves['w'].momentum.planes", lambda s: s.opt_state.leaves["w"].momentum[0]),
        (".opt_state.applied", lambda s: s.opt_state.applied),
    ],
)
def test_the_leaf_that_differs_is_named(state, name, pick):
    assert_in_sync(state)
    leaf = pick(state)
    state = jax.tree.map(lambda x: broken(x, 2, flip_lowest_bit) if x is leaf else x, state)
    with pytest.raises(AssertionError) as e:
        assert_in_sync(state)
    assert str(e.value).startswith(f"{name} differs between devices: device 2 (process 0)")


def test_state_of_one_device_may_differ(state):
    """Worker errors and chunks are nobody's copy."""
    leaf = state.opt_state.leaves["w"].worker_error
    assert_in_sync(jax.tree.map(lambda x: broken(x, 2, jnp.ones_like) if x is leaf else x, state))


def test_copies_over_one_of_two_axes():
    mesh = mesh_of((2, 2), ("slow", "fast"))
    x = jax.device_put(jnp.arange(8.0), jax.NamedSharding(mesh, P("slow")))
    assert_in_sync([x])
    ids = mesh.devices
    with pytest.raises(AssertionError, match=rf"\[0\] differs .* device {ids[1, 1].id} .*"):
        assert_in_sync([broken(x, ids[1, 1].id, flip_lowest_bit)])
    both = jax.device_put(jnp.arange(8.0), jax.NamedSharding(mesh, P(("fast", "slow"))))
    assert_in_sync([broken(both, ids[1, 1].id, flip_lowest_bit)])


def test_bad_input():
    with pytest.raises(ValueError, match="no array"):
        assert_in_sync({})
    with pytest.raises(ValueError, match=r"\['w'\] is ndarray"):
        assert_in_sync({"w": np.ones(3)})
    a, b = (jax.device_put(jnp.ones(3), jax.NamedSharding(mesh_of((2,), (n,)), P())) for n in "ab")
    with pytest.raises(ValueError, match=r"\[1\] is on"):
        assert_in_sync([a, b])


def resident_bytes():
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_soak():
    """Thousands of steps with skips, refreshes and resizes: in sync, finite, memory flat."""
    rng = np.random.default_rng(0)
    setups = []
    for shape in ((4,), (2, 2), (3,)):
        names = ("data",) if len(shape) == 1 else ("slow", "fast")
        mesh, zero = mesh_of(shape, names), ZeroConfig(axis_name=names, stage=1)
        tx = onebit_adamw(1e-3, zero=zero, warmup_steps=50, refresh=4)
        step = train_step(
            lambda p, x: jnp.mean(jnp.square(x @ p["w"] + p["b"] - 1)), tx, mesh, zero
        )
        setups.append((tx, mesh, zero, step))
    tx, mesh, zero, step = setups[0]
    state = init({"w": jnp.ones((32, 32)) / 32, "b": jnp.zeros(32)}, tx, mesh, zero)
    skipped, held, resident = 0, [], []
    for cycle in range(12):
        tx, mesh, zero, step = setups[cycle % 3]
        if cycle:
            state = resize(state, tx, mesh, zero)
        for t in range(304):  # a multiple of 16: a step holds copies between its checks
            batch = rng.normal(size=(12, 32)).astype("f4")
            if rng.random() < 0.02:
                batch[rng.integers(12), rng.integers(32)] = rng.choice([np.nan, np.inf])
                skipped += 1
            state, metrics = step(state, batch)
            if t % 100 == 99:
                assert_in_sync(state)
        assert int(metrics["skipped_steps"]) == skipped
        assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(state))
        gc.collect()
        held.append(sum(x.nbytes for x in jax.live_arrays()))
        resident.append(resident_bytes())
    assert skipped > 30
    assert int(state.step) == 3648
    # The first two rounds of the three meshes compile and fill caches.
    assert held[9:] == held[6:9]
    assert resident[-1] < resident[5] + 32 * 2**20
