"""The codec against NumPy: a decoder of its own and the documented bounds."""

import functools
import math

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from onebit_zero_jax import codec, storage, weighting
from onebit_zero_jax.codec import Packed
from onebit_zero_jax.weighting import Factors

EPS = 2.0**-24
SHAPES = [(), (0,), (3, 0), (5,), (7, 11), (1024,), (1025,), (3, 1000), (2, 4, 130)]
# Two widths: LLVM's vector loop and its remainder.
BLOCKS = [(2, 8, 128), (3, 8, 5)]
BITS = [1, 3, 8]

# Jitted as in use: only then could a compiler contract or reassociate anything. Compiling
# is what takes the time here, so that tests share BLOCKS and always pass an error.
_encode = jax.jit(codec.encode, static_argnames="bits")
decode = jax.jit(codec.decode)
decode_mean = jax.jit(codec.decode_mean)
store = jax.jit(storage.store, static_argnames="dtype")
load = jax.jit(storage.load)
encode_log = jax.jit(storage.encode_log)
decode_log = jax.jit(storage.decode_log)


def encode(x, error=None, *, bits=1, weight=None):
    return _encode(
        x, np.zeros(x.shape, np.float32) if error is None else error, bits=bits, weight=weight
    )


@jax.jit
def weight_of(v):
    return weighting.weight_of(weighting.weight_factors(*weighting.mean_factors(v), v.shape))


@functools.partial(jax.jit, static_argnames="parts")
def blocks_and_back(x, parts):
    blocks = codec.to_blocks(x, parts)
    return blocks, codec.from_blocks(blocks, x.shape), codec.padding_mask(x.size, parts)


@pytest.fixture(autouse=True)
def _strict():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def few(examples):
    return hypothesis.settings(
        max_examples=examples, deadline=None, derandomize=True, database=None
    )


def f32(x):
    return np.asarray(x, np.float32)


def f64(x):
    return np.asarray(x, np.float64)


def random(seed, shape, spread=1.0):
    """Heavy-tailed float32 values of very different blocks, some of them 0."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp(spread * rng.standard_normal(shape))
    x *= np.exp(5 * rng.standard_normal((*shape[:-2], 1, 1))) * (rng.random(shape) > 0.05)
    return x.astype(np.float32)


def random_weight(seed, shape):
    """Float32 weights over many octaves, a fifth of them 0."""
    rng = np.random.default_rng(seed + 1)
    w = np.exp(3 * rng.standard_normal(shape)) * (rng.random(shape) > 0.2)
    return w.astype(np.float32)


def unpack(planes):
    """Codes as documented: bit j of row k is bit k of byte plane j."""
    code = np.zeros((*planes.shape[:-2], 8, planes.shape[-1]), np.int64)
    for j in range(planes.shape[-2]):
        for k in range(8):
            code[..., k, :] += ((planes[..., j, :].astype(np.int64) >> k) & 1) << j
    return code


def over(x, weight):
    """x / weight in float32, by way of 1 / weight, and 0 where the weight is 0."""
    if weight is None:
        return x
    one = np.float32(1)
    return x * np.where(weight > 0, one / np.where(weight > 0, weight, one), np.float32(0))


def np_decode(code, weight=None):
    """Every operation in float32, none of them contracted."""
    planes, scale = np.asarray(code.planes), np.asarray(code.scale)
    top = 2 ** planes.shape[-2] - 1
    value = (2 * unpack(planes) - top).astype(np.float32) * (scale * np.float32(1 / top))
    return over(value, weight)


def assert_same(got, want):
    """Equal to the bit, but for the sign of zero."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)


# ---------------------------------------------------------------- blocks


