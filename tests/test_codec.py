"""The codec against NumPy: a decoder of its own and the documented bounds."""

import functools
import math

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from values import EPS, assert_same, f32, f64, few, random

from onebit_zero_jax import codec, weighting
from onebit_zero_jax.codec import Packed
from onebit_zero_jax.weighting import Factors

pytestmark = pytest.mark.usefixtures("strict_types")

SHAPES = [(), (0,), (3, 0), (5,), (7, 11), (1024,), (1025,), (3, 1000), (2, 4, 130)]
# Two widths: LLVM's vector loop and its remainder.
BLOCKS = [(2, 8, 128), (3, 8, 5)]
BITS = [1, 3, 8]

# Jitted as in use: only then could a compiler contract or reassociate anything. Compiling
# is what takes the time here, so that tests share BLOCKS and always pass an error.
_encode = jax.jit(codec.encode, static_argnames="bits")
decode = jax.jit(codec.decode)
decode_mean = jax.jit(codec.decode_mean)


def encode(x, error=None, *, bits=1, weight=None):
    return _encode(
        x, np.zeros(x.shape, np.float32) if error is None else error, bits=bits, weight=weight
    )


@functools.partial(jax.jit, static_argnames="parts")
def blocks_and_back(x, parts):
    blocks = codec.to_blocks(x, parts)
    return blocks, codec.from_blocks(blocks, x.shape), codec.padding_mask(x.size, parts)


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


def test_outliers_count_up_to_the_limit():
    """In the scale alone: what they lose stays in the error."""
    x = jnp.ones((1, 8, 128), jnp.float32).at[0, 0, 0].set(1e6)
    code, error = codec.encode(x, weight=jnp.ones_like(x), limit=100.0)
    assert float(code.scale[0, 0, 0]) == pytest.approx((1023 + 100) / 1024)
    np.testing.assert_array_equal(codec.decode(code) + error, x)
