"""What the run decides about dense steps: the end of warm-up, learning rates that rise again."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import onebit_zero_jax as ob
from onebit_zero_jax.phases import CHECK_EVERY, NOTICE, Phases, check_interval
from onebit_zero_jax.state import zero_states

pytestmark = pytest.mark.usefixtures("few_optimizations")

P = jax.P
ZERO = ob.ZeroConfig()
B2 = 0.9  # A check of the norm every 16 steps, a window of 128.
FIRST = 16 * 9 + NOTICE  # the earliest end of warm-up


def mesh_of(parts=2):
    return jax.make_mesh((parts,), ("data",), devices=jax.devices()[:parts])


def params_of():
    return {"w": np.ones((16, 16), np.float32)}


def loss_fn(params, batch):
    """Its gradient is the batch's mean, whatever the parameters are."""
    return jnp.sum(params["w"] * jnp.mean(batch, 0))


def batch_of(rng, scale=1.0):
    return (scale * rng.normal(size=(4, 16, 16))).astype(np.float32)


def signs_of(rng, scale=1.0):
    """The same for all workers; every step adds the same to v, which so settles at once."""
    signs = scale * np.sign(rng.normal(size=(1, 16, 16)))
    return np.repeat(signs, 4, axis=0).astype(np.float32)


def walk(schedule, steps, b2=B2, norm=lambda t: 1.0, rate=None):
    """Phases of ``steps`` steps as a program picks them, and `starts` after each."""

    @jax.jit
    def run():
        def step(carry, t):
            starts, norms = carry
            dense = schedule.is_dense_traced(t, starts)
            starts, norms = schedule.advance(
                t, starts, norms, lambda: jnp.float32(norm(t)), b2, rate
            )
            return (starts, norms), (dense, starts)

        carry = jnp.zeros(3, jnp.int32), jnp.zeros(8, jnp.float32)
        return jax.lax.scan(step, carry, jnp.arange(steps, dtype=jnp.int32))[1]

    dense, starts = jax.device_get(run())
    return dense, starts


def as_host(schedule, starts):
    """Phases as a host picks them that reads `starts` NOTICE steps late."""
    out, known = [], (0, 0, 0)
    for t in range(len(starts)):
        if t >= CHECK_EVERY + NOTICE and (t - NOTICE) % CHECK_EVERY == 0:
            known = tuple(starts[t - NOTICE - 1].tolist())
        out.append(schedule.is_dense(t, known))
    return np.array(out)


# ---------------------------------------------------------------- the end of warm-up


def test_warm_up_ends_when_the_norm_of_v_has_settled():
    schedule = Phases("auto", None)
    # exp(-t / tau) keeps 96 % over 128 steps once tau > 3136: never, and from the start.
    for tau, end in ((3000.0, None), (3300.0, FIRST)):
        dense, starts = walk(schedule, 400, norm=lambda t, tau=tau: jnp.exp(-t / tau))
        assert list(np.flatnonzero(~dense)) == list(range(end or 400, 400))
        np.testing.assert_array_equal(as_host(schedule, starts), dense)
    # A norm that grows has not settled either; a larger b2 has a longer window.
    assert walk(schedule, 400, norm=lambda t: jnp.exp(t / 1000))[0].all()
    assert check_interval(0.999) == 128 == int(check_interval(jnp.float32(0.999)))
    dense, _ = walk(schedule, 1200, b2=0.999)
    assert np.flatnonzero(~dense)[0] == 128 * 9 + NOTICE


def test_warm_up_goes_on_while_the_learning_rate_rises():
    rate = optax.linear_schedule(0.0, 1e-3, 250)
    schedule = Phases("auto", None)
    dense, starts = walk(schedule, 400, rate=rate)
    end = int(np.flatnonzero(~dense)[0])
    # Checks look from a step before their decision counts; the first that sees no rise.
    assert end == CHECK_EVERY * 16 + NOTICE > 250
    np.testing.assert_array_equal(as_host(schedule, starts), dense)


def test_nothing_settles_without_gradients():
    assert walk(Phases("auto", 8), 400, norm=lambda t: 0.0)[0].all()


# ---------------------------------------------------------------- learning rates that rise again


def restarts(t):
    """Cosine of 100 steps, over and over."""
    return 1e-3 * (1 + jnp.cos(jnp.pi * (t % 100) / 100))


