"""What zero_shard and onebit_adam(w) promise, seen from outside.

:class:`Run` checks after every step that updates and parameters are bit-equal on all devices.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_reference import on_devices

from onebit_zero_jax import (
    ZeroConfig,
    clip_by_global_norm,
    onebit_adam,
    onebit_adamw,
    zero_shard,
)
from onebit_zero_jax.phases import Phases
from onebit_zero_jax.state import zero_states

PHASES = ("dense", "compressed")


def same(tree):
    """What all devices must agree on, bit for bit."""
    tree = jax.device_get(tree)
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        assert len({row.tobytes() for row in x}) == 1, jax.tree_util.keystr(path)
    return jax.tree.map(lambda x: x[0], tree)


def bits_equal(a, b):
    """Raises unless two trees hold the same bits."""
    a, b = jax.device_get((a, b))
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b)):
        assert x.dtype == y.dtype, jax.tree_util.keystr(path)
        np.testing.assert_array_equal(x, y, jax.tree_util.keystr(path))
        assert x.tobytes() == y.tobytes(), jax.tree_util.keystr(path)


class Run:
    """A training run; ``now`` is state and parameters of all devices and may be set back."""

    def __init__(self, tx, params, parts):
        self.tx, self.parts = tx, parts
        stacked = jax.tree.map(lambda x: np.stack([x] * parts), params)
        self.now = self.start = on_devices(tx.init, parts)(stacked), stacked

    @functools.cache  # noqa: B019
    def program(self, phase):
        def step(grads, state, params):
            updates, state = self.tx.update(grads, state, params, phase=phase)
            return updates, (state, optax.apply_updates(params, updates))

        return on_devices(step, self.parts)

    def step(self, grads, phase=None):
        updates, self.now = self.program(phase)(grads, *self.now)
        self.updates = same(updates)
        return self.params

    @property
    def state(self):
        return jax.device_get(zero_states(self.now[0])[0])

    @property
    def params(self):
        return same(self.now[1])


def normal(rng, params, parts):
    """Local gradients, one set per device."""
    return jax.tree.map(lambda x: rng.normal(size=(parts, *x.shape)).astype(x.dtype), params)


def small_params():
    """One compressed leaf (on 11 devices or fewer) and one dense one."""
    rng = np.random.default_rng(0)
    shapes = {"b": (5,), "w": (30, 24)}
    return {k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}


# ---------------------------------------------------------------- Adam, where nothing is coded


@pytest.mark.parametrize(
    "parts, stage, dtype, b1",
    [
        (1, 2, "float32", 0.9),
        (4, 2, "float32", 0.9),
        (4, 1, "bfloat16", 0.9),
        (3, 0, "bfloat16", 0.9),
        (7, 2, "float32", 0.0),
    ],
)
def test_without_compression_is_optax_adamw(parts, stage, dtype, b1):
    steps = 100
    rng = np.random.default_rng(parts)
    shapes = {"bias": (5,), "empty": (0, 3), "matrix": (30, 24), "scalar": (), "stack": (2, 9, 40)}
    params = {k: np.asarray(rng.normal(size=s), np.float32) for k, s in shapes.items()}
    for k in ("scalar", "stack"):
        params[k] = params[k].astype(dtype)
    mask = {k: k in ("matrix", "scalar") for k in params}
    rate = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 20, steps)
    args = (rate, b1, 0.999, 1e-8, 0.1)
    zero = ZeroConfig(stage=stage, gather="params", gather_bits="dense")
    run = Run(onebit_adamw(*args, mask, zero=zero, warmup_steps=steps), params, parts)
    adamw = optax.adamw(*args[:4], weight_decay=args[4], mask=mask)
    x = jax.tree.map(lambda x: x.astype(np.float32), params)
    state = adamw.init(x)
    adamw_step = jax.jit(adamw.update)
    for t in range(steps):
        grads = normal(rng, params, parts)
        got = run.step(grads, "dense")
        mean = jax.tree.map(lambda g: np.mean(g, 0, np.float64).astype(np.float32), grads)
        updates, state = adamw_step(mean, state, x)
        x = jax.tree.map(lambda x, u: x + np.asarray(u), x, updates)
        for k in params:
            assert got[k].dtype == params[k].dtype
            # Every step, both round x once (2^-24 |x|) and the step (a few times) otherwise;
            # a bf16 replica is rounded (2^-8 |x| at most) like the update that led to it.
            allowed = 2.0**-24 * (t + 1) * (2 * np.abs(x[k]) + 16 * 1e-2)
            if got[k].dtype != np.float32:
                allowed = allowed + 2.0**-7 * np.abs(x[k]) + 2.0**-8 * np.abs(run.updates[k])
            difference = np.abs(got[k].astype(np.float32) - x[k])
            assert np.all(difference <= allowed), (t, k, np.max(difference / allowed))


def test_exact_sums_give_the_same_bits():
    """At stages 1 and 2 in every step; on 1 and 4 devices as long as nothing is coded."""
    rng = np.random.default_rng(0)
    params = small_params()

    def start(stage, parts):
        zero = ZeroConfig(stage=stage, gather="params", gather_bits="dense")
        return Run(onebit_adamw(1e-2, zero=zero, warmup_steps=5, refresh=4), params, parts)

    first, second, one = start(1, 4), start(2, 4), start(2, 1)
    for t in range(20):
        phase = "dense" if Phases(5, 4).is_dense(t) else "compressed"
        grads = jax.tree.map(lambda x: rng.integers(-8, 9, (4, *x.shape)) / np.float32(4), params)
        bits_equal(first.step(grads, phase), second.step(grads, phase))
        bits_equal(first.state.leaves, second.state.leaves)
        if t < 5:
            one.step(jax.tree.map(lambda g: np.mean(g, 0, keepdims=True), grads), phase)
            for name in ("momentum", "variance"):
                x, y = (getattr(run.state.leaves["w"], name).ravel()[:720] for run in (one, second))
                np.testing.assert_array_equal(x, y)
            # XLA writes (M / bc1) / rms as M / (bc1 rms) in some programs and not in others.
            np.testing.assert_allclose(one.params["w"], second.params["w"], rtol=1e-6, atol=1e-8)


# ---------------------------------------------------------------- every setting


DEAD = {"b": np.arange(5) == 2, "w": np.zeros((30, 24), bool)}
for where in ((4, 7), (20, 3), 11, (slice(None), 5)):  # single values, a row, a column
    DEAD["w"][where] = True
SETTINGS = [
    (stage, gather, bits)
    for stage in (0, 1, 2)
    for gather, all_bits in (("params", ("dense", 8, 4, 3, 2, 1)), ("momentum", (1, 2)))
    for bits in all_bits
]
# With gather and bits given, stages 1 and 2 are the same program.
SETTINGS_OF_RUN = [
    pytest.param(s, marks=pytest.mark.slow, id=str(s)) if s[0] == 1 else pytest.param(s, id=str(s))
    for s in SETTINGS
]


@pytest.fixture(scope="module", params=SETTINGS_OF_RUN)
def run(request):
    stage, gather, bits = request.param
    zero = ZeroConfig(stage=stage, gather=gather, gather_bits=bits)
    return Run(onebit_adam(1e-2, zero=zero, warmup_steps=4, refresh=3), small_params(), 4)


def draw(rng):
    """Gradients on 4 devices that are 0 where DEAD."""
    grads = normal(rng, small_params(), 4)
    return jax.tree.map(lambda g, dead: np.where(dead, np.float32(0), g), grads, DEAD)


def test_zero_gradients_move_nothing(run):
    run.now = run.start
    for phase in PHASES:
        run.step(jax.tree.map(np.zeros_like, draw(np.random.default_rng(0))), phase)
    bits_equal(run.params, small_params())
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(run.now))


def test_what_moves_and_what_stays(run):
    run.now = run.start
    rng = np.random.default_rng(0)
    for t in range(12):
        phase = "dense" if Phases(4, 3).is_dense(t) else "compressed"
        before = run.state.leaves["w"]
        run.step(draw(rng), phase)
        after = run.state.leaves["w"]
        for k, dead in DEAD.items():
            assert np.all((run.updates[k] != 0) == ~dead)
        assert np.all(after.worker_error.reshape(4, -1)[:, :720][:, DEAD["w"].ravel()] == 0)
        if phase == "compressed":
            for kept in ("variance", "shared", "factors"):
                bits_equal(getattr(before, kept), getattr(after, kept))
            assert not np.array_equal(before.worker_error, after.worker_error)
        else:
            # After warm-up, a dense step with local momentum sends its code too.
            if t < 4 or run.state.run.zero.gather_mode == "momentum":
                bits_equal(before.worker_error, after.worker_error)
            assert not np.array_equal(before.factors.row, after.factors.row)
        same([after.shared, after.factors, run.state.leaves["b"]])


def test_feedback_holds_through_refreshes():
    """sum_t M_t = sum_t mean_i m_(i,t) - mean_i e_(i,T): nothing that a code lost stays lost."""
    zero = ZeroConfig(stage=2, gather_bits="dense")
    run = Run(onebit_adamw(1e-2, zero=zero, warmup_steps=3, refresh=3), small_params(), 4)
    rng, sent, meant = np.random.default_rng(0), 0.0, 0.0
    for t in range(15):
        phase = "dense" if Phases(3, 3).is_dense(t) else "compressed"
        run.step(normal(rng, small_params(), 4), phase)
        leaf = run.state.leaves["w"]
        sent = sent + leaf.momentum.astype(np.float64).reshape(-1)
        meant = meant + leaf.worker_momentum.mean(0, np.float64).reshape(-1)
    error = leaf.worker_error.mean(0, np.float64).reshape(-1)
    assert np.abs(error).max() > 0.1
    # float32 rounds each step, relative to errors and momenta of about 1.
    np.testing.assert_allclose(sent, meant - error, atol=15 * 2.0**-21)


def without_counters(state):
    return state._replace(step=None, nonfinite=None)


@pytest.mark.parametrize("phase", PHASES)
def test_a_nonfinite_gradient_on_one_device(run, phase):
    """Skipped by all devices, and the step after is as if it had not been."""
    run.now = run.start
    rng = np.random.default_rng(0)
    run.step(draw(rng), "dense")
    run.step(draw(rng), "compressed")
    for leaf in ("b", "w"):
        for value in (np.nan, -np.inf):
            before, old, good, bad = run.now, run.state, draw(rng), draw(rng)
            want = run.step(good, phase), without_counters(run.state)
            run.now = before
            bad[leaf].reshape(4, -1)[2, 4] = value
            run.step(bad, phase)
            assert not any(np.any(u) for u in run.updates.values())
            bits_equal(without_counters(run.state), without_counters(old))
            bits_equal(run.now[1], before[1])
            np.testing.assert_array_equal(run.state.step, old.step + 1)
            named = [[leaf == "b", leaf == "w"]] * 4
            np.testing.assert_array_equal(run.state.nonfinite - old.nonfinite, named)
            bits_equal((run.step(good, phase), without_counters(run.state)), want)


@pytest.mark.parametrize("gather, bits", [("params", 4), ("momentum", 1)])
def test_phase_none_is_the_schedule(gather, bits):
    """From equal states, to rounding: XLA simplifies the two programs differently."""
    zero = ZeroConfig(stage=1, gather=gather, gather_bits=bits)
    params = small_params()
    run = Run(onebit_adamw(1e-2, zero=zero, warmup_steps=3, refresh=2), params, 4)
    rng = np.random.default_rng(0)
    for t in range(45):  # intervals of 2 up to step 34, then of 4
        grads = normal(rng, params, 4)
        if t in (1, 9, 10):
            grads["w"][3, 2, 2] = np.nan
        before = run.now
        run.step(grads, "dense" if Phases(3, 2).is_dense(t) else "compressed")
        want, run.now = run.now, before
        run.step(grads)
        for x, y in zip(jax.tree.leaves(run.now), jax.tree.leaves(want)):
            if x.dtype != np.float32:
                np.testing.assert_array_equal(x, y)
            else:
                atol = 2.0**-22 * np.max(np.abs(y), initial=0)
                np.testing.assert_allclose(x, y, rtol=1e-6, atol=atol)


def test_a_skipped_warm_up_is_made_up_for():
    """A variance that no step has updated is never frozen."""
    params = small_params()
    run = Run(onebit_adam(1e-2, zero=ZeroConfig(), warmup_steps=1, refresh=None), params, 4)
    rng = np.random.default_rng(0)
    bad = normal(rng, params, 4)
    bad["b"][0, 0] = np.inf
    run.step(bad)
    bits_equal(run.params, params)
    assert np.all(run.step(normal(rng, params, 4))["w"] != params["w"])


# ---------------------------------------------------------------- scales, storage and types


@pytest.mark.parametrize("stage, gather, bits", [(2, "params", 4), (1, "momentum", 1)])
def test_scale_of_gradients_does_not_matter(stage, gather, bits):
    """Powers of two near 1e15 and 1e-15 pass through every operation exactly."""
    zero = ZeroConfig(stage=stage, gather=gather, gather_bits=bits)
    params = small_params()
    run = Run(onebit_adam(1e-2, b2=0.9, eps=0.0, zero=zero, warmup_steps=4, refresh=3), params, 4)

    def train(scale):
        rng = np.random.default_rng(0)
        run.now = run.start
        for t in range(20):
            # Integers: a mean that is tiny, not 0, would be lost when squared.
            grads = jax.tree.map(lambda x: rng.integers(-8, 9, (4, *x.shape)), params)
            grads = jax.tree.map(lambda g, s: (g * s).astype(np.float32), grads, scale)
            run.step(grads, "dense" if Phases(4, 3).is_dense(t) else "compressed")
        return run.params

    want = train({"b": 1.0, "w": 1.0})
    assert all(np.all(np.isfinite(x)) for x in want.values())
    for exponents in ((50, 50), (-50, -50), (50, -50)):
        bits_equal(train(dict(zip("bw", np.exp2(exponents)))), want)


def test_gradients_at_the_end_of_float32():
    """Where sums of squares could overflow the step is skipped; below, it works."""
    params = small_params()
    run = Run(onebit_adam(1e-2, eps=0.0, zero=ZeroConfig(), warmup_steps=9), params, 4)
    signs = jax.tree.map(lambda x: np.stack([np.sign(x)] * 4), params)
    for exponent in range(50, 128):
        run.now = run.start
        grads = jax.tree.map(lambda x, e=exponent: x * np.float32(2.0**e), signs)
        for phase in PHASES:
            run.step(grads, phase)
        assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(run.now))
        moved = exponent < 62
        assert all(np.all((run.params[k] != params[k]) == moved) for k in params), exponent


@pytest.mark.parametrize("gather, rtol", [("params", 0.03), ("momentum", 0.1)])
def test_stored_errors_and_momentum_stay_close(gather, rtol):
    """A noisy quadratic, 300 steps: the final distance is that of float32 storage.

    Over two seeds int8 cost 1.4 % at most with "params", 6.7 % with "momentum", whose
    momentum restarts from what the rounded server error has been added to.
    """
    rng = np.random.default_rng(0)
    params, steps = small_params(), 300
    scale = jax.tree.map(lambda x: 10 ** rng.uniform(-1, 0, x.shape), params)

    def distance(warmup=40, **options):
        rng = np.random.default_rng(1)
        zero = ZeroConfig(**options)
        rate = optax.cosine_decay_schedule(0.05, steps)
        run = Run(onebit_adam(rate, b2=0.99, zero=zero, warmup_steps=warmup), params, 4)
        x = params
        for t in range(steps):
            grads = jax.tree.map(
                lambda x, s, n: (s * (x + n)).astype(np.float32), x, scale, normal(rng, x, 4)
            )
            x = run.step(grads, "dense" if Phases(warmup, 10).is_dense(t) else "compressed")
        errors = jax.tree.leaves(run.state.leaves["w"].worker_error)
        assert str(errors[0].dtype) == options.get("error_dtype", "float32")
        return np.sqrt(np.mean(np.square(x["w"])))

    exact = distance(gather=gather)
    assert exact < 0.2  # of 1.0
    if gather == "params":
        adam = distance(warmup=steps, gather="params", gather_bits="dense")
        np.testing.assert_allclose(exact, adam, rtol=0.05)
    for dtype in ("bfloat16", "int8"):
        stored = distance(gather=gather, error_dtype=dtype, momentum_dtype="bfloat16")
        np.testing.assert_allclose(stored, exact, rtol=rtol)


@pytest.mark.parametrize("gather", ["params", "momentum"])
def test_strict_promotion(gather):
    """optax's own arithmetic is not strict, so the chain on the chunk is a plain one."""

    def update(updates, state, params, *, rms, **extra_args):
        change = jax.tree.map(lambda u, r, p: -0.01 * u / (r + 1e-8), updates, rms, params)
        return change, state

    inner = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    zero = ZeroConfig(gather=gather)
    tx = zero_shard(inner, zero=zero, warmup_steps=3, refresh=2)
    params = {**small_params(), "e": np.zeros((0, 3), np.float32)}
    params["h"] = params["w"].astype(jnp.bfloat16)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        clip = clip_by_global_norm(1.0, zero=zero)

        def step(grads, state, params, phase=None):
            return tx.update(clip.update(grads, clip.init(params))[0], state, params, phase=phase)

        def every_phase(params):
            grads = jax.tree.map(lambda x: jax.lax.pcast(x, "data", to="varying"), params)
            state = tx.init(params)
            for phase in (*PHASES, None):
                _, state = step(grads, state, params, phase)
            return state.step[None]

        mesh = jax.make_mesh((4,), ("data",))
        specs = {"in_specs": jax.P(), "out_specs": jax.P("data")}
        jax.eval_shape(jax.shard_map(every_phase, mesh=mesh, **specs), params)


