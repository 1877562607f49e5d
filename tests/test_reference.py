"""Every step of the package against the float64 reference of ``reference.py``.

Trajectories part for good after one sign that falls the other way, so the reference
starts every step from the package's state, read back with the reference's own decoder.
A number may differ by ``TOLERANCE`` of its size (the sum of the magnitudes that made it).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference as ref

from onebit_zero_jax import ZeroConfig, onebit_adamw
from onebit_zero_jax.layout import Shard
from onebit_zero_jax.phases import Phases

STEPS, WARMUP, REFRESH = 200, 20, 3
# Float32 rounds each of the handful of operations behind a number by 2^-24 of its size at
# most, and a sum of up to 1024 numbers (a block's scale) a few times more: 16 was seen.
TOLERANCE = 32 * ref.EPS
# Tests spend their time in LLVM: programs this small need no optimizing.
QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
}
# Like b1 below exact in binary: 1 - 0.999 in float32 is 1.3e-5 off what float64 makes of
# it, in optax too, and would hide everything below that.
B2 = 0.96875
DECAY, EPS = 0.05, 1e-6
SHAPES = {
    "bias": (7,),
    "bf16": (32, 256),  # tiles on 4 devices; the others are padded
    "dead": (130, 64),
    "empty": (0, 3),
    "scalar": (),
    "stack": (2, 20, 33),
}
NAMES = sorted(SHAPES)  # the order in which JAX flattens a dict


def learning_rate(count):
    return 0.05 / (1 + 0.01 * count)


def start(rng):
    params = {k: jnp.asarray(0.2 * rng.normal(size=SHAPES[k]), jnp.float32) for k in NAMES}
    return {**params, "bf16": params["bf16"].astype(jnp.bfloat16)}


class Problem:
    """Noisy quadratic of very different scales; some values are dead, some wake up late."""

    def __init__(self, rng, parts):
        self.rng, self.parts = rng, parts
        self.target = {k: 0.25 * rng.normal(size=SHAPES[k]) for k in NAMES}
        self.scale = {}
        for k in NAMES:
            rows = 10 ** rng.uniform(-2, 0, size=(*SHAPES[k][:1], *[1] * (len(SHAPES[k]) - 1)))
            self.scale[k] = rows * 10 ** rng.uniform(-1.5, 0, size=SHAPES[k])
        self.scale["dead"][[3, 77]] = 0
        self.scale["dead"][:, 5] = 0
        self.scale["dead"][8:11, 20:25] = 0
        self.asleep = rng.uniform(size=SHAPES["dead"]) < 0.02

    def grads(self, t, params):
        out = []
        for k in NAMES:
            away = np.asarray(params[k], np.float64) - self.target[k]
            noise = 0.5 * self.rng.normal(size=(self.parts, *SHAPES[k]))
            g = self.scale[k] * (away + noise)
            if k == "dead" and t < 50:
                g = np.where(self.asleep, 0, g)
            out.append(g.astype(params[k].dtype))
        if t in (10, 100, 103):  # dense, compressed, dense
            leaf = out[t % len(out)] if out[t % len(out)].size else out[0]
            leaf.reshape(self.parts, -1)[t % self.parts, 0] = (np.nan, np.inf)[t % 2]
        return dict(zip(NAMES, out))


def on_devices(fn, parts):
    """``fn`` on every device; all arrays in and out are stacked by device on axis 0."""
    mesh = jax.sharding.Mesh(jax.devices()[:parts], ("data",))
    spec = jax.P("data")

    @jax.shard_map(mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    def call(args):
        return jax.tree.map(lambda x: x[None], fn(*jax.tree.map(lambda x: x[0], args)))

    call = jax.jit(call, compiler_options=QUICK)
    return lambda *args: call(args)


def same(x):
    """The one value of an array that all devices must agree on, bit for bit."""
    assert all(x[0].tobytes() == y.tobytes() for y in x[1:])
    return x[0]


def blocks(x):
    """Owners' chunks ``(P, k, 8, lanes)`` -> ``(P * k, 8 * lanes)`` in float64."""
    return x.reshape(x.shape[0] * x.shape[1], -1).astype(np.float64)


