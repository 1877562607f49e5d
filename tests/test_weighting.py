"""Weights from factored variances, against NumPy."""

import math

import jax
import numpy as np
import pytest
from values import EPS, f32, f64, random

from onebit_zero_jax import codec, weighting

pytestmark = pytest.mark.usefixtures("strict_types")


@jax.jit
def weight_of(v):
    return weighting.weight_of(weighting.weight_factors(*weighting.mean_factors(v), v.shape))


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