def test_refreshes_count_anew_from_a_restarted_learning_rate():
    schedule = Phases(20, 2)
    dense, starts = walk(schedule, 320, rate=restarts)
    expected = {t for t in range(100) if schedule.is_dense(t)}
    for r in (100, 200, 300):
        expected |= {r} | {r + 1 + t - 20 for t in range(20, 119) if schedule.is_dense(t)}
    assert set(np.flatnonzero(dense)) == {t for t in expected if t < 320}
    np.testing.assert_array_equal(as_host(schedule, starts), dense)
    # Without refreshes the variance is frozen for good, and a flat rate never rises.
    assert not walk(Phases(20, None), 320, rate=restarts)[0][20:].any()
    flat = optax.cosine_decay_schedule(1e-3, 10**6)
    np.testing.assert_array_equal(
        walk(schedule, 320, rate=flat)[0], [schedule.is_dense(t) for t in range(320)]
    )


def test_a_long_rise_is_one_refresh():
    """A second warm-up of 60 steps, over several checks."""
    rate = lambda t: jnp.interp(t, jnp.array([0, 20, 100, 160, 400]), jnp.array([0, 1, 0.1, 1, 0]))
    dense, starts = walk(Phases(20, 64), 180, rate=rate)
    assert list(np.flatnonzero(dense)) == [*range(20), 83, 101, 101 + 64]
    np.testing.assert_array_equal(as_host(Phases(20, 64), starts), dense)


def test_a_rise_in_warm_up_does_not_end_it():
    dense, _ = walk(Phases(150, 64), 200, rate=restarts)
    assert dense[:150].all()
    assert not dense[150:200].any()


@pytest.mark.parametrize("warmup", [7, "auto"])
def test_host_and_program_agree(warmup):
    schedule = Phases(warmup, 3)
    rng = np.random.default_rng(0)
    levels = jnp.asarray(rng.uniform(size=64), jnp.float32)
    rate = lambda t: levels[(t // 9) % 64]
    dense, starts = walk(schedule, 500, rate=rate)
    assert len(np.unique(starts)) > 10
    np.testing.assert_array_equal(as_host(schedule, starts), dense)


# ---------------------------------------------------------------- in a train step


def train(step, state, steps, rng, draw=signs_of):
    seen = []
    for _ in range(steps):
        state, metrics = step(state, draw(rng))
        seen.append({k: v for k, v in metrics.items() if k in ("phase", "variance_staleness")})
    return state, seen


def test_auto_in_a_train_step_survives_a_checkpoint(tmp_path):
    """The same steps are compressed with and without a stop; a programs's own are, too."""
    tx = ob.onebit_adam(1e-3, b2=B2, zero=ZERO, warmup_steps="auto", refresh=20)
    mesh = mesh_of()
    step = ob.train_step(loss_fn, tx, mesh, ZERO)
    start = ob.init(params_of(), tx, mesh, ZERO)
    state, first = train(step, start, FIRST - 3, np.random.default_rng(0))
    assert {m["phase"] for m in first} == {"dense"}
    # Between the decision and what it changes.
    assert max(np.asarray(state.opt_state.starts)) == FIRST
    ob.save(tmp_path / "auto", state)
    restored, _ = ob.restore(tmp_path / "auto", params_of(), tx, mesh, ZERO)
    ends = []
    for s in (restored, state):
        s, metrics = train(step, s, 26, np.random.default_rng(1))
        dense = [t for t, m in enumerate(metrics, FIRST - 3) if m["phase"] == "dense"]
        assert dense == [FIRST - 3, FIRST - 2, FIRST - 1, FIRST + 19]
        ends.append(s)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), ends[0], ends[1])


def test_the_norm_is_that_of_whole_leaves():
    """At stage 3 each device knows the weights of its shard alone."""
    zero = ob.ZeroConfig(axis_name=("slow", "fast"), stage=3)
    tx = ob.onebit_adam(1e-3, b2=B2, zero=zero, warmup_steps="auto")
    mesh = jax.make_mesh((2, 2), zero.axis_name, devices=jax.devices()[:4])
    step = ob.train_step(loss_fn, tx, mesh, zero)
    state, rng = ob.init(params_of(), tx, mesh, zero), np.random.default_rng(0)
    scale = np.linspace(1, 3, 16)  # along both axes, so that shards differ
    draw = lambda rng: np.float32(signs_of(rng) * scale * scale[:, None])
    state, _ = train(step, state, CHECK_EVERY, rng, draw)
    v = np.asarray(state.opt_state.leaves["w"].variance) / (1 - B2**CHECK_EVERY)
    assert float(state.opt_state.norms[-1]) == pytest.approx(v.sum(), rel=1e-4)