def read(zero, leaves, state):
    """The package's state, one row per device, as the reference keeps it."""
    counters = ("step", "applied", "variance_updates")
    out: dict[str, Any] = {k: int(same(getattr(state, k))) for k in counters}
    out |= {"nonfinite": same(state.nonfinite), "leaves": []}
    out |= {k: getattr(state, k)[:, 0] for k in ("residual", "staleness")}
    for leaf, name in zip(leaves, NAMES):
        s = state.leaves[name]
        r = {}
        out["leaves"].append(r)
        if not leaf.compressed:
            r["M"], r["v"] = same(s.momentum), same(s.variance)
            if zero.gather_mode == "params":
                r["master"] = same(s.master)
            continue
        whole = (leaf.blocks, 8 * leaf.lanes)
        r["row"], r["col"] = same(s.factors.row), same(s.factors.col)
        error = s.worker_error if s.worker_error is not None else 0 * s.worker_momentum
        r["e"] = error.reshape(-1, *whole).astype(np.float64)
        v = same(s.shared).reshape(whole) if zero.stage == 0 else blocks(s.variance)
        r["v"] = v.astype(np.float64)
        if zero.gather_mode == "params":
            r["m"] = s.worker_momentum.reshape(-1, *whole).astype(np.float64)
            r["M"], r["master"] = blocks(s.momentum), blocks(s.master)
            if zero.stage:
                alive = ref.unpack(same(s.shared)[:, None])
                np.testing.assert_array_equal(alive, r["v"] > 0, name)
        else:
            r["E"] = blocks(s.server_error)
            planes, scale = same(s.momentum.planes), same(s.momentum.scale)
            r["M"] = ref.decode(planes, scale, ref.weight(leaf, r))
            if zero.stage:
                level, top = same(s.shared.levels), same(s.shared.top)
                r["level"], r["top"] = level.reshape(whole).astype(int), top.reshape(-1, 1)
                np.testing.assert_array_equal(r["level"] > 0, r["v"] > 0, name)
    return out


def close(what, got, want, size, slack=0.0):
    assert np.shape(got) == np.shape(want), what
    difference = np.abs(np.asarray(got, np.float64) - want)
    allowed = np.broadcast_to(TOLERANCE * size + slack, difference.shape)
    bad = difference > allowed
    assert not bad.any(), (what, np.argwhere(bad)[:5], difference[bad][:5], allowed[bad][:5])


def states_close(t, got, want, sizes):
    for k in ("step", "applied", "variance_updates"):
        assert got[k] == want[k], (t, k)
    np.testing.assert_array_equal(got["nonfinite"], want["nonfinite"])
    for k in ("residual", "staleness"):
        close((t, k), got[k], want[k], want[k])
    for name, g, w, size in zip(NAMES, got["leaves"], want["leaves"], sizes):
        assert g.keys() == w.keys()
        for k in g:
            # What a step leaves alone has no size: it must be the same.
            close((t, name, k), g[k], w[k], size.get(k, 0.0))


