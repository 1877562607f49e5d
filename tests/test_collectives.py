"""The compressed collectives: what is sent and what is kept add up to what was put in."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from onebit_zero_jax import (
    compressed_all_gather,
    compressed_all_reduce,
    compressed_reduce_scatter,
    wire_report,
)

P = jax.P
STEPS = 20
SHAPES = {
    "scalar": (),
    "empty": (0,),
    "empty_matrix": (3, 0),
    "five": (5,),
    "odd": (3, 7),
    "matrix": (70, 129),
    "flat": (4096,),
}
ROUNDING = 2.0**-24


@pytest.fixture
def quick():
    """XLA with few optimizations: half the time to compile."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def mesh_of(parts, kind=AxisType.Auto):
    return jax.make_mesh((parts,), ("data",), (kind,), devices=jax.devices()[:parts])


def heavy_tailed(seed, shape, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    values = rng.normal(size=shape) * np.exp(rng.normal(size=shape))
    return jnp.asarray(values, dtype)


def inputs_of(parts, dtype=jnp.float32, steps=STEPS):
    """A tree of (steps, devices, ...) arrays."""
    return {
        name: heavy_tailed(seed, (steps, parts, *shape), dtype)
        for seed, (name, shape) in enumerate(SHAPES.items())
    }


def run(mesh, axis, xs, *, bits=1, check_vma=True):
    """STEPS all-reduces of every array; returns trees of all outputs and of all errors.

    Arrays: out (steps, ...), worker error (steps, devices, ...), server error (steps, n).
    """

    def body(xs):
        xs = jax.tree.map(lambda x: x[:, 0], xs)
        chunks = jax.eval_shape(
            lambda: jax.tree.map(
                lambda x: compressed_reduce_scatter(x[0], None, axis, bits=bits)[0], xs
            )
        )
        worker = jax.tree.map(lambda x: jnp.zeros_like(x[0], jnp.float32), xs)
        server = jax.tree.map(lambda c: jnp.zeros(c.shape, jnp.float32), chunks)
        if check_vma:
            # Zeros from nowhere are typed as equal on all devices.
            server = jax.lax.pcast(server, axis, to="varying")

        def step(carry, x):
            done = {
                k: compressed_all_reduce(x[k], carry[0][k], carry[1][k], axis, bits=bits) for k in x
            }
            out, worker, server = ({k: v[i] for k, v in done.items()} for i in range(3))
            return (worker, server), (out, worker, server)

        _, (out, worker, server) = jax.lax.scan(step, (worker, server), xs)
        return out, jax.tree.map(lambda e: e[:, None], worker), server

    mapped = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=P(None, axis),
        out_specs=(P(), P(None, axis), P(None, axis)),
        check_vma=check_vma,
    )
    xs = jax.device_put(xs, jax.NamedSharding(mesh, P(None, axis)))
    return jax.jit(mapped)(xs)


def assert_identity(xs, out, worker, server, shape):
    """sum_t out_t = sum_t mean_i x_(i,t) - mean_i e_(i,T) - E_T, to float32 rounding."""
    xs, out, worker, server = (np.asarray(a, np.float64) for a in (xs, out, worker, server))
    parts = xs.shape[1]
    size = int(np.prod(shape))
    kept = worker[-1].mean(0) + server[-1][:size].reshape(shape)
    # Per step and value: x + e, c - q and the sum over senders, then d + E and c - q.
    peak = sum(np.max(np.abs(a), initial=0.0) for a in (xs, out, worker, server))
    bound = len(xs) * (parts + 5) * ROUNDING * peak
    np.testing.assert_allclose(out.sum(0), xs.mean(1).sum(0) - kept, rtol=0, atol=bound)
    # Padding keeps no error.
    assert not np.any(server[:, size:])


def assert_replicas_equal(tree):
    for x in jax.tree.leaves(tree):
        first, *others = (np.asarray(s.data).tobytes() for s in x.addressable_shards)
        assert all(other == first for other in others)


