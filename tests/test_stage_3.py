"""Stage 3: sharded parameters, gathered whole or layer by layer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from onebit_zero_jax import (
    TrainState,
    ZeroConfig,
    abstract_state,
    eval_step,
    full_params,
    init,
    layer,
    onebit_adamw,
    shard_params,
    train_step,
)
from onebit_zero_jax.layout import is_shard

pytestmark = pytest.mark.usefixtures("few_optimizations")

P = jax.P
SLOW_FAST = ("slow", "fast")
WARMUP, REFRESH = 2, 3
STEPS = 6  # dense, dense, compressed, compressed, dense (refresh), compressed


def make_mesh(shape):
    names = SLOW_FAST if len(shape) == 2 else ("data",)
    return jax.make_mesh(shape, names, devices=jax.devices()[: int(np.prod(shape))])


def make(shape, loss_fn, params, zero=None, **options):
    mesh = make_mesh(shape)
    if zero is None:
        zero = ZeroConfig(axis_name=SLOW_FAST if len(shape) == 2 else "data", stage=3)
    tx = onebit_adamw(1e-2, zero=zero, warmup_steps=WARMUP, refresh=REFRESH)
    return init(params, tx, mesh, zero), train_step(loss_fn, tx, mesh, zero, **options)


def train(shape, loss_fn, params, batches, zero=None, **options):
    state, step = make(shape, loss_fn, params, zero, **options)
    metrics = {}
    for batch in batches:
        state, metrics = step(state, batch)
    return state, metrics


def linear(params, batch):
    """Its gradient on a device is the mean of the device's examples: integers, exact."""
    return sum(jnp.sum(p * jnp.mean(batch[k], axis=0)) for k, p in params.items())


def integers(shapes, examples, count=STEPS):
    rng = np.random.default_rng(1)
    draw = lambda s: rng.integers(-8, 8, (examples, *s)).astype(np.float32)
    return [{k: draw(s) for k, s in shapes.items()} for _ in range(count)]


# ---------------------------------------------------------------- equals stage 2


def test_over_fast_is_stage_2_on_the_pieces():
    """Bit for bit: each device of the fast axis runs stage 2 on its piece, over the slow axis."""
    w = np.random.default_rng(0).normal(size=(16, 128)).astype(np.float32)
    batches = integers({"w": w.shape, "b": (5,)}, 4)
    params = {"w": w, "b": np.zeros(5, np.float32)}
    state, metrics = train((2, 2), linear, params, batches)
    assert metrics["phase"] == "compressed"
    pieces = {"left": w[:, :64], "right": w[:, 64:], "b": params["b"]}
    cut = [{"left": b["w"][..., :64], "right": b["w"][..., 64:], "b": b["b"]} for b in batches]
    want, _ = train((2,), linear, pieces, cut, ZeroConfig(stage=2))
    got, want = full_params(state), full_params(want)
    np.testing.assert_array_equal(got["w"], np.hstack([want["left"], want["right"]]))
    np.testing.assert_array_equal(got["b"], want["b"])


def test_flat_is_stage_2_with_a_dense_gather():
    """Where shards are chunks of the flattened leaf, to rounding; padding included."""
    w = np.random.default_rng(0).normal(size=(126, 3)).astype(np.float32)
    batches = integers({"w": (126, 3)}, 4)
    state, _ = train((4,), linear, {"w": w}, batches)
    assert state.params["w"].value.shape == (128, 3)
    want, _ = train((4,), linear, {"w": w}, batches, ZeroConfig(stage=2, gather_bits="dense"))
    # The mean of the row factors is taken over the padding too.
    np.testing.assert_allclose(full_params(state)["w"], full_params(want)["w"], atol=1e-6)


