"""What travels over the data axis, read from compiled programs and counted by formula."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

from onebit_zero_jax import ZeroConfig, init, onebit_adam, train_step, wire_report
from onebit_zero_jax.wire import traced_bytes

P = jax.P
PARTS = 4
# Compressed: whole blocks, and one of 375 values a device. Dense: a vector, a scalar, and
# a matrix too small to pay for its scales.
SHAPES = {"big": (64, 128), "odd": (30, 50), "vector": (7,), "scalar": (), "small": (5, 8)}
COMPRESSED = ("big", "odd")
DENSE = ("vector", "scalar", "small")
PARAMETERS = sum(math.prod(s) for s in SHAPES.values())
SKETCH = 1031  # random projection of the gradient, for its norm
SCALARS = 5  # loss, two norms of the residual ratio, two of the variance's staleness


pytestmark = pytest.mark.usefixtures("few_optimizations")


def mesh_of(parts=PARTS):
    return jax.make_mesh((parts,), ("data",), (AxisType.Auto,), devices=jax.devices()[:parts])


def make_params(dtype=jnp.float32):
    return {k: jnp.ones(s, dtype) for k, s in SHAPES.items()}


def loss_fn(params, batch):
    return sum(
        jnp.mean(jnp.square(p.astype(jnp.float32) - jnp.mean(batch))) for p in params.values()
    )


BATCH = np.ones((2 * PARTS, 3), np.float32)


def make_step(zero, dtype=jnp.float32, parts=PARTS, loss=loss_fn, tx=None, **options):
    mesh = mesh_of(parts)
    tx = onebit_adam(1e-3, zero=zero, warmup_steps=1) if tx is None else tx
    # Shapes are enough to compile.
    state = jax.eval_shape(lambda p: init(p, tx, mesh, zero), make_params(dtype))
    return train_step(loss, tx, mesh, zero, **options), state


def report_of(step, state, phase, batch=BATCH):
    compiled = step.lower(state, batch, phase=phase).compile()
    return wire_report(compiled, mesh_of(), make_params())


# ---------------------------------------------------------------- the formula


def blocks_and_lanes(size):
    """Of a device's part: blocks of 8 x 128, narrower if they would pad more than 1 / 16."""
    part = math.ceil(size / PARTS)
    blocks = math.ceil(part / 1024)
    if blocks * 1024 * PARTS <= size * 17 / 16:
        return blocks, 128
    return blocks, math.ceil(part / (8 * blocks))


def sizes(name):
    return blocks_and_lanes(math.prod(SHAPES[name]))


def code_bytes(bits):
    """Planes of ``lanes`` bytes and a float32 scale per block, for a device's part."""
    return sum(b * (bits * lanes + 4) for b, lanes in map(sizes, COMPRESSED))


def values():
    """Values in a device's part, padding included."""
    return sum(b * 8 * lanes for b, lanes in map(sizes, COMPRESSED))


def expected(zero, phase, itemsize=4):
    """(op, dtype) -> values of the results, by leg; all that a step sends."""
    dense = phase == "dense"
    gather = values() * itemsize if zero.bits == "dense" else code_bytes(zero.bits)
    if dense and zero.stage == 0:
        gather += 4 * values()  # v
    elif dense and zero.gather_mode == "params":
        gather += values() // 8  # bit planes of v > 0
    elif dense:
        # sqrt(v) in 8 bits, and a maximum per block.
        gather += values() + 4 * sum(sizes(name)[0] for name in COMPRESSED)
    reduced = {
        # With a flag per leaf.
        "dense_leaves": len(SHAPES) + sum(math.prod(SHAPES[name]) for name in DENSE),
        "metrics": SKETCH + SCALARS,
    }
    if dense:
        reduced["weights"] = sum(sum(SHAPES[name]) for name in COMPRESSED)  # row and column means
    out = {
        ("all-gather", "u8"): {"gather": PARTS * padded(gather)},
        ("all-reduce", "f32"): reduced,
    }
    if dense:
        out["reduce-scatter", "f32"] = {"reduce": values()}
    if not dense or zero.gather_mode == "params":  # With local momentum refreshes code too.
        out["all-to-all", "u8"] = {"reduce": PARTS * padded(code_bytes(1))}
    return out


