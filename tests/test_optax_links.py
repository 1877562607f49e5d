"""What links and wrappers of optax do in front of, inside, around and behind ours.

docs/compatibility.md is the table of what this file finds.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_optax import (
    EXACT,
    MOMENTUM,
    PARAMS,
    PARTS,
    SHORT,
    P,
    assert_close,
    assert_equal,
    gradients,
    make_params,
    mesh_of,
    one_replica,
    run,
    shardings,
    train,
    training,
)

from onebit_zero_jax import (
    clip_by_global_norm,
    onebit_adam,
    onebit_adamw,
    wire_report,
    zero_shard,
)

pytestmark = pytest.mark.usefixtures("few_optimizations")


def alone(tx, params, steps):
    """Parameters after every step of plain optax on the mean of those gradients."""
    state, history = tx.init(params), []
    for _ in range(steps):
        updates, state = tx.update(jax.tree.map(lambda p: p - 0.5, params), state, params)
        params = optax.apply_updates(params, updates)
        history.append(params)
    return jax.tree.map(lambda *x: np.stack(x), *history)


# ---------------------------------------------------------------- wrappers


def test_multi_steps_in_own_shard_map():
    """Two micro-batches make one update, but each of them sends."""
    tx, params = onebit_adam(0.1, zero=PARAMS, warmup_steps=3), make_params()
    every = optax.MultiSteps(tx, every_k_schedule=2)
    multi, text = run(training(every, params, 12, check_vma=False), params)
    assert_close(jax.tree.map(lambda m: m[1::2], multi), train(tx, params, 6), rtol=1e-6)
    assert_equal(*(jax.tree.map(lambda m, i=i: m[i:-1:2], multi) for i in (1, 2)))
    # optax runs the inner update on every micro-batch and throws all but the k-th away.
    found = wire_report(text, mesh_of()).collectives
    assert {c.calls for c in found} == {12}


def test_multi_steps_with_typed_axes():
    """Its accumulator is made from the parameters: they must vary from the start."""
    tx = optax.MultiSteps(onebit_adam(0.1, zero=EXACT, warmup_steps=9), every_k_schedule=2)
    with pytest.raises(ValueError, match="same on every device of axis 'data'"):
        training(tx, make_params(), 2)

    @jax.shard_map(mesh=mesh_of(), in_specs=P(), out_specs=P("data"))
    def step(params):
        params = jax.lax.pcast(params, "data", to="varying")
        updates, _ = tx.update(params, tx.init(params), params)
        return jax.tree.map(lambda x: x[None], updates)

    jax.eval_shape(step, make_params())


def test_wrappers_that_decide_on_each_device_are_refused():
    tx = onebit_adam(0.1, zero=EXACT)
    with pytest.raises(ValueError, match=r"MultiSteps.*accumulate=k"):
        shardings(optax.MultiSteps(tx, 2))
    with pytest.raises(ValueError, match=r"MultiSteps.*accumulate=k"):
        shardings(optax.MultiSteps(tx, 2).gradient_transformation())
    with pytest.raises(ValueError, match=r"apply_if_finite.*remove it.*skipped_steps"):
        shardings(optax.apply_if_finite(tx, 3))
    with pytest.raises(ValueError, match=r"found_nan.*each device would decide.*non-finite guard"):
        shardings(optax.chain(optax.zero_nans(), tx))
    with pytest.raises(ValueError, match=r"\['matrix'\] differs between devices"):
        shardings(optax.contrib.mechanize(tx))
    # In a shard_map of one's own JAX's types refuse it.
    with pytest.raises(TypeError, match="cond branches must have equal output types"):
        training(optax.apply_if_finite(tx, 3), make_params(), 2)


def test_links_that_keep_local_gradients():
    """Their state is stacked over devices, which a scalar cannot be."""
    matrix = {"matrix": make_params()["matrix"]}
    for link in (optax.trace(0.9), optax.ema(0.9), optax.apply_every(2)):
        tx = optax.named_chain(("link", link), ("ours", onebit_adam(0.1, zero=EXACT)))
        kept = shardings(tx, matrix).opt_state["link"]
        assert [s.spec for s in jax.tree.leaves(kept) if s.spec] == [P("data")]
        with pytest.raises(ValueError, match=r"\['scalar'\] is a scalar that each device"):
            shardings(tx)


def test_partition_with_two_rates_and_a_frozen_group():
    """Each group moves as it would alone; a frozen one does not move at all."""
    labels = {"matrix": "fast", "vector": "slow", "scalar": "frozen"}
    fast, slow = (onebit_adam(lr, zero=PARAMS, **SHORT) for lr in (0.1, 0.01))
    tx = optax.partition({"fast": fast, "slow": slow, "frozen": optax.set_to_zero()}, labels)
    shardings(tx, zero=PARAMS)
    params = make_params()
    # check_vma=False: set_to_zero returns zeros that are typed like the local gradients.
    both = train(tx, params, check_vma=False)
    expected = {
        "matrix": train(fast, {"matrix": params["matrix"]})["matrix"],
        **train(slow, {"vector": params["vector"]}),
        "scalar": np.broadcast_to(params["scalar"], 8),
    }
    assert_equal(both, expected)


def test_frozen_leaves():
    tx = onebit_adamw(0.1, zero=EXACT, **SHORT)
    frozen = {"matrix": False, "vector": False, "scalar": True}
    trained = jax.tree.map(lambda f: not f, frozen)
    ways = {
        "masked": optax.chain(optax.masked(tx, trained), optax.masked(optax.set_to_zero(), frozen)),
        "selective_transform": optax.selective_transform(tx, freeze_mask=frozen),
        "freeze": optax.chain(optax.freeze(frozen), optax.masked(tx, trained)),
    }
    updates, _ = first_updates(ways)
    for name, way in ways.items():
        shardings(way)
        assert {k: not u.any() for k, u in updates[name].items()} == frozen
        assert_equal(updates[name], updates["masked"])
    with pytest.raises(ValueError, match=r"\['scalar'\] differs between devices.*set_to_zero"):
        shardings(optax.masked(tx, trained))
    mixed = optax.partition(
        {"ours": tx, "plain": optax.adamw(1e-3)},
        {"matrix": "ours", "vector": "plain", "scalar": "ours"},
    )
    with pytest.raises(ValueError, match=r"\['vector'\] differs between devices.*zero_shard"):
        shardings(mixed)


def test_schedule_free():
    """It works where updates are what moves the parameters: gather="momentum"."""

    def ours(zero):
        tx = onebit_adam(0.1, b1=0.0, b2=0.99, zero=zero, warmup_steps=9)
        return optax.contrib.schedule_free(tx, 0.1)

    plain = optax.contrib.schedule_free(optax.adam(0.1, b1=0.0, b2=0.99), 0.1)
    params = make_params()
    expected = alone(plain, params, 5)
    history = train(ours(MOMENTUM), params, 5, phase="dense")
    # The matrix travels at 1 bit.
    for key in ("vector", "scalar"):
        assert_close(history[key], expected[key], rtol=1e-4, atol=1e-5)
    shardings(ours(MOMENTUM), zero=MOMENTUM)
    with pytest.raises(ValueError, match=r"schedule_free.*use ZeroConfig\(gather='momentum'\)"):
        shardings(ours(PARAMS), zero=PARAMS)


def test_flatten_makes_everything_dense():
    """A vector is never compressed."""
    tx, params = optax.flatten(onebit_adam(0.1, zero=PARAMS, **SHORT)), make_params()
    _, text = run(training(tx, params, 2, phase="compressed"), params)
    assert {c.op for c in wire_report(text, mesh_of()).collectives} == {"all-reduce"}


# ---------------------------------------------------------------- links in front, inside, behind


def first_updates(transformations, params=None):
    """First updates of each in a dense step, in one program; and the local gradients."""
    params = make_params() if params is None else params

    def body(params, targets):
        grads = gradients(params, targets[0])
        updates = {
            name: optax.with_extra_args_support(tx).update(
                grads, tx.init(params), params, phase="dense"
            )[0]
            for name, tx in transformations.items()
        }
        return jax.tree.map(lambda x: x[None], (updates, grads))

    mapped = jax.shard_map(
        body, mesh=mesh_of(), in_specs=(P(), P("data")), out_specs=P("data"), check_vma=False
    )
    updates, grads = jax.jit(mapped)(params, jnp.arange(PARTS, dtype=jnp.float32))
    return one_replica(updates), jax.tree.map(np.asarray, grads)


def descent(inner=None, zero=EXACT):
    """Adds the mean gradient itself to what ``inner`` does."""
    return zero_shard(inner or optax.sgd(1.0), zero=zero, b1=0.0, warmup_steps=9)


def test_links_in_front_see_local_gradients():
    """What travels is the mean of the links' outputs, each made from a local gradient."""
    front = {
        "scale": optax.scale(0.5),
        "clip": optax.clip(0.3),
        "centralize": optax.centralize(),
        "add_decayed_weights": optax.add_decayed_weights(0.1),
        "adaptive_grad_clip": optax.adaptive_grad_clip(0.1),
        "theirs": optax.clip_by_global_norm(0.5),
    }
    made = {name: optax.chain(link, descent()) for name, link in front.items()}
    made["ours"] = optax.chain(clip_by_global_norm(0.5, zero=EXACT), descent())
    updates, grads = first_updates(made)
    params = make_params()
    for name, link in front.items():
        shardings(made[name])
        local = [jax.tree.map(lambda g, i=i: jnp.asarray(g[i]), grads) for i in range(PARTS)]
        out = [link.update(g, link.init(params), params)[0] for g in local]
        mean = jax.tree.map(lambda *x: -sum(x) / PARTS, *out)
        assert_close(updates[name], mean, rtol=1e-5, atol=1e-6)
    # The norm that a user means is that of the mean gradient.
    shardings(made["ours"])
    assert optax.tree.norm(jax.tree.map(lambda g: g.mean(0), grads)) > 0.5
    assert optax.tree.norm(updates["ours"]) == pytest.approx(0.5, rel=0.1)
    assert optax.tree.norm(updates["theirs"]) < 0.48