def test_stages_with_dense_gathers_are_one():
    """Bit for bit, where shards are chunks of the flattened leaf and nothing is padded."""
    w = np.random.default_rng(0).normal(size=(128, 3)).astype(np.float32)
    batches = integers({"w": w.shape}, 4)
    trained = [
        train((4,), linear, {"w": w}, batches, ZeroConfig(stage=stage, **options))[0]
        for stage, options in (
            (1, {"gather": "params", "gather_bits": "dense"}),
            (2, {"gather_bits": "dense"}),
            (3, {}),
        )
    ]
    first, *others = [np.asarray(full_params(state)["w"]) for state in trained]
    for other in others:
        np.testing.assert_array_equal(other, first)


# ---------------------------------------------------------------- layers


def make_model():
    rng = np.random.default_rng(0)
    draw = lambda *s: (rng.normal(size=s) / 6).astype(np.float32)
    return {
        "blocks": {"w1": draw(3, 32, 70), "w2": draw(3, 70, 32), "scale": draw(3, 32) + 1},
        "head": draw(32, 32),
        "bias": np.zeros(32, np.float32),
    }


def block(p, x):
    return x + jnp.tanh((x * p["scale"]) @ p["w1"]) @ p["w2"]


def plain(params, x):
    h = x
    for i in range(3):
        h = block(jax.tree.map(lambda a, i=i: a[i], params["blocks"]), h)
    return jnp.mean(jnp.square(h @ params["head"] + params["bias"] - 1))


def scanned(params, x):
    run = layer(block)
    h, _ = jax.lax.scan(lambda h, p: (run(p, h), None), x, params["blocks"])
    head = layer(lambda w, h: h @ w)
    return jnp.mean(jnp.square(head(params["head"], h) + params["bias"] - 1))


def looped(params, x):
    h = x
    for i in range(3):
        run = jax.checkpoint(layer(block))
        h = run(jax.tree.map(lambda a, i=i: a[i], params["blocks"]), h)
    head = layer(lambda w, h: h @ w)
    return jnp.mean(jnp.square(head(params["head"], h) + params["bias"] - 1))


INPUTS = [np.random.default_rng(2).normal(size=(8, 32)).astype(np.float32)] * STEPS
FLAT = ZeroConfig(axis_name=SLOW_FAST, stage=3, shard_params_over=SLOW_FAST)


@functools.cache
def trained(loss_fn, zero=None, steps=4, **options):
    state, metrics = train((2, 2), loss_fn, make_model(), INPUTS[:steps], zero, **options)
    return jax.tree.map(np.asarray, full_params(state)), metrics


@pytest.mark.parametrize("zero", [None, FLAT], ids=["fast", "flat"])
@pytest.mark.parametrize("loss_fn", [scanned, looped])
def test_layers_change_nothing(zero, loss_fn):
    """A scan, a loop and the whole model as one layer: the same parameters, to rounding."""
    got, _ = trained(loss_fn, zero)
    want, _ = trained(plain, zero)
    assert jax.tree.structure(got) == jax.tree.structure(make_model())
    # One flipped sign moves a value by about the learning rate; none flips in four steps.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), got, want)


@pytest.mark.parametrize(
    "zero", [None, pytest.param(FLAT, marks=pytest.mark.slow)], ids=["fast", "flat"]
)
def test_tied_unused_and_unequal_layers(zero):
    """And a buffer. Against the whole model as one layer; an unused leaf and its state stay."""
    rng = np.random.default_rng(0)
    shapes = {"table": (48, 32), "up": (32, 70), "down": (70, 32), "spare": (32, 48)}
    params = {k: (rng.normal(size=s) / 6).astype(np.float32) for k, s in shapes.items()}
    batches = [rng.integers(0, 48, (8, 5)) for _ in range(STEPS)]

    def loss_of(mark):
        # The table is gathered once for both of its places.
        @mark
        def tied(table, tokens, up, down):
            x = table[tokens]
            inner = mark(lambda p, x: jnp.tanh(x @ p))
            return inner(down, inner(up, x)) @ table.T

        def loss_fn(params, seen, tokens):
            logits = tied(params["table"], tokens, params["up"], params["down"])
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, tokens)
            return jnp.mean(loss), {"seen": seen["seen"] + 1.0}

        return loss_fn

    def run(mark):
        mesh = make_mesh((2, 2))
        config = zero or ZeroConfig(axis_name=SLOW_FAST, stage=3)
        tx = onebit_adamw(1e-2, weight_decay=0.1, zero=config, warmup_steps=WARMUP)
        state = init(params, tx, mesh, config, {"seen": np.zeros(3, np.float32)})
        step = train_step(loss_of(mark), tx, mesh, config, has_model_state=True)
        for batch in batches[:4]:
            state, _ = step(state, batch)
        return state

    got, want = run(layer), run(lambda fn: fn)
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6)
    jax.tree.map(close, full_params(got), full_params(want))
    assert got.model_state["seen"].tolist() == [4.0] * 3
    np.testing.assert_array_equal(
        got.opt_state.leaves["spare"].worker_error,
        np.zeros_like(got.opt_state.leaves["spare"].worker_error),
    )
    if zero is None:  # flat: no gather leg, weight decay moves the owner's shard
        np.testing.assert_array_equal(full_params(got)["spare"], params["spare"])