@pytest.mark.parametrize(
    "stage, gather, bits, parts, b1",
    [
        (0, "momentum", 1, 4, 0.875),
        pytest.param(0, "params", 1, 4, 0.875, marks=pytest.mark.slow),
        (1, "momentum", 2, 3, 0.875),
        pytest.param(1, "params", 8, 1, 0.875, marks=pytest.mark.slow),
        pytest.param(1, "params", "dense", 4, 0.0, marks=pytest.mark.slow),
        pytest.param(2, "momentum", 1, 4, 0.875, marks=pytest.mark.slow),
        pytest.param(2, "params", 3, 7, 0.875, marks=pytest.mark.slow),
        (2, "params", 4, 4, 0.875),
        (3, "params", "dense", 4, 0.875),
    ],
)
def test_every_step(stage, gather, bits, parts, b1, monkeypatch):
    """At stage 3 leaves are cut along axis 0 over all devices: shards are the owners' chunks."""
    if stage == 3:
        monkeypatch.setitem(SHAPES, "dead", (132, 64))  # the reference pads elsewhere
        monkeypatch.setitem(SHAPES, "stack", (4, 16, 40))
    big = [k for k in NAMES if stage == 3 and ref.Leaf(SHAPES[k], parts).compressed]

    def spread(k, x):
        """What each device holds, stacked."""
        return x.reshape(parts, -1, *x.shape[1:]) if k in big else np.stack([x] * parts)

    def whole(k, x):
        return x.reshape(-1, *x.shape[2:]) if k in big else same(x)

    def nodes(tree):
        """As zero_shard takes parameters and gradients."""
        shard = lambda k, x: Shard(x, -len(SHAPES[k]), SHAPES[k][0], ("data",))
        return {k: shard(k, tree[k]) if k in big else tree[k] for k in NAMES}

    def values(tree):
        return {k: tree[k].value if k in big else tree[k] for k in NAMES}

    # On 4 devices blocks are as wide as tiles.
    zero = ZeroConfig(stage=stage, gather=gather, gather_bits=bits, tiles=parts == 4)
    tx = onebit_adamw(
        learning_rate, b1, B2, EPS, DECAY, zero=zero, warmup_steps=WARMUP, refresh=REFRESH
    )
    rng = np.random.default_rng(stage)
    params = start(rng)
    problem = Problem(rng, parts)
    leaves = [ref.Leaf(SHAPES[k], parts, zero.tiles) for k in NAMES]
    assert [k for k, leaf in zip(NAMES, leaves) if leaf.compressed][:2] == ["bf16", "dead"]
    settings = ref.Settings(
        parts, stage, gather, bits, learning_rate, b1, B2, EPS, DECAY, WARMUP, REFRESH
    )
    programs = {
        phase: on_devices(lambda g, s, p, phase=phase: tx.update(g, s, p, phase=phase), parts)
        for phase in ("dense", "compressed")
    }
    dense = ref.dense_steps(WARMUP, REFRESH, STEPS)
    stacked = {k: spread(k, x) for k, x in jax.device_get(params).items()}
    state = on_devices(tx.init, parts)(nodes(stacked))
    got = read(zero, leaves, jax.device_get(state))
    ties = 0
    for t in range(STEPS):
        before, params = got, {k: whole(k, stacked[k]) for k in NAMES}
        grads = problem.grads(t, params)
        program = programs["dense" if t in dense else "compressed"]
        updates, state = program(nodes(grads), state, nodes(stacked))
        updates, now = jax.device_get((values(updates), state))
        got, got_updates = read(zero, leaves, now), [whole(k, updates[k]) for k in NAMES]
        want, sizes, changes, change_sizes, tied = ref.step(
            settings,
            leaves,
            before,
            [grads[k] for k in NAMES],
            [params[k] for k in NAMES],
            {**got, "updates": got_updates},
        )
        states_close(t, got, want, sizes)
        for name, u, change, size in zip(NAMES, got_updates, changes, change_sizes):
            assert u.dtype == params[name].dtype
            slack = 0.0
            if name == "bf16":  # rounded to 8 bits; a dense gather rounds the replica, too
                y = np.abs(np.asarray(params[name], np.float64))
                slack = 2.0**-8 * (np.abs(change) + (y + np.abs(change)) * (bits == "dense"))
                if gather == "momentum":  # optax takes weight decay in the parameters' dtype
                    slack += 2.0**-9 * learning_rate(before["applied"]) * DECAY * y
            close((t, name, "update"), u, change, size, slack)
        ties += tied
        stacked = {k: stacked[k] + updates[k] for k in NAMES}
    # At 8 bits, one code in 3000 is close to the next; elsewhere one in 45000.
    assert ties < 1e-3 * STEPS * sum(leaf.size for leaf in leaves)
    assert got["nonfinite"].sum() == 3
    assert got["applied"] == STEPS - 3


@pytest.mark.parametrize("warmup, refresh", [(1, 1), (2, 4), (100, 32), (7, 3), (50, None)])
def test_refreshes_double_after_every_16(warmup, refresh):
    phases, steps = Phases(warmup, refresh), np.arange(5001)
    dense = np.array([phases.is_dense(int(t)) for t in steps])
    assert set(np.flatnonzero(dense)) == ref.dense_steps(warmup, refresh, len(steps))
    none = np.zeros(3, np.int32)
    traced = lambda w, r: jax.vmap(lambda t: Phases(w, r).is_dense_traced(t, none))(steps)
    np.testing.assert_array_equal(jax.jit(lambda: traced(warmup, refresh))(), dense)
    np.testing.assert_array_equal(jax.jit(lambda w: traced(w, refresh))(warmup), dense)
    if refresh is not None:
        np.testing.assert_array_equal(jax.jit(traced)(warmup, refresh), dense)
    if refresh is not None:
        intervals = np.diff(np.flatnonzero(dense[warmup - 1 :]))
        np.testing.assert_array_equal(intervals, refresh * 2 ** (np.arange(len(intervals)) // 16))
        assert len(intervals) > 32


def test_numpy_integers_as_step_counts():
    tx = onebit_adamw(1e-2, zero=ZeroConfig(), warmup_steps=np.int64(2), refresh=np.int32(4))
    phases = tx.init({}).run.phases
    assert [t for t in range(9) if phases.is_dense(t)] == [0, 1, 5]