def test_norms_inside_see_a_chunk_or_the_whole():
    """gather="params" gives ``inner`` the owner's chunk, gather="momentum" whole leaves."""
    params = {"matrix": make_params()["matrix"]}
    inner = optax.chain(optax.scale_by_trust_ratio(), optax.scale(-1.0))
    updates, grads = first_updates(
        {zero.gather_mode: descent(inner, zero) for zero in (EXACT, MOMENTUM)}, params
    )
    mean, start = grads["matrix"].mean(0), np.asarray(params["matrix"])
    halves = [
        -g * np.linalg.norm(x) / np.linalg.norm(g)
        for x, g in zip(np.split(start, 2), np.split(mean, 2))
    ]
    assert_close(updates["params"]["matrix"], np.concatenate(halves), rtol=1e-5, atol=1e-6)
    # The trust ratio makes an update as long as what its norms see: here the whole leaf.
    length = np.linalg.norm(updates["momentum"]["matrix"])
    assert length == pytest.approx(np.linalg.norm(start), rel=1e-5)
    # A norm over chunks and dense leaves together would move dense leaves differently.
    clip = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"differs between devices.*no norm inside zero_shard"):
        shardings(zero_shard(clip, zero=EXACT))
    shardings(zero_shard(clip, zero=MOMENTUM), zero=MOMENTUM)


