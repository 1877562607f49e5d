"""Bad input raises early, names the value and says what to do."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import onebit_zero_jax as ob

P = jax.P
ZERO = ob.ZeroConfig()


def mesh_of(parts=2, name="data"):
    return jax.make_mesh((parts,), (name,), devices=jax.devices()[:parts])


def params_of(dtype=np.float32):
    return {"w": np.ones((32, 32), dtype), "b": np.zeros(3, dtype)}


def adam(zero=ZERO, **kwargs):
    return ob.onebit_adam(1e-3, zero=zero, **kwargs)


def loss_fn(params, x):
    return jnp.mean(x @ params["w"]) + jnp.sum(params["b"]) * jnp.mean(x)


BATCH = np.ones((4, 32), np.float32)


def raises(*parts, error=ValueError):
    """The message holds all the parts, in order."""
    return pytest.raises(error, match="(?s)" + ".*".join(re.escape(p) for p in parts))


# ---------------------------------------------------------------- at the factories


@pytest.mark.parametrize(
    ("kwargs", "parts", "error"),
    [
        ({"stage": 4}, ("stage must be 0, 1 or 2", "4"), ValueError),
        ({"stage": True}, ("stage must be", "True"), ValueError),
        ({"stage": "2"}, ("stage must be", "'2'"), ValueError),
        ({"stage": 3}, ("stage=3", "use stage=2"), NotImplementedError),
        ({"axis_name": ("slow", "fast")}, ("two-speed", "one mesh axis"), NotImplementedError),
        ({"axis_name": ""}, ("axis_name must be the name", "''"), ValueError),
        ({"axis_name": 0}, ("axis_name must be the name", "0"), ValueError),
        ({"gather": "grads"}, ("'params' or 'momentum'", "'grads'"), ValueError),
        ({"gather_bits": 5}, ("(1, 2, 3, 4, 8, 'dense')", "'params'", "5"), ValueError),
        ({"gather_bits": True}, ("gather_bits", "True"), ValueError),
        ({"stage": 1, "gather_bits": 4}, ("(1, 2)", "'momentum'", "4"), ValueError),
        ({"shard_params_over": "data"}, ("'data'", "stage=3", "None"), ValueError),
        ({"error_dtype": "int4"}, ("error_dtype", "int8", "'int4'"), ValueError),
        ({"momentum_dtype": "int8"}, ("momentum_dtype", "bfloat16", "'int8'"), ValueError),
    ],
)
def test_config(kwargs, parts, error):
    with raises(*parts, error=error):
        ob.ZeroConfig(**kwargs)


@pytest.mark.parametrize(
    ("kwargs", "parts"),
    [
        *(({"warmup_steps": v}, ("warmup_steps", repr(v))) for v in (0, -1, 1.5, True, "10", None)),
        *(({"refresh": v}, ("refresh", repr(v))) for v in (0, -3, 2.5, False)),
        *(({"b1": v}, ("b1 must be", repr(v))) for v in (1, 1.0, -0.1, float("nan"), "0.9")),
        *(({"b2": v}, ("b2 must be", repr(v))) for v in (1.0, 2, float("inf"))),
        *(({"eps": v}, ("eps must be", repr(v))) for v in (-1e-8, float("nan"), None)),
        ({"zero": None}, ("ZeroConfig", "None")),
        ({"zero": "data"}, ("ZeroConfig", "'data'")),
    ],
)
def test_optimizer(kwargs, parts):
    with raises(*parts):
        ob.onebit_adam(1e-3, **{"zero": ZERO, **kwargs})


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), "fast", True])
def test_rates(value):
    with raises("learning_rate", repr(value)):
        ob.onebit_adamw(value, zero=ZERO)
    with raises("weight_decay", repr(value)):
        ob.onebit_adamw(1e-3, weight_decay=value, zero=ZERO)


def test_inner_is_no_transformation():
    with raises("inner must be", "0.1"):
        ob.zero_shard(0.1, zero=ZERO)


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), "1", True])
def test_max_norm(value):
    with raises("max_norm", repr(value)):
        ob.clip_by_global_norm(value, zero=ZERO)


@pytest.mark.parametrize("value", [0, -2, 1.5, True])
def test_accumulate(value):
    with raises("accumulate", repr(value)):
        ob.train_step(loss_fn, adam(), mesh_of(), ZERO, accumulate=value)


def test_loss_is_not_callable():
    with raises("loss_fn must be callable", "3"):
        ob.train_step(3, adam(), mesh_of(), ZERO)


# ---------------------------------------------------------------- at init


def test_mesh_without_the_axis():
    for call in (
        lambda m: ob.init(params_of(), adam(), m, ZERO),
        lambda m: ob.state_shardings(params_of(), adam(), m, ZERO),
        lambda m: ob.train_step(loss_fn, adam(), m, ZERO),
        lambda m: ob.eval_step(loss_fn, m, ZERO),
    ):
        with raises("('batch',)", "'data'", "axis_name="):
            call(mesh_of(name="batch"))


def test_mesh_with_another_axis():
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
    with raises("'model': 2", error=NotImplementedError):
        ob.init(params_of(), adam(), mesh, ZERO)


def test_empty_tree():
    for empty in ({}, [], None):
        with raises("empty tree"):
            ob.init(empty, adam(), mesh_of(), ZERO)


@pytest.mark.parametrize("dtype", [np.int32, np.bool_, np.complex64])
def test_leaf_that_is_not_floating(dtype):
    params = {**params_of(), "table": np.zeros((4, 4), dtype)}
    with raises("['table']", np.dtype(dtype).name, "model_state"):
        ob.init(params, adam(), mesh_of(), ZERO)


def test_zero_differs():
    other = ob.ZeroConfig(stage=1)
    with raises("zero differs", "stage=1", "stage=2", "same ZeroConfig"):
        ob.init(params_of(), adam(other), mesh_of(), ZERO)
    state = ob.init(params_of(), adam(), mesh_of(), ZERO)
    step = ob.train_step(loss_fn, adam(other), mesh_of(), ZERO)
    with raises("zero differs", "stage=1", "stage=2"):
        step(state, BATCH)


def test_no_zero_shard_in_tx():
    with raises("no zero_shard", "onebit_adamw"):
        ob.init(params_of(), optax.adam(1e-3), mesh_of(), ZERO)


def test_multi_steps():
    with raises("MultiSteps", "accumulate=k"):
        ob.init(params_of(), optax.MultiSteps(adam(), 2), mesh_of(), ZERO)


# ---------------------------------------------------------------- in the user's own shard_map


def in_shard_map(f, check_vma=True):
    specs = {"in_specs": P(), "out_specs": P()}
    mapped = jax.shard_map(f, mesh=mesh_of(), check_vma=check_vma, **specs)
    params = jax.tree.map(jnp.asarray, params_of())
    return jax.eval_shape(mapped, params)


def test_axis_not_bound():
    params = jax.tree.map(jnp.asarray, params_of())
    with raises("'data'", "not bound", "shard_map"):
        adam().init(params)
    with raises("'rows'", "not bound"):
        in_shard_map(lambda p: (adam(ob.ZeroConfig(axis_name="rows")).init(p), 0)[1])


def test_gradient_already_reduced():
    def f(params):
        tx = adam()
        tx.update(params, tx.init(params), params)
        return jnp.zeros(())

    with raises("already all-reduced", "pcast"):
        in_shard_map(f)


@pytest.mark.parametrize("params", [None, "missing"])
def test_params_missing(params):
    def f(p):
        tx = adam()
        tx.update(p, tx.init(p), *([None] if params is None else []))
        return jnp.zeros(())

    with raises("update(gradients, state, params)"):
        in_shard_map(f, check_vma=False)


def test_unknown_phase():
    def f(p):
        tx = adam()
        tx.update(p, tx.init(p), p, phase="warm")
        return jnp.zeros(())

    with raises("'dense', 'compressed' or None", "'warm'"):
        in_shard_map(f, check_vma=False)


@pytest.mark.parametrize("shape", [(32, 16), (16, 64), (31, 32)])
def test_shapes_that_changed(shape):
    def f(p):
        tx = adam()
        state = tx.init(p)
        changed = {**p, "w": jnp.ones(shape)}
        tx.update(changed, state, changed)
        return jnp.zeros(())

    with raises("['w']", str(shape), "init"):
        in_shard_map(f, check_vma=False)


@pytest.mark.parametrize(
    ("grads", "parts"),
    [
        (lambda p: {**p, "w": p["w"][:4]}, ("gradient of ['w']", "(32, 32)", "(4, 32)")),
        (lambda p: {**p, "b": jnp.ones(3, jnp.int32)}, ("gradient of ['b']", "int32")),
        (lambda p: {"w": p["w"]}, ("gradient tree", "structure")),
    ],
)
def test_gradients_that_do_not_fit(grads, parts):
    def f(p):
        tx = adam()
        tx.update(grads(p), tx.init(p), p)
        return jnp.zeros(())

    with raises(*parts):
        in_shard_map(f, check_vma=False)


# ---------------------------------------------------------------- at the first step


def first_step(loss=loss_fn, batch=BATCH, rng=None, **kwargs):
    mesh = mesh_of()
    state = ob.init(params_of(), adam(), mesh, ZERO)
    return ob.train_step(loss, adam(), mesh, ZERO, **kwargs)(state, batch, rng)


@pytest.mark.parametrize("reduce", [jax.lax.pmean, jax.lax.psum])
def test_loss_already_reduced(reduce):
    with raises("same loss on every device", "'data'", "train_step averages"):
        first_step(lambda p, x: reduce(loss_fn(p, x), "data"))


@pytest.mark.parametrize(
    ("loss", "kwargs", "parts"),
    [
        (lambda p, x: x @ p["w"], {}, ("scalar loss", "(2, 32)")),
        (lambda p, x: (loss_fn(p, x), 1), {}, ("scalar loss", "has_aux")),
        (loss_fn, {"has_aux": True}, ("loss, aux",)),
        (lambda p, x: jnp.int32(3), {}, ("floating-point", "int32")),
    ],
)
def test_loss_output(loss, kwargs, parts):
    with raises(*parts):
        first_step(loss, **kwargs)


@pytest.mark.parametrize(
    ("batch", "parts"),
    [
        (np.ones((3, 32), np.float32), ("(3, 32)", "multiple of 2")),
        (np.float32(1), ("()", "multiple of 2")),
        ({"x": BATCH, "n": np.ones(5)}, ("['n']", "(5,)", "multiple of 2")),
    ],
)
def test_batch(batch, parts):
    with raises("batch", *parts):
        first_step(batch=batch)


def test_micro_batches_do_not_divide():
    with raises("2 examples per device", "accumulate=3"):
        first_step(accumulate=3)


def test_rng_missing_or_unexpected():
    with raises("needs a key", "with_rng=True"):
        first_step(with_rng=True)
    with raises("takes no rng", "with_rng=True"):
        first_step(rng=jax.random.key(0))


def test_model_state_missing():
    with raises("has_model_state", "model_state="):
        first_step(has_model_state=True)


def test_state_of_something_else():
    step = ob.train_step(loss_fn, adam(), mesh_of(), ZERO)
    with raises("state must come from init", "dict"):
        step({}, BATCH)
    chained = optax.chain(optax.scale(1.0), adam())
    state = ob.init(params_of(), chained, mesh_of(), ZERO)
    with raises("not made by init with this tx"):
        step(state, BATCH)
