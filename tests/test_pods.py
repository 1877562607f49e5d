"""Compiling ahead of time: what can be told without the compilers for TPU and GPU."""

import importlib.util
import math

import jax
import jax.numpy as jnp
import pytest

from onebit_zero_jax import cli, pods


@pytest.mark.parametrize("name, size", [("100m", 100e6), ("1b", 1e9), ("7b", 7e9)])
def test_models_have_the_size_of_their_name(name, size):
    params, loss = pods.model(name)
    count = sum(math.prod(x.shape) for x in jax.tree.leaves(params))
    assert count == pytest.approx(size, rel=0.1)
    tokens = jax.ShapeDtypeStruct((2, 17), jnp.int32)
    gradient = jax.eval_shape(jax.grad(loss), params, tokens)
    assert jax.tree.map(lambda x: x.shape, gradient) == jax.tree.map(lambda x: x.shape, params)


def test_the_model_starts_at_chance():
    shapes, loss = pods.model("10m")
    params = jax.tree.map(lambda x: jnp.zeros(x.shape), shapes)
    params["embedding"] += 0.01
    tokens = jnp.arange(5)[None]
    # Equal embeddings: every token is as likely.
    assert float(loss(params, tokens)) == pytest.approx(math.log(32_000), rel=1e-4)


@pytest.mark.parametrize(
    "line, match",
    [
        ("--target tpu:v5e", "target must be like tpu:v5e:16x16 or gpu:h100:HOSTSxGPUS"),
        ("--target cpu:8 --model 10m", "got 'cpu:8'"),
        ("--target tpu:v5e:2x4 --slices 0", "slices must be an integer of at least 1, got 0"),
        ("--target tpu:v5e:2x4 --model 3b", "model must be one of 10m, 100m, 1b, 7b, got '3b'"),
    ],
)
def test_console_errors(capsys, line, match):
    with pytest.raises(SystemExit) as stop:
        cli.main(["compile", *line.split()])
    assert stop.value.code == 2
    assert match in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is not None, reason="libtpu is installed")
def test_without_the_compiler(capsys):
    with pytest.raises(SystemExit):
        cli.main(["compile", "--target", "tpu:v5e:2x4", "--model", "10m"])
    assert "it needs libtpu (pip install libtpu), no chip" in capsys.readouterr().err