# ---------------------------------------------------------------- golden identity


# Compiling takes most of the time: every shape on 3 devices, three or more on the others.
@pytest.mark.parametrize(
    "parts, check_vma, names",
    [
        (1, True, ("scalar", "empty", "odd")),
        (2, False, ("scalar", "empty", "five", "flat")),
        (3, True, tuple(SHAPES)),
        (7, False, ("scalar", "empty", "flat")),
        (8, True, ("scalar", "empty_matrix", "odd", "matrix")),
    ],
)
def test_golden_identity(parts, check_vma, names):
    xs = {name: x for name, x in inputs_of(parts).items() if name in names}
    out, worker, server = run(mesh_of(parts), "data", xs, check_vma=check_vma)
    for name, shape in ((name, SHAPES[name]) for name in names):
        assert out[name].shape == (STEPS, *shape)
        assert out[name].dtype == worker[name].dtype == server[name].dtype == jnp.float32
        assert_identity(xs[name], out[name], worker[name], server[name], shape)
    assert_replicas_equal(out)


@pytest.mark.usefixtures("quick")
def test_golden_identity_at_every_number_of_bits():
    mesh, shape = mesh_of(2), (32, 64)
    xs = heavy_tailed(0, (STEPS, 2, *shape))
    lost = []
    for bits in range(2, 9):
        out, worker, server = run(mesh, "data", {"x": xs}, bits=bits)
        assert_identity(xs, out["x"], worker["x"], server["x"], shape)
        lost.append(float(jnp.sqrt(jnp.mean(jnp.square(worker["x"])))))
    # Every bit halves the distance between levels, and more: 2^b - 1 of them.
    assert all(fine < coarse / 2 for coarse, fine in itertools.pairwise(lost))


@pytest.mark.usefixtures("quick")
def test_golden_identity_of_half_precision_input():
    for dtype in (jnp.bfloat16, jnp.float16):
        xs = heavy_tailed(1, (STEPS, 4, 3, 7), dtype)
        out, worker, server = run(mesh_of(4), "data", {"x": xs})
        assert out["x"].dtype == worker["x"].dtype == jnp.float32
        assert_identity(xs, out["x"], worker["x"], server["x"], (3, 7))


@pytest.mark.usefixtures("quick")
def test_tuple_of_axes_is_one_axis_in_row_major_order():
    xs = {k: v for k, v in inputs_of(8).items() if k in ("five", "odd")}
    mesh = jax.make_mesh((2, 4), ("a", "b"), (AxisType.Auto,) * 2)
    two = run(mesh, ("a", "b"), xs)
    one = run(mesh_of(8), "data", xs)
    for name in xs:
        assert_identity(xs[name], two[0][name], two[1][name], two[2][name], SHAPES[name])
    jax.tree.map(np.testing.assert_array_equal, two, one)
    assert_replicas_equal(two[0])


@pytest.mark.usefixtures("quick")
def test_mesh_type_and_check_vma_change_no_bit():
    xs = {"odd": inputs_of(8)["odd"]}
    plain = run(mesh_of(8), "data", xs)
    for kind, check_vma in [
        (AxisType.Auto, False),
        (AxisType.Explicit, True),
        (AxisType.Explicit, False),
    ]:
        other = run(mesh_of(8, kind), "data", xs, check_vma=check_vma)
        assert jax.typeof(other[0]["odd"]).sharding.mesh.axis_types == (kind,)
        jax.tree.map(np.testing.assert_array_equal, plain, other)


def test_errors_stay_bounded_and_the_average_converges():
    """Without feedback both would stay: the error as large as the input, and the gap as it is."""
    steps = 8 * STEPS
    rng = np.random.default_rng(5)
    xs = jnp.asarray(rng.normal(size=(steps, 2, 4096)), jnp.float32)
    out, worker, _ = run(mesh_of(2), "data", {"x": xs})

    def rms(x):
        return float(jnp.sqrt(jnp.mean(jnp.square(x))))

    early, late = rms(worker["x"][STEPS - 1]), rms(worker["x"][-1])
    assert early < 1
    assert late < 1.2 * early
    gap = [rms(out["x"][:t].mean(0) - xs[:t].mean((0, 1))) for t in (STEPS, steps)]
    assert gap[1] < gap[0] / 6


