"""Values to try numerical code on, and what to compare them with."""

import hypothesis
import numpy as np

EPS = 2.0**-24


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


def assert_same(got, want):
    """Equal to the bit, but for the sign of zero."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)
