"""Random meshes, trees, dtypes and options: right, or one of the documented errors.

Here what can be told without compiling; slow, whole runs against the reference.
"""

import math
import pathlib
import traceback
from typing import Any, Literal

import fuzzing
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import onebit_zero_jax as ob

pytestmark = pytest.mark.usefixtures("few_optimizations")

PACKAGE = pathlib.Path(ob.__file__).parent
NAN, INF = math.nan, math.inf
BAD_ANYWHERE: list[Any] = ["two", [1], (), {}, b"1", 1j, NAN, np.array([1, 2]), object(), 10**400]


def quick(count: int, **options: Any) -> Any:
    options = {"derandomize": True, "database": None, **options}
    return settings(
        max_examples=count,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        **options,
    )


def outcome(call: Any, *words: Any) -> Any:
    """What ``call`` returns; or None after a documented error that holds one of ``words``."""
    try:
        return call()
    except (ValueError, TypeError, NotImplementedError) as e:
        frame = traceback.extract_tb(e.__traceback__)[-1]
        if PACKAGE not in pathlib.Path(frame.filename).parents:
            raise AssertionError(f"not an error of the package: {frame}") from e
        if not any(str(w) in str(e) for w in words):
            raise AssertionError(f"{e!s} names none of {words}") from e
        return None


# ---------------------------------------------------------------- options

CONFIG: dict[str, list[Any]] = {
    "axis_name": ["data", ("slow", "fast"), ("data",), ("a", "a"), ("a", "b", "c"), "", ["a"], 1],
    "stage": [0, 1, 2, 3, 4, -1, True, 2.0, np.int64(2)],
    "gather": [None, "params", "momentum", "grads", True],
    "gather_bits": [None, 1, 2, 3, 4, 8, 32, "dense", 5, 0, 4.0, "4", True, np.int64(4)],
    "shard_params_over": [None, "data", "fast", ("slow", "fast"), ("fast", "slow"), "slow", ("a",)],
    "layer_bits": [None, 8, 16, 4, 16.0, "8", True],
    "error_dtype": ["float32", "bfloat16", "int8", "int4", None, jnp.int8, np.dtype("int8")],
    "momentum_dtype": ["float32", "bfloat16", "int8", None, np.dtype("float32")],
}


def config_is_good(c: dict[str, Any]) -> bool:
    """The rules of ZeroConfig once more, as its docstring says them."""

    def among(value: Any, allowed: list[Any]) -> bool:
        return any(type(value) is type(x) and value == x for x in allowed)

    pair = among(c["axis_name"], [("slow", "fast")])
    one = "data" if among(c["axis_name"], [("data",)]) else c["axis_name"]
    if not pair and not (isinstance(one, str) and one):
        return False
    if not among(c["stage"], [0, 1, 2, 3]) or not among(c["gather"], [None, "params", "momentum"]):
        return False
    momentum = c["gather"] == "momentum" or (c["gather"] is None and c["stage"] < 2)
    bits = [None, 1, 2] if momentum else [None, 1, 2, 3, 4, 8, 32, "dense"]
    if not among(c["gather_bits"], bits):
        return False
    if c["stage"] == 3:
        over = ["fast", ("fast",), ("slow", "fast"), ("fast", "slow")] if pair else [one, (one,)]
        if momentum or not among(c["shard_params_over"], [None, *over]):
            return False
        if not among(c["layer_bits"], [None, 8, 16]):
            return False
    elif c["shard_params_over"] is not None or c["layer_bits"] is not None:
        return False
    return among(c["error_dtype"], CONFIG["error_dtype"][:3]) and among(
        c["momentum_dtype"], ["float32", "bfloat16"]
    )