@few(300)
@hypothesis.given(size=st.integers(0, 3_000_000), parts=st.integers(1, 5000))
def test_blocks_are_wide_and_waste_little(size, parts):
    blocks, lanes = codec.block_shape(size, parts)
    padding = blocks * 8 * lanes * parts - size
    assert padding >= 0
    assert 0 < lanes <= 128
    assert padding * 16 <= size or padding < 8 * blocks * parts
    # As few blocks as hold the values, and whole ones wherever they may be.
    assert blocks * 1024 < math.ceil(size / parts) + 1024
    assert lanes == 128 or (blocks * 1024 * parts - size) * 16 > size


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_hold_the_values_in_order(shape, dtype):
    size = math.prod(shape)
    x = (np.arange(size) % 251 + 1).reshape(shape).astype(dtype)
    for parts in (1, 3):
        blocks, back, mask = blocks_and_back(x, parts)
        count, lanes = codec.block_shape(size, parts)
        assert blocks.shape == (parts * count, 8, lanes)
        flat = np.asarray(blocks).reshape(-1)
        assert_same(flat[:size], x.reshape(-1))
        assert not flat[size:].any()
        assert_same(back, x)
        assert (mask is None) == (flat.size == size)
        if mask is not None:
            assert_same(mask, (flat != 0).astype(np.float32).reshape(blocks.shape))


@pytest.mark.parametrize("parts", [1, 3])
def test_blocks_are_tiles_of_a_matrix_that_divides_into_them(parts):
    x = jnp.arange(3 * 16 * 256, dtype=jnp.float32).reshape(3, 16, 256)
    blocks = codec.to_blocks(x, parts, tiles=True)
    tiles = [m[r : r + 8, c : c + 128] for m in x for r in (0, 8) for c in (0, 128)]
    assert_same(blocks, jnp.stack(tiles))
    assert_same(codec.from_blocks(blocks, x.shape, tiles=True), x)


def test_bits_of_rows():
    bits = np.random.default_rng(0).random((3, 8, 5)) < 0.5
    packed = jax.jit(codec.pack_bits)(bits)
    assert_same(packed, np.packbits(bits, axis=-2, bitorder="little")[:, 0])
    assert_same(jax.jit(codec.unpack_bits)(packed), bits)


# ---------------------------------------------------------------- codes


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", BLOCKS)
@pytest.mark.parametrize("bits", BITS)
def test_error_is_exactly_what_was_lost(bits, shape, weighted):
    @few(8)
    @hypothesis.given(seed=st.integers(0, 2**32), spread=st.floats(0, 3))
    def check(seed, spread):
        x, e = random(seed, shape, spread), random(seed + 1, shape, spread)
        w = random_weight(seed, shape) if weighted else None
        code, error = encode(x, e, bits=bits, weight=w)
        assert code.planes.shape == (shape[0], bits, shape[2])
        assert code.planes.dtype == jnp.uint8
        assert code.scale.shape == (shape[0], 1, 1)
        q = np_decode(code, w)
        assert_same(decode(code, w), q)
        lost = (x + e) - q
        assert_same(error, lost if w is None else np.where(w > 0, lost, np.float32(0)))

    check()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("bits", BITS)
def test_codes_are_the_nearest(bits, weighted):
    shape = BLOCKS[0]
    x = random(bits, shape)
    w = random_weight(bits, shape) if weighted else np.ones(shape, np.float32)
    code, _ = encode(x, bits=bits, weight=w if weighted else None)
    u, scale, top = f64(x) * w, f64(code.scale), 2**bits - 1
    alive = w > 0
    if bits == 1:
        want = np.abs(u).sum((-2, -1), keepdims=True) / alive.sum((-2, -1), keepdims=True)
        np.testing.assert_allclose(scale, want, rtol=64 * EPS)
        np.testing.assert_array_equal(unpack(np.asarray(code.planes))[alive], (x >= 0)[alive])
        return
    np.testing.assert_allclose(scale, np.abs(u).max((-2, -1), keepdims=True), rtol=2 * EPS)
    q = (2 * unpack(np.asarray(code.planes)) / top - 1) * scale
    bound = scale / top * (1 + 8 * top * EPS)
    assert (np.abs(u - q) <= bound)[alive].all()


