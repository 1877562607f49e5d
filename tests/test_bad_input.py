"""Every bad input raises an error that names the value and the remedy, as early as it can."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

from onebit_zero_jax import (
    ZeroConfig,
    abstract_state,
    clip_by_global_norm,
    eval_step,
    init,
    onebit_adam,
    onebit_adamw,
    shard_batch,
    state_shardings,
    train_step,
    zero_shard,
)

P = jax.P
PARTS = 2
ZERO = ZeroConfig(stage=2)
BATCH = np.ones((4, 16), np.float32)


pytestmark = pytest.mark.usefixtures("few_optimizations")


def mesh_of(parts=PARTS, name="data", kind=AxisType.Auto):
    return jax.make_mesh((parts,), (name,), (kind,), devices=jax.devices()[:parts])


def make_params():
    return {"w": jnp.ones((16, 16)), "b": jnp.zeros(3)}


def loss_fn(params, batch):
    return jnp.mean(jnp.square(batch @ params["w"])) + jnp.sum(params["b"])


def make_tx(zero: Any = ZERO, **kwargs):
    return onebit_adam(0.1, zero=zero, **kwargs)


def make_state(tx=None, mesh=None):
    """Shapes alone: no step below gets as far as running."""
    tx, mesh = tx or make_tx(), mesh or mesh_of()
    return jax.eval_shape(lambda p: init(p, tx, mesh, ZERO), make_params())


def refuses(*parts):
    """pytest.raises(ValueError) whose message holds all parts, in this order."""
    return pytest.raises(ValueError, match="(?s)" + ".*".join(re.escape(p) for p in parts))


def lower(loss=loss_fn, batch: Any = BATCH, state: Any = None, rng=None, tx: Any = None, **options):
    """As far as a first step goes before it compiles; check_local included."""
    step = train_step(loss, tx or make_tx(), mesh_of(), ZERO, **options)
    return step.bytes_sent(state or make_state(), batch, rng, phase="dense")


def test_the_good_input_passes():
    assert lower()["reduce"] > 0


# ---------------------------------------------------------------- the configuration


@pytest.mark.parametrize(
    "kwargs, parts",
    [
        ({"stage": 4}, ["stage must be 0, 1, 2 or 3", "got 4"]),
        ({"stage": "2"}, ["stage must be 0, 1, 2 or 3", "got '2'"]),
        ({"stage": True}, ["stage must be", "got True"]),
        ({"gather": "grads"}, ["gather must be 'params' or 'momentum'", "got 'grads'"]),
        ({"gather_bits": 5}, ["gather_bits must be one of (1, 2, 3, 4, 8, 'dense')", "got 5"]),
        ({"gather_bits": "4"}, ["gather_bits must be one of", "got '4'"]),
        ({"gather_bits": True}, ["gather_bits must be one of", "got True"]),
        ({"gather_bits": 0}, ["gather_bits must be one of", "got 0"]),
        ({"stage": 1, "gather_bits": 4}, ["one of (1, 2) for gather='momentum'", "got 4"]),
        ({"axis_name": ""}, ["axis_name must be the name of a mesh axis", "got ''"]),
        ({"axis_name": None}, ["axis_name must be the name of a mesh axis", "got None"]),
        ({"error_dtype": "int4"}, ["error_dtype must be one of", "int8", "got 'int4'"]),
        ({"momentum_dtype": "int8"}, ["momentum_dtype must be one of", "got 'int8'"]),
        ({"error_dtype": np.dtype("int8")}, ["error_dtype must be one of", "got dtype('int8')"]),
        ({"gather": np.ones(2)}, ["gather must be", "got array([1., 1.])"]),
        ({"stage": 3, "layer_bits": 16.0}, ["layer_bits must be 8, 16 or None", "got 16.0"]),
        ({"stage": 3, "shard_params_over": ([],)}, ["shard_params_over must be", "got ([],)"]),
        (
            {"shard_params_over": "data"},
            ["shard_params_over='data' needs stage=3", "leave it None"],
        ),
    ],
)
def test_config(kwargs, parts):
    with refuses(*parts):
        ZeroConfig(**kwargs)


# ---------------------------------------------------------------- the factories
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "10", None, NAN, jnp.int32(0), jnp.ones(())])
def test_warmup_steps(value):
    with refuses("warmup_steps must be an integer of at least 1", f"got {value!r}"):
        make_tx(warmup_steps=value)


@pytest.mark.parametrize("value", [0, -1, 2.0, False, "32"])
def test_refresh(value):
    with refuses("refresh must be an integer of at least 1", f"got {value!r}"):
        make_tx(refresh=value)


@pytest.mark.parametrize("name", ["b1", "b2"])
@pytest.mark.parametrize("value", [1, 1.0, -0.1, NAN, jnp.float32(1)])
def test_decays(name, value):
    with refuses(f"{name} must be in [0, 1)", f"got {value!r}"):
        make_tx(**{name: value})
    with refuses(f"{name} must be in [0, 1)", f"got {value!r}"):
        zero_shard(optax.sgd(0.1), zero=ZERO, **{name: value})


@pytest.mark.parametrize("name", ["learning_rate", "eps", "weight_decay"])
@pytest.mark.parametrize("value", [-0.1, NAN, INF])
def test_nonnegative_hyperparameters(name, value):
    with refuses(f"{name} must be finite and at least 0", f"got {value!r}"):
        onebit_adamw(**{"learning_rate": 0.1, name: value}, zero=ZERO)


@pytest.mark.parametrize("name", ["learning_rate", "b1", "b2", "eps", "weight_decay"])
@pytest.mark.parametrize("value", ["0.1", None, True, 1j, np.complex64(1), jnp.ones(2)])
def test_hyperparameters_that_are_no_numbers(name, value):
    with refuses(f"{name} must be a number", f"got {value!r}"):
        onebit_adamw(**{"learning_rate": 0.1, name: value}, zero=ZERO)


@pytest.mark.parametrize("value", [0, -1.0, NAN, True, "1"])
def test_max_norm(value):
    with refuses("max_norm must be", f"got {value!r}"):
        clip_by_global_norm(value, zero=ZERO)


def test_zero_and_inner():
    for zero in (None, 2, "data"):
        for make in (make_tx, lambda zero: clip_by_global_norm(1.0, zero=zero)):
            with refuses("zero must be a ZeroConfig", f"got {zero!r}"):
                make(zero=zero)
    inner: Any = 0.1
    with refuses("inner must be an optax.GradientTransformation", "got 0.1"):
        zero_shard(inner, zero=ZERO)


# ---------------------------------------------------------------- meshes, trees, transformations


def everywhere(params=None, tx: Any = None, mesh=None, zero: Any = ZERO):
    """state_shardings and init refuse in the same words; both before anything is allocated."""
    args = (make_params() if params is None else params, tx or make_tx(), mesh or mesh_of(), zero)
    return [lambda: state_shardings(*args), lambda: init(*args)]


def test_mesh_without_the_axis():
    mesh = mesh_of(name="batch")
    calls = [
        *everywhere(mesh=mesh),
        lambda: train_step(loss_fn, make_tx(), mesh, ZERO),
        lambda: eval_step(loss_fn, mesh, ZERO),
    ]
    for call in calls:
        with refuses("has axes ('batch',)", "axis_name is 'data'", "ZeroConfig(axis_name=...)"):
            call()


def test_things_that_are_no_mesh_config_or_transformation():
    for call in everywhere(mesh="mesh"):
        with refuses("mesh must be a jax.sharding.Mesh", "got 'mesh'"):
            call()
    for call in everywhere(zero="zero"):
        with refuses("zero must be a ZeroConfig", "got 'zero'"):
            call()
    for call in [*everywhere(tx="adam"), lambda: lower(tx="adam")]:
        with refuses("tx must be an optax.GradientTransformation", "got 'adam'"):
            call()


@pytest.mark.parametrize("params", [{}, [], {"a": None}])
def test_empty_tree(params):
    for call in everywhere(params):
        with refuses("params is an empty tree", "nothing to train"):
            call()


def test_leaves_without_values():
    """XLA fails to compile a start that depends on no value."""
    for call in everywhere({"w": jnp.ones((0, 3)), "b": jnp.ones(0)}):
        with refuses("params holds no values", "['w']", "(0, 3)", "nothing to train"):
            call()


@pytest.mark.parametrize(
    "leaf, what", [(jnp.ones((16, 16), jnp.int32), "int32"), (np.ones(3, bool), "bool"),
                   (jnp.ones(3, jnp.complex64), "complex64")]
)  # fmt: skip
def test_leaves_that_are_not_floating_point(leaf, what):
    for call in everywhere({"w": jnp.ones((16, 16)), "deep": [leaf]}):
        with refuses(
            f"parameter ['deep'][0] is {what}", "not a floating-point array", "model_state"
        ):
            call()


def test_zero_that_is_not_that_of_tx():
    other = ZeroConfig(stage=1)
    for call in everywhere(zero=other):
        with refuses("zero differs between tx and this call", "stage=2", "stage=1", "the same"):
            call()
    step = train_step(loss_fn, make_tx(), mesh_of(), other)
    with refuses("zero differs between tx and this call", "stage=2", "stage=1", "the same"):
        step(make_state(), BATCH)


def test_transformation_without_zero_shard():
    for call in [*everywhere(tx=optax.adam(0.1)), lambda: lower(tx=optax.adam(0.1))]:
        with refuses("tx holds no zero_shard", "build it with onebit_adamw"):
            call()


def test_multi_steps():
    tx = optax.MultiSteps(make_tx(), 4)
    wrapped = tx.gradient_transformation()
    for call in [*everywhere(tx=tx), lambda: lower(tx=tx), lambda: lower(tx=wrapped)]:
        with refuses("optax.MultiSteps", "train_step(..., accumulate=k)"):
            call()


# ---------------------------------------------------------------- the transformation on its own


def in_shard_map(f, check_vma=True, parts=PARTS):
    mapped = jax.shard_map(f, mesh=mesh_of(parts), in_specs=P(), out_specs=P(), check_vma=check_vma)
    return jax.eval_shape(mapped, make_params())


def test_axis_not_bound():
    tx, params = make_tx(), make_params()
    with refuses("mesh axis 'data' is not bound here", "inside jax.shard_map", "train_step"):
        tx.init(params)
    with refuses("mesh axis 'data' is not bound here", "inside jax.shard_map", "train_step"):
        tx.update(params, make_state().opt_state, params)
    with refuses("mesh axis 'data' is not bound here", "inside jax.shard_map"):
        clip_by_global_norm(1.0, zero=ZERO).update(params, optax.EmptyState())
    with refuses("mesh axis 'rows' is not bound here"):
        in_shard_map(make_tx(ZeroConfig(axis_name="rows")).init)


def update(grads=None, params=None, tx=None, **kwargs):
    """An update of state of make_params(), inside shard_map; good unless told otherwise."""
    tx = tx or make_tx()

    def body(start):
        vary = jax.lax.pcast(start, "data", to="varying")
        given = start if params is None else params(start)
        tx.update(vary if grads is None else grads(vary), tx.init(start), given, **kwargs)
        return jnp.zeros(())

    return in_shard_map(body)


def test_update_without_parameters():
    tx = make_tx()

    def body(params):
        return tx.update(params, tx.init(params))

    with refuses("zero_shard needs the parameters", "call update(gradients, state, params)"):
        in_shard_map(body)


def test_unknown_phase():
    with refuses("phase must be 'dense', 'compressed' or None", "got 'warm'"):
        update(phase="warm")


def test_gradient_that_was_already_reduced():
    remedies = [
        "gradient of ['b']",
        "'data'",
        "already all-reduced",
        "jax.lax.pcast(params, 'data'",
        "pmean",
    ]
    for reduce in (jax.lax.pmean, jax.lax.psum):
        with refuses(*remedies):
            update(grads=lambda g, reduce=reduce: reduce(g, "data"))

    # Differentiating replicated parameters sums their gradients over the axis.
    tx = make_tx()

    def body(params):
        grads = jax.grad(lambda p: loss_fn(p, jax.lax.axis_index("data") * jnp.ones((4, 16))))(
            params
        )
        return tx.update(grads, tx.init(params), params)[0]

    with refuses("the same on every device of axis 'data'", "jax.lax.pcast(params, 'data'"):
        in_shard_map(body)


def test_gradients_of_another_shape_structure_or_dtype():
    with refuses("gradient of ['w'] must be floating-point of shape (16, 16)", "(16, 8)"):
        update(grads=lambda g: {**g, "w": g["w"][:, :8]})
    with refuses("gradient of ['b'] must be floating-point", "int32"):
        update(grads=lambda g: {**g, "b": g["b"].astype(jnp.int32)})
    with refuses("the gradient tree does not have the structure of the parameters"):
        update(grads=lambda g: {"w": g["w"]})


@pytest.mark.parametrize("shape", [(16, 32), (15, 16), (256,), (32, 8), (2, 2)])
def test_leaf_shapes_that_changed(shape):
    def changed(tree):
        return {**tree, "w": jnp.zeros_like(tree["w"], shape=shape)}

    with refuses(
        f"parameter ['w'] of shape {shape} on 2 devices", "changed since init", "Call init"
    ):
        update(changed, changed)


def test_number_of_devices_that_changed():
    with refuses("on 2 devices does not fit", "number of devices changed since init"):
        lower(state=make_state(mesh=mesh_of(4)))


# ---------------------------------------------------------------- the train step


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "2", None])
def test_accumulate(value):
    with refuses("accumulate must be an integer of at least 1", f"got {value!r}"):
        train_step(loss_fn, make_tx(), mesh_of(), ZERO, accumulate=value)


def test_accumulate_that_does_not_divide():
    with refuses("batch has 2 examples per device", "multiple of accumulate=3"):
        lower(accumulate=3)


@pytest.mark.parametrize(
    "batch, shape",
    [(BATCH[:3], "(3, 16)"), (BATCH[:0], "(0, 16)"), (np.float32(1), "()"), (1.0, "()")],
)
def test_batches_that_do_not_divide(batch, shape):
    remedies = [f"batch['n'] of shape {shape}", "2 devices of axis 'data'", "a multiple of 2"]
    evaluate = eval_step(loss_fn, mesh_of(), ZERO)
    for call in (
        lambda: lower(batch={"x": BATCH, "n": batch}),
        lambda: shard_batch({"x": BATCH, "n": batch}, mesh_of(), ZERO),
        lambda: evaluate(make_state(), {"x": BATCH, "n": batch}),
    ):
        with refuses(*remedies):
            call()


def test_loss_that_is_no_function():
    for make in (
        lambda f: train_step(f, make_tx(), mesh_of(), ZERO),
        lambda f: eval_step(f, mesh_of(), ZERO),
    ):
        with refuses("loss_fn must be callable", "got 3"):
            make(3)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("reduce", [jax.lax.psum, jax.lax.pmean])
def test_loss_that_is_already_reduced(reduce, kind):
    mesh, tx = mesh_of(kind=kind), make_tx()
    step = train_step(lambda p, b: reduce(loss_fn(p, b), "data"), tx, mesh, ZERO)
    with refuses("the same loss on every device of axis 'data'", "train_step averages"):
        step(init(make_params(), tx, mesh, ZERO), BATCH)


@pytest.mark.parametrize(
    "loss, options, parts",
    [
        (lambda p, b: jnp.mean(b @ p["w"], 1), {}, ["must return a scalar loss", "got (2,)"]),
        (lambda p, b: 1.0, {}, ["must return a scalar loss", "got 1.0"]),
        (lambda p, b: None, {}, ["must return a scalar loss", "got None"]),
        (lambda p, b: jnp.int32(1), {}, ["must be floating-point", "int32"]),
        (lambda p, b: (loss_fn(p, b), b), {}, ["must return a scalar loss", "has_aux"]),
        (loss_fn, {"has_aux": True}, ["must return loss, aux", "got ()", "has_aux"]),
        (
            lambda p, b: (loss_fn(p, b), 1, 2),
            {"has_aux": True},
            ["must return loss, aux", "has_aux"],
        ),
    ],
)
def test_loss_that_returns_something_else(loss, options, parts):
    with refuses(*parts):
        lower(loss, **options)


def test_rng():
    with refuses("needs a key", "with_rng=True"):
        lower(lambda p, b, r: loss_fn(p, b), with_rng=True)
    with refuses("takes no rng", "train_step(with_rng=True)"):
        lower(rng=jax.random.key(0))
    for rng in (3, np.ones(4), jax.random.split(jax.random.key(0))):
        with refuses("rng must be a key", "jax.random.key(0)", f"got {rng!r}"):
            lower(lambda p, b, r: loss_fn(p, b), with_rng=True, rng=rng)


@pytest.mark.parametrize("value", ["halves", jnp.int32, np.float64, 3])
def test_compute_dtype(value):
    with refuses("compute_dtype must be", f"got {value!r}"):
        lower(compute_dtype=value)


def test_flags():
    for name in ("has_aux", "with_rng", "has_model_state"):
        with refuses(f"{name} must be True or False", "got 'yes'"):
            lower(**{name: "yes"})


def test_arrays_that_jax_has_not():
    words = np.array(["a", "b"])
    with refuses("batch['w'] is <U1"):
        shard_batch({"w": words}, mesh_of(), ZERO)
    with refuses("model_state['w'] is <U1"):
        init(make_params(), make_tx(), mesh_of(), ZERO, model_state={"w": words})


def test_meshes_without_devices_and_others():
    abstract: Any = jax.sharding.AbstractMesh((PARTS,), ("data",))
    with refuses("init needs devices", "see abstract_state"):
        init(make_params(), make_tx(), abstract, ZERO)
    with refuses("batch is an array", "pass jax.ShapeDtypeStruct"):
        shard_batch(BATCH, abstract, ZERO)
    other = jax.make_mesh((PARTS,), ("data",), devices=jax.devices()[4 : 4 + PARTS])
    state = init(make_params(), make_tx(), mesh_of(), ZERO)
    with refuses("state is on devices [0, 1]", "has [4, 5]", "resize"):
        train_step(loss_fn, make_tx(), other, ZERO)(state, BATCH)


def test_float64_is_float32_everywhere():
    params = {"w": np.ones((16, 16)), "b": np.zeros(3)}
    shapes = abstract_state(params, make_tx(), mesh_of(), ZERO)
    state = init(params, make_tx(), mesh_of(), ZERO)
    assert jax.tree.map(lambda x: x.dtype, shapes) == jax.tree.map(lambda x: x.dtype, state)


def test_model_state():
    with refuses("has_model_state=True needs init(..., model_state=...)"):
        lower(lambda p, m, b: (loss_fn(p, b), m), has_model_state=True)
    with refuses("has_model_state=True needs init(..., model_state=...)"):
        lower(state=dataclasses.replace(make_state(), model_state={"mean": jnp.ones(3)}))


def test_state_from_elsewhere():
    with refuses("state must come from init", "got dict"):
        lower(state={"params": make_params()})
    for other in (
        make_tx(warmup_steps=7),
        onebit_adam(optax.constant_schedule(0.1), zero=ZERO),
        zero_shard(optax.adam(0.1), zero=ZERO),
    ):
        with refuses("state was not made by init with this tx", "call init again"):
            lower(state=make_state(other))
    changed = {**make_params(), "w": jnp.ones((16, 17))}
    with refuses("['w'] of shape (16, 17)", "changed since init", "Call init again"):
        lower(state=dataclasses.replace(make_state(), params=changed))