@pytest.mark.parametrize("gather", ["params", "momentum"])
def test_units_that_wake_up_after_the_variance_is_frozen(gather):
    """No step runs away, and the others in the block are not drowned."""
    zero = ZeroConfig(stage=1, gather=gather)
    tx = onebit_adamw(1.0, weight_decay=0.0, zero=zero, warmup_steps=3, refresh=None)
    mesh = jax.make_mesh((1,), ("data",))

    def compile_step(phase):
        def step(grads, state, params):
            updates, state = tx.update({"w": grads}, state, params, phase=phase)
            return updates, state, jax.tree.map(jnp.add, params, updates)

        specs = {"in_specs": jax.P(), "out_specs": jax.P(), "check_vma": False}
        return jax.jit(jax.shard_map(step, mesh=mesh, **specs))

    steps = {phase: compile_step(phase) for phase in ("dense", "compressed")}
    params = {"w": jnp.zeros((64, 64))}
    start = jax.shard_map(tx.init, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
    state = jax.jit(start)(params)
    noise = np.random.default_rng(0).normal(size=(7, 64, 64)).astype(np.float32)
    # Row 0 has next to no gradient during warm-up; it shares a block with rows 1 to 15.
    noise[:3, 0] *= 1e-7
    for t, grads in enumerate(noise):
        updates, state, params = steps["dense" if t < 3 else "compressed"](grads, state, params)
        # The gather leg's codes add to a step of 10 (four bits of the largest change).
        assert t < 3 or np.abs(updates["w"]).max() < 20
    # What was decoded for row 15, in units of its root mean square.
    momentum = state.leaves["w"].momentum
    if gather == "momentum":
        assert float(momentum.scale[0, 0, 0]) < 20
    else:
        assert abs(float(jnp.ravel(momentum)[15 * 64])) < 20