@pytest.mark.parametrize("bits", BITS[1:])
def test_levels_encode_to_themselves(bits):
    levels = np.arange(2048) % 2**bits
    x = f32((2 * levels / (2**bits - 1) - 1) * 3).reshape(BLOCKS[0])
    code, error = encode(x, bits=bits)
    np.testing.assert_array_equal(unpack(np.asarray(code.planes)).reshape(-1), levels)
    assert np.abs(error).max() <= 4 * EPS * 3
    again, _ = encode(decode(code), bits=bits)
    assert_same(again.planes, code.planes)


def test_one_bit_contracts_every_block_as_much_as_one_scale_can():
    for seed in range(20):
        c = random(seed, BLOCKS[0], spread=2.0)
        _, error = encode(c)
        size = np.abs(f64(c))
        # The best scale for these signs is the least-squares one; no other may do better.
        best = np.square(size - size.mean((-2, -1), keepdims=True)).sum((-2, -1))
        mine = np.square(f64(error)).sum((-2, -1))
        assert (mine < np.square(size).sum((-2, -1))).all()
        np.testing.assert_allclose(mine, best, rtol=1e-5)


@pytest.mark.parametrize("bits", [1, 3])
def test_feedback_telescopes(bits):
    """The decoded of all steps and the last error add up to all inputs, to rounding."""
    shape, steps = BLOCKS[1], 60
    w = np.where(random_weight(0, shape) > 0, 2.0, 0.0).astype(np.float32)
    error, sent, total, rounding = np.zeros(shape, np.float32), 0.0, 0.0, 0.0
    for t in range(steps):
        x = random(t, shape)
        code, error = encode(x, error, bits=bits, weight=w)
        q = f64(decode(code, w))
        sent, total = sent + q, total + np.where(w > 0, f64(x), 0)
        # x + e and c - q round once each, relative to themselves.
        rounding = rounding + EPS * (np.abs(q + f64(error)) + np.abs(error))
    assert np.abs(error).max() > 0
    assert (np.abs(sent + f64(error) - total) <= 1.01 * rounding).all()


@pytest.mark.parametrize("bits", BITS)
def test_zeros(bits):
    x = np.zeros(BLOCKS[0], np.float32)
    x[1, 3, 7], x[1, 0, 0] = -8.0, -0.0
    code, error = encode(x, bits=bits)
    signs = unpack(np.asarray(code.planes)) >> (bits - 1)
    assert signs[1, 3, 7] == 0
    assert signs.sum() == signs.size - 1, "sign(0) is +1"
    assert not np.asarray(decode(code))[0].any()
    assert not np.asarray(error)[0].any()
    assert not np.asarray(code.scale)[0].any()
    assert np.asarray(decode(code))[1].all()


@pytest.mark.parametrize("bits", BITS)
def test_weight_zero_takes_no_part(bits):
    shape = BLOCKS[0]
    x, w = random(3, shape), random_weight(3, shape)
    w[1] = 0
    huge = np.where(w > 0, x, np.float32(3e38)).astype(np.float32)
    code, error = encode(huge, bits=bits, weight=w)
    alone, _ = encode(np.where(w > 0, x, np.float32(0)), bits=bits, weight=w)
    assert_same(code.scale, alone.scale)
    assert not np.asarray(code.scale)[1].any()
    for out in (error, decode(code, w)):
        assert np.isfinite(out).all()
        assert not np.asarray(out)[w == 0].any()


@functools.partial(jax.jit, static_argnames="bits")
def through_blocks(x, bits):
    mask = codec.padding_mask(x.size)
    code, error = codec.encode(codec.to_blocks(x), bits=bits, weight=mask)
    return mask, code, error, codec.decode(code, mask)


