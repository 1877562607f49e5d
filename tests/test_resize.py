"""What a resize must keep: values of the owners, means over the workers, and what is owed."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

from onebit_zero_jax import (
    ZeroConfig,
    abstract_state,
    codec,
    init,
    onebit_adamw,
    storage,
    train_step,
    weighting,
)
from onebit_zero_jax.layout import Layout
from onebit_zero_jax.resize import resize
from onebit_zero_jax.resize_leaf import rework
from onebit_zero_jax.state import ChunkState
from onebit_zero_jax.sync import assert_in_sync

P = jax.P
B1, B2, WARMUP = 0.8, 0.95, 4
# On 8, 4, 6 and 1 devices: "tall" keeps blocks of 128 lanes on all but 6, "w" never does,
# "u" is dense on 8 and 6, "b" always.
SHAPES = {"tall": (128, 256), "w": (40, 48), "u": (16, 16), "b": (16,)}
TRAINED = {"params": ZeroConfig(stage=2), "momentum": ZeroConfig(stage=1)}
# Made from those by a conversion: training them would compile twice as many programs.
CONVERTED = {
    "stage 0": ("momentum", ZeroConfig(stage=0)),
    "stored": ("params", ZeroConfig(stage=2, error_dtype="int8", momentum_dtype="bfloat16")),
    "int8": ("momentum", ZeroConfig(stage=1, gather_bits=2, error_dtype="int8")),
    "tiles": ("params", ZeroConfig(stage=2, tiles=True)),
}
MODES = TRAINED | {k: zero for k, (_, zero) in CONVERTED.items()}


pytestmark = pytest.mark.usefixtures("few_optimizations")


def mesh_of(*shape, kind=AxisType.Auto):
    names = ("data",) if len(shape) == 1 else ("slow", "fast")
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, names, (kind,) * len(shape), devices=devices)


def zero_of(mode, *shape):
    axis = "data" if len(shape) == 1 else ("slow", "fast")
    return dataclasses.replace(MODES[mode], axis_name=axis)


def go(state, mode, *shape):
    zero = zero_of(mode, *shape)
    return resize(state, make_tx(zero), mesh_of(*shape), zero)


def make_params(dtype="float32"):
    rng = np.random.default_rng(0)
    return {k: jnp.asarray(rng.normal(size=s), dtype) for k, s in SHAPES.items()}


def make_tx(zero):
    return onebit_adamw(0.1, b1=B1, b2=B2, zero=zero, warmup_steps=WARMUP, refresh=None)


def make_batch(step):
    """Examples that pull every leaf to rank-one targets of their own."""
    rng = np.random.default_rng(step)
    return {k: rng.normal(size=(24, s[0])).astype("f4") for k, s in SHAPES.items()}


def loss_fn(params, batch):
    def one(p, x):
        x = x.reshape(x.shape[0], -1, *(1,) * (p.ndim - 1))
        return jnp.mean(jnp.square(p - 2 * x))

    return sum(one(params[k], batch[k]) for k in params)


@functools.cache
def step_of(zero, *shape):
    return train_step(loss_fn, make_tx(zero), mesh_of(*shape), zero)


@functools.cache
def trained(mode, steps=7):
    """A state after warm-up and compressed steps on 8 devices; donated to nobody."""
    zero = MODES[mode]
    if mode in CONVERTED:
        return resize(trained(CONVERTED[mode][0]), make_tx(zero), mesh_of(8), zero)
    state = init(make_params(), make_tx(zero), mesh_of(8), zero)
    for t in range(steps):
        state, _ = step_of(zero, 8)(state, make_batch(t))
    return state


def copied(tree):
    return jax.tree.map(jnp.copy, tree)


def seen(state):
    """The state by value, decoded here: a dict of float64 arrays per leaf."""
    zero, mesh = state.opt_state.run.zero, state.step.sharding.mesh
    parts, slow = mesh.size, mesh.shape[zero.slow]
    counts = [int(getattr(state.opt_state, f)) for f in ("applied", "variance_updates")]
    live_bc2, bc2 = (1 - B2**n for n in counts)
    leaves = {}
    for leaf in Layout.of(state.params, zero, mesh.shape).leaves:
        key = leaf.path[2:-2]
        s = state.opt_state.leaves[key]
        assert isinstance(s, ChunkState) == leaf.compressed

        def whole(x, n=leaf.size, shape=leaf.shape):
            if np.ndim(x) == 3:
                x = codec.from_blocks(x, shape, zero.tiles)
            return np.asarray(x, np.float64).reshape(-1)[:n].reshape(shape)

        out = {"y": whole(state.params[key])}
        if not leaf.compressed:
            out.update(M=whole(s.momentum), v_hat=whole(s.variance) / live_bc2)
            out["x"] = out["y"] if s.master is None else whole(s.master)
            leaves[key] = out
            continue

        def workers(x, leaf=leaf):
            x = storage.load(x)
            x = x.reshape(slow, -1, *x.shape[1:])
            each = [codec.from_blocks(each, leaf.shape, zero.tiles) for each in x]
            return np.array(each, np.float64)

        v = s.variance if zero.stage else s.shared
        w = weighting.weight_of(s.factors)
        out.update(v_hat=whole(v) / bc2, w=np.asarray(w), mean_e=workers(s.worker_error).mean(0))
        if zero.gather_mode == "params":
            out.update(mean_m=workers(s.worker_momentum).mean(0), M=whole(s.momentum))
            out.update(x=whole(s.master))
            if zero.stage:
                out["alive"] = whole(codec.unpack_bits(s.shared))
        else:
            weight = codec.to_blocks(w, parts, zero.tiles)
            out.update(
                M=whole(codec.decode(s.momentum, weight)), E=whole(storage.load(s.server_error))
            )
            out.update(x=out["y"])
            if zero.stage:
                out["root"] = whole(storage.decode_log(*s.shared))
        leaves[key] = out
    return leaves


def close(a, b, tolerance=1e-6):
    """Relative to the largest value."""
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.max(np.abs(b)))


def check_kept(before, after, mode):
    """The invariants of one resize that keeps the gather leg."""
    storage = {"stored": 5e-3, "int8": 5e-3}.get(mode, 1e-6)
    for key, a in before.items():
        b = after[key]
        np.testing.assert_array_equal(a["x"], b["x"])
        np.testing.assert_array_equal(a["y"], b["y"])
        if "w" in a and "w" in b:
            np.testing.assert_array_equal(a["w"], b["w"])
            np.testing.assert_array_equal(a["v_hat"], b["v_hat"])
            close(b["mean_e"], a["mean_e"], storage)
        close(b["v_hat"], a["v_hat"], 1e-5)
        if "mean_m" in a and "mean_m" in b:
            close(b["mean_m"], a["mean_m"], storage)
            np.testing.assert_array_equal(a["M"], b["M"])
        if "E" in a and "E" in b:
            np.testing.assert_array_equal(np.sign(a["M"]), np.sign(b["M"]))
            # What the next step sends.
            close(B1 * b["M"] + b["E"], B1 * a["M"] + a["E"], storage)
            if mode != "stage 0":
                ratio = b["root"] / np.sqrt(b["v_hat"])
                assert np.all(np.abs(np.log2(ratio)) < 1 / 8 + 1e-4)
        if "alive" in b:
            np.testing.assert_array_equal(b["alive"], b["v_hat"] > 0)


CHAINS = {
    "params": [(4,), (6,), (8,), (4, 2), (1,)],
    "momentum": [(2, 3)],
    "stage 0": [(2, 3)],
    "stored": [(6,)],
    "int8": [(2, 4)],
}


def mostly_slow(values, quick):
    """Values of a parameter, all but one of them left to the longer runs."""
    return [v if v in quick else pytest.param(v, marks=pytest.mark.slow) for v in values]


@pytest.mark.parametrize("mode", mostly_slow(CHAINS, quick=("params", "momentum")))
def test_values_and_means_are_kept(mode):
    state = trained(mode)
    assert np.any(np.asarray(storage.load(state.opt_state.leaves["w"].worker_error)))
    for shape in CHAINS[mode]:
        before = seen(state)
        state = go(state, mode, *shape)
        check_kept(before, seen(state), mode)
        assert_in_sync(state)
    zero = zero_of(mode, *shape)
    fresh = abstract_state(make_params(), make_tx(zero), mesh_of(*shape), zero)
    assert jax.tree.structure(state) == jax.tree.structure(fresh)
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(fresh), strict=True):
        assert (x.shape, x.dtype, x.sharding) == (y.shape, y.dtype, y.sharding)
    total = np.asarray(trained(mode).opt_state.residual).sum(0)
    np.testing.assert_allclose(np.asarray(state.opt_state.residual).sum(0), total, rtol=1e-6)
    assert int(state.step) == 7
    np.testing.assert_array_equal(state.opt_state.nonfinite, np.zeros(4))


def test_each_group_of_workers_keeps_its_mean():
    """8 -> 4 x 2: worker s is the mean of workers 2 s and 2 s + 1, and of no others."""
    a, b = trained("params"), go(trained("params"), "params", 4, 2)

    def workers(s, count):
        e = np.asarray(s.opt_state.leaves["tall"].worker_error)
        return e.reshape(count, -1)

    pairs = workers(a, 8).reshape(4, 2, -1).mean(1)
    np.testing.assert_allclose(workers(b, 4), pairs, rtol=1e-5, atol=1e-7)
    assert np.any(pairs[0] != pairs[1])


@pytest.mark.parametrize(
    ("mode", "shape"),
    [pytest.param("params", (4, 2), marks=pytest.mark.slow), ("momentum", (4,))],
)
def test_loss_goes_on_without_a_jump(mode, shape):
    def losses(state, *shape):
        step, out = step_of(zero_of(mode, *shape), *shape), []
        for t in range(7, 13):
            state, metrics = step(state, make_batch(t))
            out.append(float(metrics["loss"]))
        return np.array(out)

    stayed = losses(copied(trained(mode)), 8)
    moved = losses(copied(go(trained(mode), mode, *shape)), *shape)
    np.testing.assert_allclose(moved[0], stayed[0], rtol=1e-6)
    np.testing.assert_allclose(moved, stayed, rtol=0.01)


@pytest.mark.parametrize("mode", mostly_slow(MODES, quick=["params", "momentum"]))
def test_same_mesh_changes_no_bit(mode):
    """Also when only the stage's name or the kind of axis changes."""
    state, zero = trained(mode), MODES[mode]
    explicit = mesh_of(8, kind=AxisType.Explicit)
    again = resize(state, make_tx(zero), explicit, zero)
    assert again.params["w"].sharding.mesh == explicit
    jax.tree.map(np.testing.assert_array_equal, state, again)
    if zero.stage:
        other = dataclasses.replace(zero, stage=3 - zero.stage, gather=zero.gather_mode)
        renamed = resize(state, make_tx(other), mesh_of(8), other)
        assert renamed.opt_state.run.zero == other
        for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(renamed), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("old", "new", "parts"),
    [
        ("params", "momentum", 8),
        pytest.param("params", "momentum", 4, marks=pytest.mark.slow),
        ("momentum", "params", 4),
        pytest.param("momentum", "stage 0", 8, marks=pytest.mark.slow),
        ("params", "tiles", 4),
        pytest.param("stage 0", "int8", 4, marks=pytest.mark.slow),
    ],
)
def test_stages_and_gather_legs_convert(old, new, parts):
    b = MODES[new]
    before = seen(trained(old))
    after = seen(resize(trained(old), make_tx(b), mesh_of(parts), b))
    tolerance = 5e-3 if new == "int8" else 1e-6
    for key, s in before.items():
        t = after[key]
        np.testing.assert_array_equal(t["x"], s["x"])
        np.testing.assert_array_equal(t["y"], s["y"] if b.gather_mode == "params" else s["x"])
        close(t["v_hat"], s["v_hat"], 1e-5)
        if "w" not in s or "w" not in t:
            continue
        np.testing.assert_array_equal(t["w"], s["w"])
        # Next: the mean of b1 m + e over workers, and E.
        start = s["mean_m"] if old == "params" else s["M"]
        goes_on = t["mean_m"] if b.gather_mode == "params" else t["M"]
        owed = s["mean_e"] + s.get("E", 0)
        close(B1 * goes_on + t["mean_e"] + t.get("E", 0), B1 * start + owed, tolerance)
        if new == "params":
            np.testing.assert_array_equal(goes_on, s["M"])