# ---------------------------------------------------------------- values and composition


def test_first_step_against_numpy():
    """1 bit and a mean absolute value per 1024 values, on both legs.

    Multiples of 1/4: every sum is exact in float32, in whatever order a machine adds.
    """
    parts = 2
    x = np.round(4 * np.asarray(heavy_tailed(7, (parts, 4096)))) / 4

    def one_bit(values):
        blocks = values.reshape(-1, 1024).astype(np.float64)
        scale = np.abs(blocks).mean(1, keepdims=True)
        return np.where(blocks >= 0, scale, -scale).reshape(values.shape)

    mean = one_bit(x).mean(0)
    expected = one_bit(mean)
    out, worker, server = run(mesh_of(parts), "data", {"x": jnp.asarray(x)[None]})
    np.testing.assert_array_equal(out["x"][0], expected)
    np.testing.assert_array_equal(worker["x"][0], x - one_bit(x))
    np.testing.assert_array_equal(server["x"][0], mean - expected)


@pytest.mark.usefixtures("quick")
def test_all_reduce_is_reduce_scatter_then_all_gather():
    # 4 whole blocks per device: no padding, and the chunk's blocks are the same in both.
    mesh, size = mesh_of(4), 4 * 4096

    def body(x, worker, server):
        whole = compressed_all_reduce(x[0], worker[0], server, "data")
        chunk, new_worker = compressed_reduce_scatter(x[0], worker[0], "data")
        out, new_server = compressed_all_gather(chunk, server, "data")
        return [(a, b[None], c) for a, b, c in (whole, (out, new_worker, new_server))]

    specs = (P(), P("data"), P("data"))
    f = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=[specs, specs]))
    args = heavy_tailed(0, (4, size)), heavy_tailed(1, (4, size)), heavy_tailed(2, (size,))
    at_once, in_two = f(*args)
    jax.tree.map(np.testing.assert_array_equal, at_once, in_two)


@pytest.mark.usefixtures("quick")
def test_no_error_is_zero_error():
    def body(x):
        x = x[0]
        size = compressed_reduce_scatter(x, None, "data")[0].size
        zeros = jax.lax.pcast(jnp.zeros(size), "data", to="varying")
        pairs = (
            compressed_all_reduce(x, None, None, "data"),
            compressed_all_reduce(x, jnp.zeros_like(x), zeros, "data"),
        )
        return [(a, b[None], c) for a, b, c in pairs]

    specs = (P(), P("data"), P("data"))
    mapped = jax.shard_map(body, mesh=mesh_of(3), in_specs=P("data"), out_specs=[specs, specs])
    none, zero = jax.jit(mapped)(heavy_tailed(3, (3, 3, 7)))
    jax.tree.map(np.testing.assert_array_equal, none, zero)


@pytest.mark.parametrize(
    "shape, whole", [((), (3,)), ((5,), (15,)), ((0,), (0,)), ((2, 7), (6, 7))]
)
def test_all_gather_concatenates_along_axis_0(shape, whole):
    chunks = heavy_tailed(11, (3, *shape))

    def body(x):
        out, error = compressed_all_gather(x[0], None, "data", bits=8)
        return out, error[None]

    mapped = jax.shard_map(body, mesh=mesh_of(3), in_specs=P("data"), out_specs=(P(), P("data")))
    out, error = jax.jit(mapped)(chunks)
    assert out.shape == whole
    assert out.dtype == error.dtype == jnp.float32
    sent = np.asarray(chunks) - np.asarray(error)
    np.testing.assert_allclose(out, sent.reshape(whole), atol=1e-6)
    assert_replicas_equal(out)


