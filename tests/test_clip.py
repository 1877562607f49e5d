"""The norm of the mean gradient from a sketch, and clipping by it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_algorithm import Run, bits_equal, normal, same, small_params
from test_reference import on_devices

from onebit_zero_jax import ZeroConfig, clip_by_global_norm, global_norm, onebit_adam
from onebit_zero_jax import clip as clipping


def mean_norm(grads):
    return np.sqrt(
        sum(np.sum(np.mean(g, 0, np.float64) ** 2) for g in jax.device_get(grads).values())
    )


def test_global_norm_is_that_of_the_mean_gradient():
    shapes = {"a": (130, 64), "b": (77,), "c": (3, 31, 33), "e": (0, 3)}
    norm = on_devices(lambda g: global_norm(g, "data"), 8)
    ratios, grads = [], {}
    for seed in range(12):
        rng = np.random.default_rng(seed)
        grads = {k: rng.normal(size=(8, *s)) for k, s in shapes.items()}
        if seed % 4 == 1:
            grads["a"][:, seed] *= 1000  # a row
        elif seed % 4 == 2:
            grads["a"][:, :, seed] *= 1000  # a column
        elif seed % 4 == 3:
            grads = {k: 0.1 * g + np.mean(g, 0) for k, g in grads.items()}
        grads = {k: g.astype(np.float32) for k, g in grads.items()}
        ratios.append(same(norm(grads)) / mean_norm(grads))
    assert np.all(np.abs(np.array(ratios) - 1) < 0.08), ratios
    assert np.std(ratios) > 0  # an estimate, on more than one device
    one = {k: g[:1] for k, g in grads.items()}
    exact = on_devices(lambda g: global_norm(g, "data"), 1)(one)
    np.testing.assert_allclose(exact, mean_norm(one), rtol=1e-6)
    # Small leaves share no buckets: many scalars would add up as one.
    few = {k: rng.normal(size=(8, *s)).astype("f4") for k, s in enumerate([(), (), (9,), (20, 30)])}
    exact = same(on_devices(lambda g: global_norm(g, "data"), 8)(few))
    np.testing.assert_allclose(exact, mean_norm(few), rtol=1e-6)
    for parts in (1, 8):
        assert same(on_devices(lambda _: global_norm({}, "data"), parts)(np.zeros(parts))) == 0


@pytest.mark.parametrize(
    "shape, rows",
    [((6, 512, 40), 768), ((4096, 72), 1024), ((2040, 33), 680), ((3, 2, 8, 0), None)],
)
def test_global_norm_where_rows_are_added_up(shape, rows):
    """Wherever the norm sits: everywhere, in a row, in a column."""
    assert clipping._folded_rows(shape) == rows
    norm = on_devices(lambda g: global_norm(g, "data"), 2)
    for seed, place in enumerate(((), (..., 3, slice(None)), (..., 5)) * 4):
        grads = np.random.default_rng(seed).normal(size=(2, *shape)).astype(np.float32)
        if grads.size:
            grads[(slice(None), *place)] *= 1000
        want = mean_norm({"a": grads})
        assert abs(same(norm({"a": grads})) - want) <= 0.08 * want, place


def test_clip_by_global_norm():
    rng = np.random.default_rng(0)
    grads = normal(rng, small_params(), 8)
    grads["h"] = grads["w"].astype(jnp.bfloat16)
    clip = clip_by_global_norm(1.5, zero=ZeroConfig())
    call = on_devices(lambda g: clip.update(g, clip.init(g))[0], 8)
    norm = same(on_devices(lambda g: global_norm(g, "data"), 8)(grads))
    assert norm > 1.5
    clipped = jax.device_get(call(grads))
    for k in grads:  # one factor for all devices
        want = (grads[k].astype(np.float32) * (np.float32(1.5) / norm)).astype(grads[k].dtype)
        np.testing.assert_array_equal(clipped[k], want)
    assert abs(mean_norm(clipped) / 1.5 - 1) < 0.08
    small = jax.tree.map(lambda g: (g / (2 * norm)).astype(g.dtype), grads)
    bits_equal(call(small), small)
    huge = jax.tree.map(lambda g: (g * 1e25).astype(g.dtype), grads)
    assert abs(mean_norm(call(huge)) / 1.5 - 1) < 0.08
    for value in (np.nan, np.inf):
        bad = {**small, "w": small["w"].copy()}
        bad["w"][3, 1, 1] = value
        bits_equal(call(bad), bad)


def test_clip_in_a_chain():
    params = small_params()
    adam = onebit_adam(1e-2, zero=ZeroConfig(), warmup_steps=2)
    chained = optax.chain(clip_by_global_norm(1e9, zero=ZeroConfig()), adam)
    plain, clipped = Run(adam, params, 4), Run(chained, params, 4)
    rng = np.random.default_rng(0)
    for phase in ("dense", "dense", "compressed"):
        grads = normal(rng, params, 4)
        bits_equal(plain.step(grads, phase), clipped.step(grads, phase))