@pytest.mark.parametrize("bits", [1, 3])
@pytest.mark.parametrize(
    "shape, dtype", [((), "float32"), ((0,), "float32"), ((5,), "bfloat16"), ((3, 1000), "float32")]
)
def test_arrays_of_any_shape(shape, dtype, bits):
    """Padding changes neither scale nor error; bfloat16 is computed in float32."""
    size = math.prod(shape)
    x = random(1, (1, size)).reshape(shape).astype(jnp.dtype(dtype))
    mask, code, error, decoded = through_blocks(x, bits)
    assert error.dtype == decoded.dtype == jnp.float32
    assert_same(decoded, np_decode(code, None if mask is None else np.asarray(mask)))
    flat = x.astype(np.float32).reshape(-1)
    error, decoded = np.asarray(error), np.asarray(decoded).reshape(-1)
    width = max(1, math.prod(error.shape[1:]))
    error = error.reshape(-1)
    assert_same(error[:size], flat - decoded[:size])
    assert not error[size:].any()
    assert not decoded[size:].any()
    for b, scale in enumerate(np.asarray(code.scale).reshape(-1)):
        values = np.abs(f64(flat[b * width : (b + 1) * width]))
        want = values.mean() if bits == 1 else values.max()
        np.testing.assert_allclose(scale, want, rtol=64 * EPS)


@pytest.mark.parametrize("bits", [1, 3])
def test_blocks_are_independent(bits):
    shape = BLOCKS[1]
    x, w = random(5, shape), random_weight(5, shape)
    code, error = encode(x, bits=bits, weight=w)
    factor = f32([1, 2.0**20, 1]).reshape(3, 1, 1)
    other, other_error = encode(x * factor, bits=bits, weight=w)
    assert_same(other.planes, code.planes)
    assert_same(other.scale, code.scale * factor)
    assert_same(other_error, error * factor)
    # Leading axes are just more blocks.
    stacked, stacked_error = encode(x[None], bits=bits, weight=w[None])
    assert_same(stacked.planes, code.planes[None])
    assert_same(stacked_error, error[None])
    assert_same(decode(stacked, w[None]), decode(code, w)[None])


@pytest.mark.parametrize("bits", [0, 9])
def test_bits_out_of_range(bits):
    with pytest.raises(ValueError, match=f"got {bits}"):
        codec.encode(jnp.zeros((1, 8, 1)), bits=bits)


@pytest.mark.parametrize(
    "senders, bits, weighted",
    [(p, 1, p in (3, 9)) for p in (1, 2, 3, 7, 8, 9, 17, 64)] + [(2, 4, True), (9, 3, False)],
)
def test_mean_of_senders(senders, bits, weighted):
    shape, rng = BLOCKS[1], np.random.default_rng(senders)
    planes = rng.integers(0, 256, (senders, shape[0], bits, shape[2])).astype(np.uint8)
    scale = f32(np.exp(rng.standard_normal((senders, shape[0], 1, 1))))
    w = random_weight(0, shape) if weighted else None
    code = Packed(jnp.asarray(planes), jnp.asarray(scale))
    each, got = f64(np_decode(code, w)), decode_mean(code, w)
    assert got.dtype == jnp.float32
    allowed = (senders + 3) * EPS * np.abs(each).mean(0)
    assert (np.abs(got - each.mean(0)) <= allowed).all()


