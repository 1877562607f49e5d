"""How errors and variances are stored, against the documented bounds."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from values import EPS, assert_same, f64, few, random

from onebit_zero_jax import storage

pytestmark = pytest.mark.usefixtures("strict_types")

store = jax.jit(storage.store, static_argnames="dtype")
load = jax.jit(storage.load)
encode_log = jax.jit(storage.encode_log)
decode_log = jax.jit(storage.decode_log)


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
