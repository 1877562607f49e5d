"""The checks that optax makes of every new optimizer, inside ``jax.shard_map``.

Wrappers and links around ours: test_optax_links.py.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

from onebit_zero_jax import (
    ZeroConfig,
    init,
    onebit_adam,
    onebit_adamw,
    state_shardings,
    zero_shard,
)

P = jax.P
PARTS = 2
SHORT: dict[str, Any] = {"warmup_steps": 2, "refresh": 2}
OPTIMIZERS = {
    "onebit_adam": functools.partial(onebit_adam, 0.1, **SHORT),
    "onebit_adamw": functools.partial(onebit_adamw, 0.1, weight_decay=0.01, **SHORT),
    "zero_shard": lambda zero: zero_shard(optax.sgd(0.1), zero=zero, **SHORT),
}
# Stage 1 gathers momentum, stage 2 parameters: the two code paths.
MOMENTUM, PARAMS = ZeroConfig(stage=1), ZeroConfig(stage=2)
# Sends masters as they are: what a link did can be read from the updates of dense steps.
EXACT = ZeroConfig(stage=2, gather_bits="dense")

every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)
every_stage = pytest.mark.parametrize("zero", [MOMENTUM, PARAMS], ids=["stage1", "stage2"])


pytestmark = pytest.mark.usefixtures("few_optimizations")


def mesh_of(parts=PARTS, kind=AxisType.Auto):
    return jax.make_mesh((parts,), ("data",), (kind,), devices=jax.devices()[:parts])


def make_params(dtype=jnp.float32):
    """A compressed leaf and two dense ones."""
    rng = np.random.default_rng(0)
    shapes = {"matrix": (16, 16), "vector": (5,), "scalar": ()}
    return {k: jnp.asarray(rng.normal(size=s), dtype) for k, s in shapes.items()}


def gradients(params, target):
    """Of ``|p - target|^2 / 2`` inside shard_map; the target is different on each device."""
    params = jax.lax.pcast(params, "data", to="varying")
    return jax.tree.map(lambda p: p - target.astype(p.dtype), params)


def training(tx, params, steps, *, check_vma=True, grads_of=gradients, **extra):
    """``steps`` updates in one ``lax.scan``, in a user's own shard_map: a traced program."""

    def body(params, targets):
        def step(carry, _):
            params, state = carry
            grads = grads_of(params, targets[0])
            updates, state = tx.update(grads, state, params, **extra)
            params = optax.apply_updates(params, updates)
            return (params, state), params

        _, history = jax.lax.scan(step, (params, tx.init(params)), None, length=steps)
        return jax.tree.map(lambda x: x[None], history)

    mapped = jax.shard_map(
        body, mesh=mesh_of(), in_specs=(P(), P("data")), out_specs=P("data"), check_vma=check_vma
    )
    return jax.jit(mapped).trace(params, jnp.arange(PARTS, dtype=jnp.float32))


def run(traced, params):
    """Parameters after every step, and the compiled program's text."""
    compiled = traced.lower().compile()
    history = compiled(params, jnp.arange(PARTS, dtype=jnp.float32))
    return one_replica(history), compiled.as_text()


def train(tx, params, steps=8, **options):
    return run(training(tx, params, steps, **options), params)[0]


def one_replica(stacked):
    """What the devices hold, if it is the same bits on all."""
    for x in jax.tree.leaves(stacked):
        x = np.asarray(x)
        assert np.isfinite(x.astype(np.float32)).all()
        assert (x == x[:1]).all()
    return jax.tree.map(lambda x: np.asarray(x[0]), stacked)


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def assert_close(a, b, **tolerance):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), a, b)


def shardings(tx, params=None, zero=EXACT):
    """What init and train_step make of a transformation, without running anything."""
    return state_shardings(make_params() if params is None else params, tx, mesh_of(), zero)


# ---------------------------------------------------------------- optax's own checklist


@pytest.mark.parametrize(
    "name, zero", [("onebit_adam", MOMENTUM), ("onebit_adamw", PARAMS), ("zero_shard", PARAMS)]
)
def test_own_jitted_step_on_an_explicit_mesh(name, zero, caplog):
    mesh, tx = mesh_of(8, AxisType.Explicit), OPTIMIZERS[name](zero=zero)
    start = init({**make_params(), "matrix": jnp.ones((16, 32))}, tx, mesh, zero)
    specs = state_shardings(start.params, tx, mesh, zero).opt_state
    specs = jax.tree.map(lambda s: s.spec, specs)

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=(P(), specs))
    def step(params, opt_state, target):
        grads = gradients(params, target[0])
        updates, opt_state = tx.update(grads, opt_state, params, unexpected_extra_args=1)
        return optax.apply_updates(params, updates), opt_state

    target = jax.device_put(jnp.arange(8.0), jax.NamedSharding(mesh, P("data")))
    params, state = start.params, start.opt_state
    with jax.log_compiles():
        for compilations in (1, 0, 0):
            caplog.clear()
            params, state = step(params, state, target)
            assert caplog.text.count("Finished XLA compilation") == compilations
            assert jax.tree.map(jax.typeof, params) == jax.tree.map(jax.typeof, start.params)
            assert jax.tree.map(jax.typeof, state) == jax.tree.map(jax.typeof, start.opt_state)

    # Optax finds the state of the parameters; everything else is left alone.
    assert_equal(optax.tree.map_params(tx, lambda v: v, state), state)
    marked: Any = optax.tree.map_params(
        tx, lambda v: "params", state, transform_non_params=lambda v: "rest"
    )
    assert set(jax.tree.leaves(marked.leaves)) == {"params"}
    assert {marked.step, marked.applied, marked.nonfinite, marked.residual} == {"rest"}