def test_hosts_read_only_every_16_steps(monkeypatch):
    from onebit_zero_jax import train as module

    reads = []
    read = module._read
    monkeypatch.setattr(module, "_read", lambda x: reads.append(1) or read(x))
    tx = ob.onebit_adam(1e-3, b2=B2, zero=ZERO, warmup_steps="auto")
    mesh = mesh_of()
    step = ob.train_step(loss_fn, tx, mesh, ZERO)
    train(step, ob.init(params_of(), tx, mesh, ZERO), 60, np.random.default_rng(0))
    assert len(reads) == 1 + 60 // CHECK_EVERY


def test_auto_in_a_users_own_loop_and_under_inject_hyperparams():
    make = lambda b2: ob.onebit_adam(1e-3, b2=b2, zero=ZERO, warmup_steps="auto", refresh=20)
    injected = optax.inject_hyperparams(ob.onebit_adam)(
        1e-3, b2=B2, zero=ZERO, warmup_steps="auto", refresh=20
    )
    mesh, rng = mesh_of(), np.random.default_rng(0)
    batches = np.stack([signs_of(rng) for _ in range(FIRST + 22)])
    batches = jax.device_put(batches, jax.NamedSharding(mesh, P(None, "data")))
    counts = []
    for tx in (make(B2), injected):

        @jax.jit
        @jax.shard_map(mesh=mesh, in_specs=(P(), P(None, "data")), out_specs=P())
        def run(params, batches, tx=tx):
            def one(carry, batch):
                params, state = carry
                local = jax.lax.pcast(params, "data", to="varying")
                grads = jax.grad(loss_fn)(local, batch)
                updates, state = tx.update(grads, state, params)
                return (optax.apply_updates(params, updates), state), zero_states(state)[
                    0
                ].variance_updates

            state = tx.init(params)
            return jax.lax.scan(one, (params, state), batches)[1]

        counts.append(np.asarray(run(params_of(), batches)))
        dense = np.diff(counts[-1], prepend=0)
        assert list(np.flatnonzero(dense == 0)) == [
            *range(FIRST, FIRST + 19),
            FIRST + 20,
            FIRST + 21,
        ]


@pytest.mark.slow
def test_groups_that_settle_apart_pick_phases_on_the_device():
    """Two groups, one of which never settles: neither is compressed by the other's decision."""
    one = ob.onebit_adam(1e-3, b2=B2, zero=ZERO, warmup_steps="auto", refresh=None)
    tx = optax.partition({"a": one, "b": one}, {"u": "a", "w": "b"})
    mesh, rng = mesh_of(), np.random.default_rng(0)

    def loss(params, x):
        return loss_fn({"w": params["w"]}, x[0]) + loss_fn({"w": params["u"]}, x[1])

    step = ob.train_step(loss, tx, mesh, ZERO)
    state = ob.init({"w": params_of()["w"], "u": params_of()["w"]}, tx, mesh, ZERO)
    seen = []
    for t in range(FIRST + 4):
        x = signs_of(rng), signs_of(rng, 1.02**t)
        state, metrics = step(state, x)
        seen.append(metrics["phase"])
    assert seen == ["dense"] * FIRST + ["device"] * 4
    updates = {int(s.variance_updates) for s in zero_states(state.opt_state)}
    assert updates == {FIRST, FIRST + 4}


# ---------------------------------------------------------------- a variance gone stale


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_staleness_is_the_growth_of_the_gradients_square(stage):
    zero = ob.ZeroConfig(stage=stage)
    tx = ob.onebit_adam(1e-3, b2=B2, zero=zero, warmup_steps=30, refresh=None)
    mesh, rng = mesh_of(), np.random.default_rng(0)
    step = ob.train_step(loss_fn, tx, mesh, zero)
    state = ob.init(params_of(), tx, mesh, zero)
    state, seen = train(step, state, 30, rng, batch_of)
    assert {float(m["variance_staleness"]) for m in seen} == {1.0}
    state, seen = train(step, state, 60, rng, batch_of)
    fresh = np.array([float(m["variance_staleness"]) for m in seen[10:]])
    assert 0.7 < fresh.min() < fresh.max() < 1.4
    state, seen = train(step, state, 60, rng, lambda rng: batch_of(rng, 4.0))
    stale = np.array([float(m["variance_staleness"]) for m in seen[40:]])
    assert 12 < stale.mean() < 20