@pytest.mark.parametrize("mode", mostly_slow(["params", "momentum"], quick=["momentum"]))
def test_a_leaf_that_becomes_dense_is_owed_nothing(mode):
    """All that its momentum will ever add, with gradients of 0 from now on."""
    zero, tx = MODES[mode], make_tx(MODES[mode])
    on_four = resize(trained(mode), tx, mesh_of(4), zero)
    state, _ = step_of(zero, 4)(copied(on_four), make_batch(7))
    a, b = seen(state)["u"], seen(resize(state, tx, mesh_of(8), zero))["u"]
    assert np.any(a["mean_e"])
    assert "mean_e" not in b
    coasting = B1 / (1 - B1)
    if mode == "params":
        total = coasting * a["mean_m"] + a["mean_e"]
    else:  # What an error adds to the momentum goes on decaying.
        total = coasting * a["M"] + (a["mean_e"] + a["E"]) / (1 - B1)
    close(coasting * b["M"], total, 1e-5)


def test_a_dense_step_after_a_resize_is_the_same_step():
    """In warm-up nothing is lost: 8 devices and 8 -> 4 -> 8 -> 1 take the same next step."""
    zero, batch = MODES["params"], make_batch(99)
    tx, state = make_tx(zero), trained("params", steps=3)
    small = resize(resize(state, tx, mesh_of(4), zero), tx, mesh_of(8), zero)
    small = resize(small, tx, mesh_of(1), zero)
    small, metrics = step_of(zero, 1)(copied(small), batch)
    state, _ = step_of(zero, 8)(copied(state), batch)
    assert metrics["phase"] == "dense"
    a, b = (
        {k: np.ravel(s.opt_state.leaves[k].master)[: np.prod(shape)] for k, shape in SHAPES.items()}
        for s in (small, state)
    )
    for key in SHAPES:
        np.testing.assert_allclose(a[key], b[key], rtol=1e-5, atol=1e-6)