@pytest.mark.parametrize(
    "name, zero", [("onebit_adam", MOMENTUM), ("onebit_adamw", PARAMS), ("zero_shard", PARAMS)]
)
def test_converges(name, zero):
    """A parabola and a curved valley, of mixed rank, to optax's own tolerance."""
    params = {
        "bowl": jnp.linspace(-2, 2, 128).reshape(8, 16),
        "valley": jnp.stack([jnp.linspace(-1, 1.5, 64), jnp.ones(64)]),
        "vector": jnp.array([2.0, -1.0, 3.0]),
        "scalar": jnp.float32(-2.0),
    }
    rate = optax.cosine_decay_schedule(0.01, 4000)
    # Without noise the gradient vanishes, and with it the variance that is frozen: eps
    # bounds the step.
    adam = {"b2": 0.99, "eps": 0.1}
    args = {"zero": zero, "warmup_steps": 200, "refresh": 8}
    tx = {
        "onebit_adam": lambda: onebit_adam(rate, **adam, **args),
        "onebit_adamw": lambda: onebit_adamw(rate, **adam, weight_decay=1e-4, **args),
        "zero_shard": lambda: zero_shard(optax.sgd(rate), **args),
    }[name]()

    def loss(params, target):
        x, y = params["valley"]
        flat = [params["bowl"], params["vector"], params["scalar"]]
        # Targets are 0 and 1: the mean of the losses is least at 1 / 2, and at x = y = 1.
        return sum(jnp.sum((p - target) ** 2) for p in flat) + jnp.sum(
            (1 - x) ** 2 + (1 + target) * (y - x**2) ** 2
        )

    def grads_of(params, target):
        return jax.grad(loss)(jax.lax.pcast(params, "data", to="varying"), target)

    last = jax.tree.map(lambda x: x[-1], train(tx, params, 4000, grads_of=grads_of))
    for key, solution in {"bowl": 0.5, "valley": 1.0, "vector": 0.5, "scalar": 0.5}.items():
        np.testing.assert_allclose(last[key], solution, rtol=3e-2, atol=3e-2, err_msg=key)


@every_stage
def test_hyperparameters_may_be_traced(zero):
    """Constants, a schedule, and both in inject_hyperparams: the same bits.

    inject_hyperparams traces all numbers, the integers warmup_steps and refresh too.
    The constants are exact in float32, so 1 - b1 is the same in Python and on the device.
    """
    args = {"zero": zero, "b1": 0.875, "b2": 0.9375, "eps": 2.0**-10, "weight_decay": 0.125}
    args.update(SHORT)
    constant = train(onebit_adamw(0.125, **args), make_params())
    injected = optax.inject_hyperparams(onebit_adamw)(0.125, **args)
    assert_equal(train(injected, make_params()), constant)
    hyperparams = shardings(injected, zero=zero).opt_state.hyperparams
    assert {"learning_rate", "b1", "eps", "warmup_steps", "refresh"} <= set(hyperparams)
    if zero is PARAMS:
        rate = optax.constant_schedule(0.125)
        assert_equal(train(onebit_adamw(rate, **args), make_params()), constant)
        half = optax.inject_hyperparams(onebit_adamw, static_args=("warmup_steps", "refresh"))
        assert_equal(train(half(rate, **args), make_params()), constant)


@every_optimizer
@every_stage
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_dtypes_and_shapes_are_stable(name, zero, dtype):
    """Updates have the parameters' dtype; the state goes through lax.cond unchanged."""
    with jax.enable_x64(dtype == "float64"):
        params = make_params(dtype)
        tx = OPTIMIZERS[name](zero=zero)
        seen = []

        def body(params, target):
            state = tx.init(params)
            grads = gradients(params, target[0])
            updates, new = jax.lax.cond(
                jnp.sum(params["vector"]) > 0,
                lambda: tx.update(grads, state, params),
                lambda: (jax.tree.map(jnp.zeros_like, params), state),
            )
            seen.extend([jax.tree.map(jax.typeof, t) for t in (params, updates, state, new)])
            return jnp.zeros(())

        mapped = jax.shard_map(body, mesh=mesh_of(), in_specs=(P(), P("data")), out_specs=P())
        jax.eval_shape(mapped, params, jnp.arange(2.0))
        assert seen[0] == seen[1]
        assert seen[2] == seen[3]


def test_injected_hyperparameters_take_the_dtype_of_the_parameters():
    """In bfloat16 b2 = 0.999 is 1, for optax.adam too: hyperparam_dtype keeps it."""
    for given, dtype in ({}, jnp.bfloat16), ({"hyperparam_dtype": jnp.float32}, jnp.float32):
        tx = optax.inject_hyperparams(onebit_adam, **given)(0.1, zero=MOMENTUM)
        init = jax.shard_map(tx.init, mesh=mesh_of(), in_specs=P(), out_specs=P(), check_vma=False)
        b2 = jax.eval_shape(init, make_params(jnp.bfloat16)).hyperparams["b2"]
        assert b2.dtype == dtype
        assert (1 - jnp.asarray(0.999, dtype) == 0) == (dtype == jnp.bfloat16)


@every_optimizer
@every_stage
def test_abstract_init(name, zero):
    """``init`` needs shapes alone, and gives the structure of a real one."""
    tx, params = OPTIMIZERS[name](zero=zero), make_params()
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    state = init(params, tx, mesh_of(), zero)
    assert jax.tree.map(lambda x: x.sharding, state) == shardings(tx, abstract, zero)