def test_layers_are_gathered_twice_over_the_fast_axis_alone():
    """Once each way; the slow axis sees codes, and the whole model as one layer is kept."""
    _, by_layers = trained(scanned)
    _, whole = trained(plain)
    values = 3 * 2 * 32 * 70 + 32 * 32  # the scales are too few to shard
    assert whole["bytes_sent"]["layer_gather"] == 4 * values // 2
    assert by_layers["bytes_sent"]["layer_gather"] == 2 * 4 * values // 2
    assert by_layers["bytes_sent"]["fast"] == 4 * values // 2
    assert by_layers["bytes_sent"]["gather"] < 4 * values // 2 / 6


@pytest.mark.parametrize("bits, share", [(16, 1 / 2), (8, 1 / 4)])
def test_layer_bits(bits, share):
    zero = ZeroConfig(axis_name=SLOW_FAST, stage=3, layer_bits=bits)
    got, metrics = trained(scanned, zero, steps=3)
    want, full = trained(scanned, steps=3)
    sent, dense = (m["bytes_sent"]["layer_gather"] for m in (metrics, full))
    assert share * dense <= sent <= share * dense * 1.05
    assert float(metrics["loss"]) == pytest.approx(float(full["loss"]), rel=0.01)
    assert not np.array_equal(got["head"], want["head"])


def test_accumulation_is_one_big_batch():
    got, _ = trained(scanned, steps=2, accumulate=2)
    want, _ = trained(scanned, steps=2)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, want)