def test_means_over_workers():
    x = np.random.default_rng(0).normal(size=(8, 3)).astype("f4")
    np.testing.assert_array_equal(rework(jnp.asarray(x), 8), x)
    np.testing.assert_allclose(rework(jnp.asarray(x), 4), x.reshape(4, 2, 3).mean(1), rtol=1e-6)
    np.testing.assert_array_equal(rework(jnp.asarray(x[:4]), 8), np.repeat(x[:4], 2, axis=0))
    for n in (1, 3, 5, 6, 12):
        got = np.asarray(rework(jnp.asarray(x), n))
        assert got.shape == (n, 3)
        np.testing.assert_allclose(got.mean(0), x.mean(0), rtol=1e-5, atol=1e-7)


# ---------------------------------------------------------------- around and inside zero_shard


def wrapped(zero):
    """A front link with a memory of the local gradient, an inner chain with one of the chunk."""
    from onebit_zero_jax import zero_shard

    core = zero_shard(
        optax.chain(optax.trace(0.5), optax.scale(-0.01)), zero=zero, b1=B1, b2=B2, warmup_steps=1
    )
    frozen = {"tall": "train", "w": "train", "u": "train", "b": "freeze"}
    return optax.chain(
        optax.trace(0.9), optax.partition({"train": core, "freeze": optax.set_to_zero()}, frozen)
    )