def _programs():
    n = 2**20
    x = jax.ShapeDtypeStruct((n // 1024, 8, 128), jnp.float32)
    row = jax.ShapeDtypeStruct((1024, 1), jnp.float32)
    col = jax.ShapeDtypeStruct((1, 1024), jnp.float32)

    def plain(bits, x, e):
        return codec.encode(x, e, bits=bits)

    def weighted(bits, x, e, w):
        return codec.encode(x, e, bits=bits, weight=w)

    def factored(bits, x, e, row, col):
        return weighted(bits, x, e, codec.to_blocks(weighting.weight_of(Factors(row, col))))

    for bits in (1, 4):
        for call, args in ((plain, (x, x)), (weighted, (x, x, x)), (factored, (x, x, row, col))):
            yield f"encode {bits} {call.__name__}", functools.partial(call, bits), args
    for senders in (8, 17):
        planes = jax.ShapeDtypeStruct((senders, n // 1024, 1, 128), jnp.uint8)
        scale = jax.ShapeDtypeStruct((senders, n // 1024, 1, 1), jnp.float32)
        yield f"mean of {senders}", lambda p, s: codec.decode_mean(Packed(p, s)), (planes, scale)


@pytest.mark.parametrize(
    "program, args", [pytest.param(f, args, id=name) for name, f, args in _programs()]
)
def test_no_temporaries_of_the_size_of_the_values(program, args):
    """A byte for 8 values is less than any array of theirs."""
    if jax.default_backend() != "cpu":
        pytest.skip("other compilers, other buffers")
    memory = jax.jit(program).lower(*args).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 2**20 / 8


# ---------------------------------------------------------------- weights


@pytest.mark.parametrize(
    "shape, axes",
    [
        ((512, 2048), (0, 1)),
        ((2048, 512), (0, 1)),
        ((24, 512, 2048), (1, 2)),
        ((3, 3, 64, 128), (2, 3)),
        ((512, 8, 64), (0, 2)),
        ((8, 64, 512), (1, 2)),
        ((64, 64, 64), (1, 2)),
        ((64, 3, 64), (0, 2)),
        ((1, 1), (0, 1)),
    ],
)
def test_rows_and_columns_are_the_two_largest_axes(shape, axes):
    assert weighting.factored_axes(shape) == axes


def test_vectors_have_no_factors():
    with pytest.raises(ValueError, match=r"\(5,\)"):
        weighting.factored_axes((5,))


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (3, 5, 7), (7, 2, 9)])
def test_weight_follows_the_factored_variance(shape):
    v = np.square(random(0, shape).astype(np.float64)).astype(np.float32) + np.float32(1e-3)
    row, col = weighting.factored_axes(shape)
    r, c = f64(v).mean(col, keepdims=True), f64(v).mean(row, keepdims=True)
    np.testing.assert_allclose(
        weight_of(v), (r * c / r.mean(row, keepdims=True)) ** -0.5, rtol=64 * EPS
    )


def test_rank_one_variance_gives_its_inverse_root():
    v = f32(np.outer([1.0, 4.0, 9.0], [2.0, 3.0, 5.0, 7.0]))
    np.testing.assert_allclose(weight_of(v), v**-0.5, rtol=16 * EPS)


def test_unseen_rows_and_columns_have_weight_zero():
    v = np.ones((4, 5), np.float32)
    v[1], v[:, 3] = 0, 0
    np.testing.assert_array_equal(np.asarray(weight_of(v)) > 0, v > 0)
    assert not np.asarray(weight_of(0 * v)).any()


@pytest.mark.parametrize("level", [1e37, 1e36, 1.0, 1e-36, 2e-38, 1e-44])
def test_weight_of_extreme_variances(level):
    """Gradients of 1e18 and 1e-18, and row means whose sum overflows, not their mean."""
    row, col = np.full((64, 1), level, np.float32), np.full((1, 2), level, np.float32)
    factors = jax.jit(weighting.weight_factors, static_argnums=2)(row, col, (64, 2))
    want = min(level**-0.5, 1e18) if level > 1.2e-38 else 0.0
    np.testing.assert_allclose(weighting.weight_of(factors), want, rtol=1e-5)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_nonfinite_variance_kills_its_row_and_column_alone(bad):
    v = np.full((4, 5), 4.0, np.float32)
    v[1, 3] = bad
    weight = np.asarray(weight_of(v))
    assert np.isfinite(weight).all()
    dead = np.zeros(v.shape, bool)
    dead[1], dead[:, 3] = True, True
    assert not weight[dead].any()
    # mean R counts the bad row as 0.
    np.testing.assert_allclose(weight[~dead], (4 * 4 / 3) ** -0.5, rtol=1e-6)


def test_weight_spans_the_range_without_overflow():
    v = f32([[1e36, 0.0, 1e-2], [1e-36, 1e-36, 1e-36], [1e-30, 0.0, 1e30]])
    weight = np.asarray(weight_of(v))
    assert np.isfinite(weight).all()
    assert weight.max() <= 1e18
    inverse = np.asarray(jax.jit(codec.inverse)(weight))
    assert np.isfinite(inverse).all()
    np.testing.assert_array_equal(inverse > 0, weight > 0)


def test_inverse_is_finite_and_zero_at_zero():
    weight = f32([0.0, 1e-40, 1.2e-38, 0.5, 1e37])
    got = jax.jit(codec.inverse)(weight)
    np.testing.assert_allclose(got, [0, 0, 1 / 1.2e-38, 2, 1e-37], rtol=1e-5)


# ---------------------------------------------------------------- storage


def test_float32_is_stored_as_it_is():
    x = random(0, (3, 8, 5))
    assert_same(load(store(x, "float32")), x)


@few(10)
@hypothesis.given(seed=st.integers(0, 2**32))
def test_bfloat16_loses_at_most_half_a_unit_of_8_bits(seed):
    x = random(seed, (3, 8, 128), spread=3.0)
    got = f64(load(store(x, "bfloat16")))
    assert (np.abs(got - x) <= 2.0**-8 * np.abs(x)).all()


@few(10)
@hypothesis.given(seed=st.integers(0, 2**32))
def test_int8_loses_at_most_half_a_step_of_two_rows(seed):
    x = random(seed, (3, 8, 128), spread=2.0)
    x[1, 2:4] = 0
    x[2, 4:6] *= 1e-30
    stored = store(x, "int8")
    assert isinstance(stored, storage.Int8)
    assert stored.values.dtype == jnp.int8
    assert stored.scale.shape == (3, 4, 1)
    got = load(stored)
    assert got.dtype == jnp.float32
    lost = np.abs(f64(got) - x).reshape(3, 4, -1)
    half = np.abs(f64(x)).reshape(3, 4, -1).max(-1, keepdims=True) / 254
    assert (lost <= half * (1 + 512 * EPS)).all()


@few(10)
@hypothesis.given(seed=st.integers(0, 2**32), spread=st.floats(0, 12))
def test_log_code_is_within_an_eighth_of_an_octave(seed, spread):
    x = np.abs(random(seed, (3, 8, 128), spread))
    x[1] = 0
    code, top = encode_log(x)
    assert code.dtype == jnp.uint8
    got = f64(decode_log(code, top))
    assert_same(top, x.max((-2, -1), keepdims=True))
    np.testing.assert_array_equal(got > 0, x > 0)
    reach = (x > 0) & (x >= 2.0**-63 * f64(top))
    ratio = got[reach] / x[reach]
    slack = 1 + 1e-5
    assert ratio.max() <= 2**0.125 * slack
    assert ratio.min() >= 2**-0.125 / slack
    assert (got == top)[x == np.asarray(top)].all()


def test_log_code_ends_at_its_lowest_level():
    x = np.zeros((1, 8, 1), np.float32)
    x[0, :3, 0] = 1.0, 2.0**-63.5, 1e-30
    got = np.asarray(decode_log(*encode_log(x)))[0, :4, 0]
    np.testing.assert_allclose(got, [1.0, 2.0**-63.5, 2.0**-63.5, 0.0], rtol=1e-5)


def test_outliers_count_up_to_the_limit():
    """In the scale alone: what they lose stays in the error."""
    x = jnp.ones((1, 8, 128), jnp.float32).at[0, 0, 0].set(1e6)
    code, error = codec.encode(x, weight=jnp.ones_like(x), limit=100.0)
    assert float(code.scale[0, 0, 0]) == pytest.approx((1023 + 100) / 1024)
    np.testing.assert_array_equal(codec.decode(code) + error, x)