def test_memory_holds_no_gathered_parameters():
    """Temporaries grow by less than a gathered layer for every layer more."""

    def temporaries(layers):
        wide = {"w1": jnp.zeros((layers, 128, 256)), "w2": jnp.zeros((layers, 256, 128))}

        def loss_fn(params, x):
            run = layer(lambda p, h: h + jnp.tanh(h @ p["w1"]) @ p["w2"])
            return jnp.mean(jax.lax.scan(lambda h, p: (run(p, h), None), x, params)[0])

        state, step = make((1, 8), loss_fn, wide)
        compiled = step.lower(state, np.zeros((8, 128), np.float32)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    values = 2 * 128 * 256
    # What zero_shard works on is a quarter of the layer; all of it gathered would be 4 bytes.
    assert (temporaries(12) - temporaries(4)) / 8 / values < 4.0


# ---------------------------------------------------------------- state


def test_state_is_sharded_and_full_params_gives_the_tree_back():
    params = make_model()
    state, _ = make((2, 2), scanned, params)
    w1 = state.params["blocks"]["w1"]
    assert is_shard(w1)
    assert w1.value.sharding.spec == P(None, None, "fast")
    assert {s.data.shape for s in w1.value.addressable_shards} == {(3, 32, 35)}
    assert state.opt_state.leaves["blocks"]["w1"].master.sharding.spec[0] == ("fast", "slow")
    jax.tree.map(np.testing.assert_array_equal, full_params(state), params)
    mesh = make_mesh((4,))
    shards = shard_params(params, mesh, ZeroConfig(stage=3))
    assert shards["blocks"]["w1"].value.shape == (3, 32, 72)
    assert not is_shard(shards["bias"])


def test_evaluation_is_the_loss():
    state, step = make((2, 2), scanned, make_model())
    mesh, zero = make_mesh((2, 2)), step._zero
    shards = TrainState(state.step, shard_params(make_model(), mesh, zero), None)
    for loss_fn in (scanned, plain):
        evaluate = eval_step(loss_fn, mesh, zero)
        value = evaluate(state, INPUTS[0])["loss"]
        assert float(value) == pytest.approx(float(plain(make_model(), INPUTS[0])), rel=1e-5)
        assert evaluate(shards, INPUTS[0])["loss"] == value


def test_aux_rng_and_gradient_norm():
    def loss_fn(params, x, rng):
        noise = jax.random.normal(rng, x.shape)
        return scanned(params, x + noise), {"noise": jnp.mean(noise)}

    state, step = make((2, 2), loss_fn, make_model(), has_aux=True, with_rng=True)
    _, metrics = step(state, INPUTS[0], jax.random.key(0))
    assert abs(float(metrics["aux"]["noise"])) < 0.3
    _, metrics = trained(plain, steps=1)
    norm = np.sqrt(
        sum(np.sum(np.square(g)) for g in jax.tree.leaves(jax.grad(plain)(make_model(), INPUTS[0])))
    )
    assert float(metrics["gradient_norm"]) == pytest.approx(float(norm), rel=4 * 0.022)


@pytest.mark.parametrize("zero", [None, FLAT], ids=["fast", "flat"])
def test_a_nan_skips_everywhere(zero):
    state, step = make((2, 2), linear, {"w": np.ones((16, 128), np.float32)}, zero)
    batches = integers({"w": (16, 128)}, 4, 2)
    state, _ = step(state, batches[0])
    before = jax.tree.map(np.asarray, state)
    batches[1]["w"][2, 3, 100] = np.nan
    state, metrics = step(state, batches[1])
    assert int(metrics["skipped_steps"]) == 1
    jax.tree.map(np.testing.assert_array_equal, before.params, state.params)
    jax.tree.map(np.testing.assert_array_equal, before.opt_state.leaves, state.opt_state.leaves)


# ---------------------------------------------------------------- bad input


def test_a_shard_outside_of_a_layer():
    state, _ = make((2, 2), scanned, make_model())
    for use in (jnp.tanh, np.tanh, lambda w: w[0], lambda w: w.T, lambda w: jnp.ones(32) @ w):

        def loss_fn(params, x, use=use):
            return scanned(params, x) + jnp.sum(use(params["head"]))

        _, step = make((2, 2), loss_fn, make_model())
        with pytest.raises((TypeError, AttributeError), match=r"outside layer\(fn\)"):
            step(state, INPUTS[0])
        with pytest.raises((TypeError, AttributeError), match=r"is a Shard, no array: full_params"):
            use(state.params["head"])


@pytest.mark.parametrize("zero", [None, FLAT], ids=["fast", "flat"])
def test_parts_of_a_shard_outside_of_a_layer(zero):
    """Trees are open: their leaves are arrays, of one device's part."""

    def square(tree, x):
        return sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree))

    def in_a_scan(tree, x):
        total = jnp.zeros(())  # a constant carry: the step itself has no axis types
        return jax.lax.scan(lambda t, w: (t + square(w, x), None), total, tree)[0]

    for leaks, names in (
        (square, r"of \['blocks'\]\['w1'\], \['blocks'\]\['w2'\], \['head'\]"),
        (lambda p, x: in_a_scan(p["blocks"]["w2"], x), r"of \['blocks'\]\['w2'\] outside"),
        (lambda p, x: scanned(jax.tree.map(lambda w: 2 * w, p), x), None),
        (lambda p, x: square([p["bias"], p["blocks"]["scale"]], x), None),
        (lambda p, x: jax.lax.axis_index(SLOW_FAST) * jnp.sum(x), None),
    ):
        loss_fn = lambda params, x, leaks=leaks: scanned(params, x) + leaks(params, x)
        state, step = make((2, 2), loss_fn, make_model(), zero)
        if names is None:
            step.lower(state, INPUTS[0], phase="dense")
            continue
        with pytest.raises(ValueError, match=names):
            step(state, INPUTS[0])
        with pytest.raises(ValueError, match="outside layer"):
            eval_step(loss_fn, make_mesh((2, 2)), step._zero)(state, INPUTS[0])