def test_state_around_and_inside_is_kept():
    zero = ZeroConfig()
    tx = wrapped(zero)
    state = init(make_params(), tx, mesh_of(8), zero)
    state, _ = train_step(loss_fn, tx, mesh_of(8), zero)(state, make_batch(0))

    def memories(state, parts):
        front, labelled = state.opt_state
        inner = labelled.inner_states["train"].inner_state.inner[0].trace
        front = {k: np.asarray(x).reshape(parts, -1).mean(0) for k, x in front.trace.items()}
        sizes = {k: int(np.prod(s)) for k, s in SHAPES.items()}
        inside = {k: np.ravel(inner[k])[: sizes[k]] for k in ("tall", "w", "u")}
        return front, inside

    before = memories(state, 8)
    after = memories(resize(state, tx, mesh_of(4), zero), 4)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        *map(tuple, (before, after)),
    )
    assert all(np.any(x) for x in before[1].values())


# ---------------------------------------------------------------- refused


def test_refusals():
    zero = MODES["params"]
    state, tx = trained("params"), make_tx(zero)
    with pytest.raises(ValueError, match="must come from init, got dict"):
        resize({}, tx, mesh_of(4), zero)
    with pytest.raises(ValueError, match="zero differs between tx and this call"):
        resize(state, tx, mesh_of(4), MODES["momentum"])
    with pytest.raises(ValueError, match="another optimizer than tx"):
        resize(state, optax.chain(optax.trace(0.9), tx), mesh_of(4), zero)
    with pytest.raises(ValueError, match=r"another inner chain"):
        resize(state, onebit_adamw(optax.constant_schedule(0.1), zero=zero), mesh_of(4), zero)
    with pytest.raises(ValueError, match="the mesh has axes"):
        resize(state, tx, jax.make_mesh((4,), ("x",), devices=jax.devices()[:4]), zero)
    params = jax.tree.map(lambda x: x.astype("bfloat16"), state.params)
    half, momentum = dataclasses.replace(state, params=params), MODES["momentum"]
    with pytest.raises(ValueError, match=r"parameter \['b'\] is bfloat16"):
        resize(half, make_tx(momentum), mesh_of(4), momentum)


def test_inner_state_that_depends_on_blocks_is_refused():
    from onebit_zero_jax import zero_shard

    zero = MODES["params"]
    rows = optax.GradientTransformationExtraArgs(
        lambda params: jax.tree.map(lambda x: jnp.sum(x, axis=-1), params),
        lambda updates, state, params=None, **_: (updates, state),
    )
    tx = zero_shard(rows, zero=zero)
    state = init(make_params(), tx, mesh_of(8), zero)
    with pytest.raises(ValueError, match=r"opt_state.inner\['.*'\] has shape .* cannot be cut"):
        resize(state, tx, mesh_of(6), zero)