@quick(400)
@given(st.data())
def test_config(data):
    usual = {k: st.sampled_from(v[:4]) for k, v in CONFIG.items()}
    kwargs = {k: data.draw(usual[k]) for k in CONFIG}
    kwargs["stage"] = data.draw(st.sampled_from([0, 1, 2, 3]))
    if kwargs["stage"] < 3 and data.draw(st.booleans()):
        kwargs["shard_params_over"] = kwargs["layer_bits"] = None
    for k in data.draw(st.lists(st.sampled_from(sorted(CONFIG)), max_size=2)):
        kwargs[k] = data.draw(st.sampled_from(CONFIG[k] + BAD_ANYWHERE))
    zero = outcome(lambda: ob.ZeroConfig(**kwargs), *map(repr, kwargs.values()))
    assert (zero is not None) == config_is_good(kwargs), kwargs
    if zero is not None:
        assert hash(zero) == hash(ob.ZeroConfig(**kwargs))
        assert zero.bits in (1, 2, 3, 4, 8, "dense")
        assert bool(zero.over) == (zero.stage == 3)


UNIT = [0.0, 0, 0.5, np.float32(0.5), jnp.float32(0.5), 0.999]
NO_UNIT = [1.0, 1, -0.1, -INF, INF, True, None, jnp.float32(1), jnp.ones(2), jnp.bool_(True)]
POSITIVE = [0.0, 1e-8, 1, np.float64(2), 1e30, jnp.float32(3)]
NO_POSITIVE = [-1e-9, INF, -1, None, False, jnp.float32(-1), jnp.float32(NAN), jnp.ones((1,))]
COUNTS = [1, 7, np.int64(3), 2**27 - 1, jnp.int32(4)]
NO_COUNTS = [0, -1, 1.0, True, 2**27, 10**30, jnp.int32(0), jnp.float32(2), jnp.ones(2, int)]
SOME_ZERO = [ob.ZeroConfig(stage=s) for s in range(4)]
OPTIONS: dict[str, tuple[list[Any], list[Any]]] = {
    "learning_rate": ([*POSITIVE, lambda t: 0.1], NO_POSITIVE),
    "b1": (UNIT, NO_UNIT),
    "b2": (UNIT, NO_UNIT),
    "momentum": (UNIT, NO_UNIT),
    "eps": (POSITIVE, NO_POSITIVE),
    "weight_decay": (POSITIVE, NO_POSITIVE),
    "max_ratio": ([0.1, 1, INF, jnp.float32(2)], [0, -1.0, None, jnp.float32(0), jnp.ones(2)]),
    "warmup_steps": ([*COUNTS, "auto"], [*NO_COUNTS, None, "Auto"]),
    "refresh": ([*COUNTS, None], [*NO_COUNTS, "auto"]),
    "zero": (SOME_ZERO, [None, "data", 2, {"stage": 2}]),
}
FACTORIES = {
    ob.onebit_adamw: ["learning_rate", "b1", "b2", "eps", "weight_decay"],
    ob.onebit_adam: ["learning_rate", "b1", "b2", "eps"],
    ob.onebit_lamb: ["learning_rate", "b1", "b2", "eps", "weight_decay", "max_ratio"],
    ob.onebit_lion: ["learning_rate", "b1", "b2", "weight_decay"],
    ob.onebit_sgdm: ["learning_rate", "momentum", "weight_decay"],
}


@quick(300)
@given(st.data())
def test_factories(data):
    factory = data.draw(st.sampled_from(list(FACTORIES)), label="factory")
    names = [*FACTORIES[factory], "warmup_steps", "refresh", "zero"]
    kwargs = {k: data.draw(st.sampled_from(OPTIONS[k][0])) for k in names}
    bad = data.draw(st.lists(st.sampled_from(names), max_size=2, unique=True))
    for k in bad:
        pool = OPTIONS[k][1] + BAD_ANYWHERE
        kwargs[k] = data.draw(st.sampled_from(pool))
    if factory is ob.onebit_lion and not bad:
        if kwargs["b1"] > kwargs["b2"]:
            # Traced numbers are not compared, nor are arrays that might be.
            bad = [] if any(isinstance(kwargs[k], jax.Array) for k in ("b1", "b2")) else ["b1"]
        if kwargs["zero"].gather_mode == "momentum":
            bad = ["zero"]
    words = ["needs gather='params'"] if factory is ob.onebit_lion else []
    words += [f"got {kwargs[k]!r}" for k in bad] + [f"b1={kwargs.get('b1')}"]
    tx = outcome(lambda: factory(**kwargs), *words)
    assert (tx is None) == bool(bad), kwargs