@pytest.mark.parametrize(
    "inner",
    [optax.chain(optax.sgd(0.1, momentum=0.9), optax.keep_params_nonnegative()), optax.adam(0.1)],
    ids=["sgd", "adam"],
)
def test_elementwise_links_inside_work_on_chunks(inner):
    """b1 = 0 and dense steps make it ``inner`` on the mean gradient, with sharded state."""
    start = jax.tree.map(jnp.abs, make_params())
    history = train(descent(inner), start, 5, phase="dense")
    assert_close(history, alone(inner, start, 5), rtol=1e-4, atol=1e-5)
    specs = shardings(descent(inner)).opt_state.inner
    sharded = [p for p, s in jax.tree.leaves_with_path(specs) if s.spec == P("data")]
    assert sharded
    assert all("matrix" in jax.tree_util.keystr(p) for p in sharded)


def test_links_behind():
    """The owner's master has moved already: what a link took off is sent later."""
    start = make_params()
    tx = descent(optax.sgd(lambda count: jnp.where(count == 0, 1.0, 0.0)))
    plain = train(tx, start, 30, phase="dense")
    halved = train(optax.chain(tx, optax.scale(0.5)), start, 30, phase="dense")
    for key, x in start.items():
        assert_close(halved[key][0] - x, (plain[key][0] - x) / 2, rtol=1e-5, atol=1e-6)
        assert_close(halved[key][-1], plain[key][-1], rtol=1e-5, atol=1e-6)