def test_arguments():
    with pytest.raises(ValueError, match=r"takes a function fn\(params, \*args\), got 3"):
        layer(3)
    with pytest.raises(ValueError, match="takes a TrainState, got dict"):
        full_params({})
    with pytest.raises(ValueError, match=r"mesh has axes \('data',\) but zero.axis_name is"):
        shard_params(make_model(), make_mesh((4,)), FLAT)


def test_config():
    for kwargs, message in (
        ({"stage": 2, "shard_params_over": "data"}, "shard_params_over='data' needs stage=3"),
        ({"stage": 2, "layer_bits": 8}, "layer_bits=8 needs stage=3"),
        ({"stage": 3, "layer_bits": 4}, "layer_bits must be 8, 16 or None, got 4"),
        ({"stage": 3, "gather": "momentum"}, "gather='momentum' needs replicated parameters"),
        ({"stage": 3, "shard_params_over": "model"}, "shard_params_over must be 'data'"),
        (
            {"stage": 3, "axis_name": SLOW_FAST, "shard_params_over": "slow"},
            "shard_params_over must be 'fast' or every",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            ZeroConfig(**kwargs)


def test_own_loop_needs_shards():
    zero = ZeroConfig(stage=3)
    tx = onebit_adamw(1e-2, zero=zero)
    start = jax.shard_map(
        tx.init, mesh=make_mesh((4,)), in_specs=P(), out_specs=P(), check_vma=False
    )
    with pytest.raises(ValueError, match=r"\['w'\] of shape \(32, 32\) is not sharded"):
        jax.eval_shape(start, {"w": jnp.zeros((32, 32))})


# ---------------------------------------------------------------- links around, flat: gradients
# have the shape of whole leaves there, states and updates that of shards


def flat_bytes(wrap, names=("w", "u")):
    """Traces a step of ``wrap(tx)`` on 4 devices."""
    zero, mesh = ZeroConfig(stage=3), make_mesh((4,))
    params = {k: np.ones((16, 20), np.float32) for k in names}
    tx = wrap(onebit_adamw(1e-2, zero=zero))
    loss = lambda p, b: sum(jnp.sum(x) * b[0] for x in p.values())
    state = abstract_state(params, tx, mesh, zero)
    return train_step(loss, tx, mesh, zero).bytes_sent(state, np.ones(4, np.float32))


def test_frozen_leaves_when_flat():
    labels = {"w": "train", "u": "freeze"}
    frozen = flat_bytes(lambda tx: optax.partition({"train": tx, "freeze": optax.set_to_zero()},
                                                   labels))  # fmt: skip
    assert frozen["reduce"] == flat_bytes(lambda tx: tx, names=("w",))["reduce"] > 0
    with pytest.raises(ValueError, match=r"\['u'\] differs between devices.*set_to_zero"):
        flat_bytes(lambda tx: optax.masked(tx, {"w": True, "u": False}))


def test_links_with_images_of_gradients_are_refused_when_flat():
    for link in (optax.trace(0.9), optax.ema(0.9)):
        with pytest.raises(ValueError, match=r"\['u'\] has the shape of a shard.*\('data',\)"):
            flat_bytes(lambda tx, link=link: optax.chain(link, tx))
    flat_bytes(lambda tx: optax.chain(optax.add_decayed_weights(0.0), optax.scale(2.0), tx))