# ---------------------------------------------------------------- states and steps, traced

PHASES: tuple[Literal["dense", "compressed"], ...] = ("dense", "compressed")
LEAVES: dict[str, Any] = {
    "int": np.ones((16, 20), int),
    "bool": np.ones(3, bool),
    "complex": np.ones((16, 20), np.complex64),
    "text": np.array(["a"]),
    "object": np.array([None]),
    "key": jax.random.key(0),
    "list": "text",
}


@quick(4)
@given(fuzzing.cases(), st.data())
def test_traces(case, data):
    """Abstract states and steps: bytes by the shapes alone, or an error that names the value."""
    check_trace(case, data)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@quick(200, derandomize=False)
@given(fuzzing.cases(), st.data())
def test_many_traces(case, data):
    check_trace(case, data)


def check_trace(case, data):
    run = fuzzing.Run(case)
    params, bad, words = run.params, data.draw(st.integers(0, 9)), ["nothing"]
    mesh, tx, step_options = run.mesh, run.tx, {}
    batch: Any = run.batch(0)
    if bad == 0:
        name = data.draw(st.sampled_from(sorted(LEAVES)))
        params, words = [params, LEAVES[name]], ["parameter [1]"]
    elif bad == 1:
        mesh = jax.make_mesh((2,), ("rows",), devices=jax.devices()[:2])
        words = ["('rows',)"]
    elif bad == 2:
        options = {"accumulate": [0, "2", 1.5], "compute_dtype": ["x", int], "has_aux": [None, 1]}
        name = data.draw(st.sampled_from(sorted(options)))
        step_options = {name: data.draw(st.sampled_from(options[name]))}
        words = [repr(step_options[name])]
    elif bad == 3:
        batch = [np.ones((run.parts + 1, 2))] if run.parts > 1 else [np.ones(())]
        words = [f"of shape {batch[0].shape}"]
    elif bad == 4:
        link = data.draw(st.sampled_from([optax.apply_if_finite(tx, 3), optax.adam(0.1)]))
        tx, words = link, ["apply_if_finite", "zero_shard"]

    def trace() -> Any:
        state = ob.abstract_state(params, tx, mesh, run.zero)
        step = ob.train_step(run.loss, tx, mesh, run.zero, **{**run.options, **step_options})
        key = jax.random.key(0) if case.rng else None
        return state, [step.bytes_sent(state, batch, key, p) for p in PHASES]

    traced = outcome(trace, *words)
    assert (traced is not None) == (bad > 4), words
    if traced is None:
        return
    state, (dense, coded) = traced
    shardings = ob.state_shardings(params, tx, mesh, run.zero)
    for x, s in zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True):
        assert x.sharding == s
    big = sum(v.leaf.compressed for v in run.views(state))
    assert (coded["reduce"] > 0) == bool(big and run.workers > 1)
    if big and run.workers > 1:
        # One bit and a scale per block; a dense reduction sends at least 32.
        assert coded["reduce"] < dense["reduce"]
    assert coded["weights"] == 0
    if run.mesh.size == 1:
        assert not any(dense.values())


# ---------------------------------------------------------------- whole runs


@pytest.mark.slow
@pytest.mark.timeout(3600)
@quick(150, phases=[Phase.generate], derandomize=False)
@given(fuzzing.cases())
def test_runs(case):
    fuzzing.check(case)
    jax.clear_caches()