# ---------------------------------------------------------------- the wire


@pytest.mark.parametrize("bits", [1, 4])
def test_one_packed_buffer_per_leg(bits):
    parts, size = 8, 8 * 4096
    body = functools.partial(compressed_all_reduce, axis_name="data", bits=bits)
    mapped = jax.shard_map(
        lambda x, e, s: [y[None] for y in body(x[0], e[0], s[0])],
        mesh=mesh_of(parts),
        in_specs=P("data"),
        out_specs=P("data"),
    )
    whole = jax.ShapeDtypeStruct((parts, size), jnp.float32)
    chunk = jax.ShapeDtypeStruct((parts, size // parts), jnp.float32)
    compiled = jax.jit(mapped).lower(whole, whole, chunk).compile()
    found = wire_report(compiled, mesh_of(parts)).collectives
    # bits / 8 bytes per value, and a float32 scale per 1024.
    packed = size * bits // 8 + size // 1024 * 4
    assert [(c.op, c.dtype, c.size) for c in found] == [
        ("all-to-all", "u8", packed),
        ("all-gather", "u8", packed),
    ]


# ---------------------------------------------------------------- strict modes and bad input


@pytest.mark.usefixtures("quick")
def test_strict_promotion():
    xs = {"x": heavy_tailed(0, (2, 2, 3, 7), jnp.bfloat16)}
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        for bits in (1, 3):
            run(mesh_of(2), "data", xs, bits=bits)


def call(f, *args, **kwargs):
    """Traces ``f(x, *args, "data")`` on 2 devices for x of shape (6,)."""

    def body(x):
        f(x, *args, "data", **kwargs)
        return x

    mapped = jax.shard_map(body, mesh=mesh_of(2), in_specs=P(), out_specs=P())
    return lambda x: jax.eval_shape(mapped, x)


X = jnp.ones(6)
BOTH = pytest.mark.parametrize("f", [compressed_reduce_scatter, compressed_all_gather])


@BOTH
@pytest.mark.parametrize("error", [jnp.zeros(5), jnp.zeros((6, 1)), jnp.zeros(6, jnp.bfloat16)])
def test_error_of_another_shape_or_dtype(f, error):
    message = rf"error must be float32 of shape \(6,\), got {error.dtype} .*previous call returned"
    with pytest.raises(ValueError, match=message):
        call(f, error)(X)


@pytest.mark.parametrize("error", [jnp.zeros(6), jnp.zeros(8, jnp.bfloat16)])
def test_server_error_of_another_shape_or_dtype(error):
    message = rf"server_error must be float32 of shape \(8,\) .*got {error.dtype} .*previous call"
    with pytest.raises(ValueError, match=message):
        call(compressed_all_reduce, None, error)(X)


@BOTH
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.bool_, jnp.complex64])
def test_input_that_is_not_floating_point(f, dtype):
    with pytest.raises(ValueError, match=rf"floating dtype, got {jnp.dtype(dtype)}; cast it"):
        call(f, None)(X.astype(dtype))


@BOTH
@pytest.mark.parametrize("bits", [0, 9, True, 1.0, "1"])
def test_bits_out_of_range(f, bits):
    with pytest.raises(ValueError, match=rf"bits must be an integer from 1 to 8, got {bits!r}"):
        call(f, None, bits=bits)(X)
    with pytest.raises(ValueError, match=rf"bits must be an integer from 1 to 8, got {bits!r}"):
        call(compressed_all_reduce, None, None, bits=bits)(X)


@BOTH
def test_unbound_axis(f):
    with pytest.raises(ValueError, match=r"'data' is not bound here.*jax.shard_map"):
        f(X, None, "data")
    with pytest.raises(ValueError, match=r"'model' is not bound here.*jax.shard_map"):
        jax.shard_map(lambda x: f(x, None, "model"), mesh=mesh_of(2), in_specs=P(), out_specs=P())(
            X
        )