def padded(size):
    """Rows of 128 bytes from 4096 on."""
    return size if size < 4096 else -(-size // 128) * 128


def by_kind(report):
    """(op, dtype) -> values of the results, by leg; the order of legs in :func:`expected`."""
    ordered = sorted(report.collectives, key=lambda c: (c.op, c.dtype, c.leg))
    groups = itertools.groupby(ordered, key=lambda c: (c.op, c.dtype))
    return {kind: leg_sizes(rows) for kind, rows in groups}


def leg_sizes(rows):
    out = {}
    for c in rows:
        assert c.calls == 1
        assert not c.branch
        out[c.leg] = out.get(c.leg, 0) + c.size
    return out


CASES = {
    "0": ZeroConfig(stage=0),
    "1": ZeroConfig(stage=1),
    "1-momentum-2": ZeroConfig(stage=1, gather_bits=2, error_dtype="int8"),
    "1-params-3": ZeroConfig(stage=1, gather="params", gather_bits=3),
    "2": ZeroConfig(stage=2),
    "2-params-1": ZeroConfig(stage=2, gather_bits=1, momentum_dtype="bfloat16"),
    "2-dense": ZeroConfig(stage=2, gather_bits="dense"),
}
# Masters are bit-cast to bytes: XLA's CPU backend would widen bfloat16 to float32.
DTYPES = {"2-dense": jnp.bfloat16}


@functools.cache
def compiled(case, phase):
    """Report of the compiled program, and bytes of the traced one."""
    step, state = make_step(CASES[case], DTYPES.get(case, jnp.float32))
    return report_of(step, state, phase), step.bytes_sent(state, BATCH, phase=phase)


def test_the_formula_on_known_sizes():
    assert (sizes("big"), sizes("odd")) == ((2, 128), (1, 47))
    assert code_bytes(1) == 2 * (128 + 4) + (47 + 4)
    assert code_bytes(4) == 2 * (512 + 4) + (188 + 4)


@pytest.mark.parametrize(
    "case, phase",
    [(case, "compressed") for case in ("0", "1", "1-momentum-2", "2", "2-dense")]
    + [(case, "dense") for case in ("0", "1", "2-dense")],
)
def test_collectives_are_the_formula(case, phase):
    report, sent = compiled(case, phase)
    itemsize = jnp.dtype(DTYPES.get(case, jnp.float32)).itemsize
    assert by_kind(report) == expected(CASES[case], phase, itemsize)
    assert {c.group for c in report.collectives} == {PARTS}
    assert not any(c.leg_inferred or c.asynchronous for c in report.collectives)
    # What is counted in the traced program is what XLA made of it, but for rounding.
    assert {leg: round(n) for leg, n in report.legs().items()} == {
        leg: n for leg, n in sent.items() if n
    }
    assert report.sent("data") == report.sent()
    assert report.bits_per_parameter("data") == 8 * report.sent() / PARAMETERS


@pytest.mark.parametrize("case", CASES)
def test_report_by_leg(case):
    zero, dtype = CASES[case], DTYPES.get(case, jnp.float32)
    step, state = make_step(zero, dtype)
    for phase in ("dense", "compressed"):
        sent = step.bytes_sent(state, BATCH, phase=phase)
        want = expected(zero, phase, jnp.dtype(dtype).itemsize)
        gathered = want["all-gather", "u8"]["gather"]
        assert sent["gather"] == (PARTS - 1) / PARTS * gathered
        ring = 2 * (PARTS - 1) / PARTS * 4
        flags_and_leaves = len(SHAPES) + 7 + 1 + 40
        assert sent["dense_leaves"] == ring * flags_and_leaves
        assert sent["metrics"] == ring * (SKETCH + SCALARS)
        assert sent["weights"] == (ring * (64 + 128 + 30 + 50) if phase == "dense" else 0)
        code = want.get(("all-to-all", "u8"), {"reduce": 0})["reduce"]
        values_sent = 4 * (PARTS - 1) * values() if phase == "dense" else 0
        assert sent["reduce"] == round(values_sent + (PARTS - 1) / PARTS * code)


def test_a_compressed_step_sends_one_packed_buffer_per_leg_and_little_else():
    report, _ = compiled("2", "compressed")
    packed = [c for c in report.collectives if c.dtype == "u8"]
    assert [c.op for c in packed] == ["all-to-all", "all-gather"]
    # Dense leaves, a flag per leaf, the gradient's sketch and three scalars: nothing that
    # grows with the matrices.
    rest = [c for c in report.collectives if c.dtype != "u8"]
    dense = sum(math.prod(SHAPES[name]) for name in DENSE)
    assert {(c.op, c.dtype) for c in rest} == {("all-reduce", "f32")}
    assert sum(c.size for c in rest) <= dense + len(SHAPES) + SKETCH + SCALARS
    assert sum(c.size for c in rest) < min(math.prod(SHAPES[name]) for name in COMPRESSED)


def test_matrices_grow_and_the_rest_does_not():
    """At 1 and 4 bits a step sends 1 / 32 + 1 / 8 of float32, and 8 bytes per 1024 values."""
    mesh, zero = mesh_of(), ZeroConfig(stage=2)
    tx = onebit_adam(1e-3, zero=zero)
    step = train_step(loss_fn, tx, mesh, zero)
    params = {"a": jnp.ones((512, 1024)), "b": jnp.ones((256, 1024)), "bias": jnp.ones(1024)}
    sent = step.bytes_sent(jax.eval_shape(lambda p: init(p, tx, mesh, zero), params), BATCH)
    n, ring = 768 * 1024, (PARTS - 1) / PARTS
    assert sent["reduce"] == ring * (n / 8 + n / 1024 * 4)
    assert sent["gather"] == ring * (n / 2 + n / 1024 * 4)
    assert sent["dense_leaves"] == 2 * ring * 4 * (1024 + 3)


def test_micro_batches_send_once():
    step, state = make_step(CASES["2"], accumulate=4)
    batch = np.ones((4 * PARTS, 3), np.float32)
    report = report_of(step, state, "compressed", batch)
    assert by_kind(report) == by_kind(compiled("2", "compressed")[0])


def test_the_users_own_collectives_are_counted_apart():
    def synced(params, batch):
        return loss_fn(params, batch - jax.lax.pmean(jnp.mean(batch, 0), "data"))

    step, state = make_step(ZeroConfig(stage=2), loss=synced)
    sent = step.bytes_sent(state, BATCH)
    assert sent["other"] == 2 * (PARTS - 1) / PARTS * 4 * 3
    assert report_of(step, state, "compressed").legs()["other"] == sent["other"]


def test_a_phase_picked_on_the_device_counts_its_dense_branch():
    zero = ZeroConfig(stage=2)
    tx = optax.inject_hyperparams(onebit_adam)(1e-3, zero=zero, warmup_steps=1)
    step, state = make_step(zero, tx=tx)
    plain, same = make_step(zero)
    both, dense = (
        step.bytes_sent(state, BATCH, phase=None),
        plain.bytes_sent(same, BATCH, phase="dense"),
    )
    assert both == dense


def test_one_device_sends_nothing():
    step, state = make_step(ZeroConfig(stage=2), parts=1)
    for phase in ("dense", "compressed"):
        assert set(step.bytes_sent(state, BATCH, phase=phase).values()) == {0}


# ---------------------------------------------------------------- the reader of traced programs


def test_traced_bytes_of_loops_and_branches():
    def body(x):
        def repeat(carry, _):
            return carry + jax.lax.psum(x, "data"), None

        looped, _ = jax.lax.scan(repeat, jnp.zeros(8), None, length=5)
        branch = jax.lax.cond(
            jnp.sum(looped) > 0,
            lambda: jax.lax.psum(x[:2], "data"),
            lambda: jax.lax.psum(x[:1], "data")[jnp.zeros(2, int)],
        )
        return looped, branch, jax.lax.ppermute(x, "data", [(0, 1), (1, 0)])

    mapped = jax.shard_map(
        body, mesh=mesh_of(2), in_specs=P("data"), out_specs=(P(), P(), P("data")), check_vma=False
    )
    sent = traced_bytes(jax.jit(mapped).trace(jnp.ones(16)).jaxpr, {"data": 2})
    assert sent["other"] == 5 * 32 + 8 + 32
