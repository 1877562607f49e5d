"""Parameters sharded over a model axis: the optimizer works on the pieces each device has."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding

from onebit_zero_jax import (
    ZeroConfig,
    assert_in_sync,
    clip_by_global_norm,
    full_params,
    init,
    layer,
    onebit_adamw,
    onebit_lamb,
    resize,
    restore,
    save,
    state_shardings,
    train_step,
    wire_report,
)

pytestmark = pytest.mark.usefixtures("few_optimizations")

P = jax.P
WARMUP, REFRESH = 2, 3
# Pieces of cols have an odd side: stage 3 cuts the other one, as it must where model cuts it.
SHAPES = {"cols": (128, 10), "rows": (64, 96), "whole": (32, 64), "bias": (6,), "scale": (5,)}
SPECS = {"cols": P(None, "model"), "rows": P("model"), "bias": P("model")}
CUT = {"cols": 1, "rows": 0, "bias": 0}  # the dim that model cuts


def mesh_of(kind=AxisType.Auto, **sizes):
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), (kind,) * len(sizes), devices=devices)


def make_params(names=tuple(SHAPES)):
    rng = np.random.default_rng(0)
    return {k: rng.normal(size=SHAPES[k]).astype(np.float32) for k in names}


def loss_fn(params, batch):
    """Its gradient on a device is the mean of the device's examples."""
    terms = jax.tree.map(lambda p, x: jnp.sum(p * jnp.mean(x, axis=0)), params, batch)
    return sum(jax.tree.leaves(terms))


def make_batches(count, examples=4, names=tuple(SHAPES)):
    """Integers, so that every mean is exact, in any order."""
    rng = np.random.default_rng(1)
    draw = lambda k: rng.integers(-8, 8, (examples, *SHAPES[k])).astype(np.float32)
    return [{k: draw(k) for k in names} for _ in range(count)]


def in_pieces(tree, axis=0):
    """The tree with each leaf that the model axis cuts in two as a pair of leaves."""
    cut = lambda k, x: np.split(x, 2, axis=CUT[k] + axis) if k in CUT else x
    return {k: cut(k, x) for k, x in tree.items()}


def place(params, mesh):
    put = lambda k, x: jax.device_put(x, NamedSharding(mesh, SPECS.get(k, P())))
    return {k: put(k, x) for k, x in params.items()}


def make_tx(zero, clip=None, optimizer=onebit_adamw, **options):
    options = {"warmup_steps": WARMUP, "refresh": REFRESH, **options}
    tx = optimizer(1e-2, zero=zero, weight_decay=0.1, **options)
    return optax.chain(clip_by_global_norm(clip, zero=zero), tx) if clip else tx


def train(mesh, zero, params, batches, **options):
    tx = make_tx(zero, **options)
    state, step = init(params, tx, mesh, zero), train_step(loss_fn, tx, mesh, zero)
    metrics = {}
    for batch in batches:
        state, metrics = step(state, batch)
    return state, metrics


def without_model_axis(zero):
    """A mesh without it, where the pieces are leaves of their own."""
    sizes = dict.fromkeys(zero.axes, 2)
    batches = [in_pieces(b, axis=1) for b in make_batches(7)]
    state, metrics = train(mesh_of(**sizes), zero, in_pieces(make_params()), batches)
    return jax.tree.map(np.asarray, full_params(state)), float(metrics["residual_ratio"])


@pytest.mark.parametrize(
    "zero, kind",
    [
        pytest.param(ZeroConfig(stage=0), AxisType.Auto, marks=pytest.mark.slow),
        pytest.param(ZeroConfig(stage=1), AxisType.Explicit, marks=pytest.mark.slow),
        (ZeroConfig(stage=2), AxisType.Auto),
        (ZeroConfig(stage=3), AxisType.Explicit),
        pytest.param(
            ZeroConfig(axis_name=("slow", "fast"), stage=2), AxisType.Auto, marks=pytest.mark.slow
        ),
        (ZeroConfig(axis_name=("slow", "fast"), stage=3), AxisType.Explicit),
    ],
    ids=lambda v: f"{v.axis_name}-{v.stage}" if isinstance(v, ZeroConfig) else str(v),
)
def test_equals_pieces_as_leaves_of_their_own(zero, kind):
    """Bit for bit, through warm-up, compressed steps and a refresh."""
    want, residual = without_model_axis(zero)
    mesh = mesh_of(kind, **dict.fromkeys(zero.axes, 2), model=2)
    state, metrics = train(mesh, zero, place(make_params(), mesh), make_batches(7))
    assert metrics["phase"] == "compressed"
    got = in_pieces(jax.tree.map(np.asarray, full_params(state)))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert float(metrics["residual_ratio"]) == pytest.approx(residual, rel=1e-5)
    assert_in_sync(state)
    for name, x in full_params(state).items():
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, SPECS.get(name, P())), x.ndim), name


@pytest.mark.parametrize(
    "zero, kind",
    [
        (ZeroConfig(stage=2), AxisType.Auto),
        pytest.param(ZeroConfig(stage=2), AxisType.Explicit, marks=pytest.mark.slow),
        (ZeroConfig(axis_name=("slow", "fast"), stage=3), AxisType.Explicit),
        pytest.param(
            ZeroConfig(axis_name=("slow", "fast"), stage=3),
            AxisType.Auto,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ZeroConfig(axis_name=("slow", "fast"), stage=3, layer_bits=8),
            AxisType.Auto,
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda v: f"{v.stage}-{v.layer_bits}" if isinstance(v, ZeroConfig) else str(v),
)
def test_matmuls_follow_a_run_without_model_axis(zero, kind):
    """A column- and a row-parallel product; XLA reduces activations over the model axis."""
    rng = np.random.default_rng(0)
    params = {
        "emb": rng.normal(size=(32, 64)).astype(np.float32) / 6,
        "up": rng.normal(size=(64, 96)).astype(np.float32) / 8,
        "bias": np.zeros(96, np.float32),
        "down": rng.normal(size=(96, 32)).astype(np.float32) / 10,
    }
    specs = {"up": P(None, "model"), "bias": P("model"), "down": P("model")}

    @layer
    def block(params, x):
        hidden = jnp.tanh(x @ params["up"] + params["bias"])
        cut = "model" in (jax.typeof(params["down"]).sharding.spec or ())
        return jnp.matmul(hidden, params["down"], out_sharding=P(None, None) if cut else None)

    def loss_fn(params, batch):
        x = layer(lambda p: jnp.tanh(batch @ p))(params.pop("emb"))
        return jnp.mean(jnp.square(block(params, x) - jnp.sin(batch)))

    def run(mesh, params, zero, steps):
        tx = make_tx(zero, clip=1.0)
        state = init(params, tx, mesh, zero)
        step = train_step(loss_fn, tx, mesh, zero, accumulate=2)
        rng = np.random.default_rng(1)
        out = []
        for _ in range(steps):
            state, metrics = step(state, rng.normal(size=(16, 32)).astype(np.float32))
            out.append([float(metrics[k]) for k in ("loss", "gradient_norm", "residual_ratio")])
        batch = jax.ShapeDtypeStruct((16, 32), np.float32)
        report = wire_report(step.lower(state, batch, phase="compressed").compile(), mesh)
        for c in report.collectives:
            assert "model" not in c.across or c.op == "all-reduce", c
        return np.array(out), state, metrics["bytes_sent"]

    sizes = dict.fromkeys(zero.axes, 2)
    want, *_ = run(mesh_of(**sizes), params, zero, 8)
    mesh = mesh_of(kind, **sizes, model=2)
    placed = {
        k: jax.device_put(x, NamedSharding(mesh, specs.get(k, P()))) for k, x in params.items()
    }
    got, state, sent = run(mesh, placed, zero, 8)
    # The first step is the same to rounding; weights are those of pieces, so codes differ.
    np.testing.assert_allclose(got[0, 0], want[0, 0], rtol=1e-3 if zero.layer_bits else 1e-6)
    np.testing.assert_allclose(got[:, 0], want[:, 0], rtol=0.01)
    # Two sketches of one norm.
    np.testing.assert_allclose(got[:, 1], want[:, 1], rtol=4 * 2**0.5 * 0.022)
    np.testing.assert_allclose(got[:, 2], want[:, 2], rtol=0.03)
    assert "model" in jax.tree.leaves(state.params["up"])[0].sharding.spec
    if zero.stage == 3 and zero.layer_bits is None:
        # For each of two micro-batches; half comes from elsewhere. The gradient of the first
        # layer does not need its parameter again.
        emb, *pieces = (params[k].size // (2 if k in specs else 1) for k in ("emb", "up", "down"))
        assert sent["layer_gather"] == 2 * 4 * (emb + 2 * sum(pieces)) // 2


def test_norm_and_clipping_count_each_element_once():
    """Half of the square norm in a leaf that is cut, half in one that is not."""
    zero = ZeroConfig(stage=2)
    mesh = mesh_of(data=2, model=2)
    for sizes in ((1.0, 0.0), (0.0, 1.0)):
        batch = make_batches(1, names=("rows", "whole"))[0]
        batch = {k: s * x for (k, x), s in zip(batch.items(), sizes, strict=True)}
        params = place(make_params(("rows", "whole")), mesh)
        _, metrics = train(mesh, zero, params, [batch], clip=1.0)
        want = np.linalg.norm(np.concatenate([x.mean(0).ravel() for x in batch.values()]))
        assert abs(float(metrics["gradient_norm"]) / want - 1) < 4 * 0.022


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_trust_ratios_are_those_of_whole_leaves(stage):
    """In warm-up with a dense gather leg, LAMB does not depend on the model axis."""
    names = ("rows", "whole")
    zero = ZeroConfig(stage=stage, gather="params", gather_bits="dense")
    batches = make_batches(WARMUP, names=names)
    options = {"optimizer": onebit_lamb}
    want, _ = train(mesh_of(data=2), zero, make_params(names), batches, **options)
    mesh = mesh_of(data=2, model=2)
    got, _ = train(mesh, zero, place(make_params(names), mesh), batches, **options)
    for name in names:
        np.testing.assert_allclose(got.params[name], want.params[name], rtol=1e-5, atol=1e-6)


def test_nonfinite_in_a_piece_skips_on_every_device():
    zero, mesh = ZeroConfig(stage=2), mesh_of(data=2, model=2)
    tx = make_tx(zero)
    state, step = (
        init(place(make_params(), mesh), tx, mesh, zero),
        train_step(loss_fn, tx, mesh, zero),
    )
    first, bad = make_batches(2)
    state, _ = step(state, first)
    before = jax.tree.map(np.asarray, state)
    bad["cols"][3, 100, 9] = np.nan  # the last device of both axes
    state, metrics = step(state, bad)
    assert int(metrics["skipped_steps"]) == 1
    jax.tree.map(np.testing.assert_array_equal, before.params, state.params)
    jax.tree.map(np.testing.assert_array_equal, before.opt_state.leaves, state.opt_state.leaves)
    assert state.opt_state.nonfinite.tolist() == [0, 1, 0, 0, 0]  # leaves in order of names


@pytest.mark.parametrize(
    "zero, kind",
    [
        pytest.param(ZeroConfig(stage=1), AxisType.Explicit, marks=pytest.mark.slow),
        (ZeroConfig(stage=2), AxisType.Auto),
        (ZeroConfig(axis_name=("slow", "fast"), stage=3), AxisType.Explicit),
        pytest.param(
            ZeroConfig(axis_name=("slow", "fast"), stage=3), AxisType.Auto, marks=pytest.mark.slow
        ),
        pytest.param(ZeroConfig(stage=3, layer_bits=8), AxisType.Auto, marks=pytest.mark.slow),
    ],
    ids=lambda v: f"{v.axis_name}-{v.stage}" if isinstance(v, ZeroConfig) else str(v),
)
def test_nothing_is_gathered_over_the_model_axis(zero, kind):
    """The only traffic there: flags, and the 1031 values of the gradient's norm."""
    mesh = mesh_of(kind, **dict.fromkeys(zero.axes, 2), model=2)
    tx = make_tx(zero)
    state, step = (
        init(place(make_params(), mesh), tx, mesh, zero),
        train_step(loss_fn, tx, mesh, zero),
    )
    for phase in ("compressed", "dense"):
        compiled = step.lower(state, make_batches(1)[0], phase=phase).compile()
        report = wire_report(compiled, mesh)
        over_model = [c for c in report.collectives if "model" in c.across]
        assert {c.op for c in over_model} <= {"all-reduce"}
        # Norm, residual, flags; of n devices each sends 2 (n - 1) / n of a value.
        values = 1031 + 2 + len(SHAPES)
        assert report.sent("model") <= 4 * values * 2 * (1 - 1 / mesh.size)
        legs = {c.leg for c in report.collectives if zero.slow in c.across}
        assert {"reduce"} | ({"gather"} if not zero.flat else set()) <= legs
        assert zero.stage < 3 or "layer_gather" in {c.leg for c in report.collectives}


def test_an_axis_that_only_the_loss_uses():
    """Examples split further over a context axis that replicates parameters."""
    zero = ZeroConfig(stage=2)
    names = ("rows", "whole", "scale")
    want, _ = train(mesh_of(data=2), zero, make_params(names), make_batches(4, names=names))
    mesh = mesh_of(data=2, context=2)

    def split(params, batch):
        over = lambda x: jax.lax.with_sharding_constraint(x, P("context"))
        return loss_fn(params, jax.tree.map(over, batch))

    tx = make_tx(zero)
    state, step = init(make_params(names), tx, mesh, zero), train_step(split, tx, mesh, zero)
    for batch in make_batches(4, names=names):
        state, _ = step(state, batch)
    jax.tree.map(np.testing.assert_array_equal, state.params, want.params)
    assert_in_sync(state)


def test_in_a_users_own_shard_map():
    """With types; without them nothing tells which leaves are pieces."""
    zero, mesh = ZeroConfig(stage=2), mesh_of(data=2, model=2)
    tx = make_tx(zero, clip=1.0)
    params = place(make_params(("rows", "whole")), mesh)
    specs = {"rows": P("model"), "whole": P()}
    state_specs = jax.tree.map(lambda s: s.spec, state_shardings(params, tx, mesh, zero).opt_state)

    def update(params, state, grads):
        return tx.update(jax.tree.map(lambda g: g[0], grads), state, params, phase="dense")

    def run(**options):
        start = jax.shard_map(
            tx.init, mesh=mesh, in_specs=(specs,), out_specs=state_specs, **options
        )
        step = jax.shard_map(
            update,
            mesh=mesh,
            in_specs=(specs, state_specs, {"rows": P("data", "model"), "whole": P("data")}),
            out_specs=(specs, state_specs),
            **options,
        )
        grads = {k: x[:2] for k, x in make_batches(1, names=("rows", "whole"))[0].items()}
        return jax.jit(lambda p, g: step(p, start(p), g)[0])(params, grads)

    updates = run()
    assert updates["rows"].shape == SHAPES["rows"]
    assert float(jnp.abs(updates["rows"]).max()) > 0
    with pytest.raises(ValueError, match=r"\('model',\).*check_vma=True"):
        run(check_vma=False)


def test_checkpoints_keep_pieces(tmp_path):
    """On the same mesh the run goes on bit for bit; for another one there is no conversion."""
    pytest.importorskip("orbax.checkpoint")
    zero, mesh = ZeroConfig(stage=2), mesh_of(data=2, model=2)
    tx = make_tx(zero)
    step = train_step(loss_fn, tx, mesh, zero)
    state = init(place(make_params(), mesh), tx, mesh, zero)
    *before, last = make_batches(WARMUP + 2)
    for batch in before:
        state, _ = step(state, batch)
    save(tmp_path / "state", state)
    again, _ = restore(tmp_path / "state", place(make_params(), mesh), tx, mesh, zero)
    jax.tree.map(np.testing.assert_array_equal, again, state)
    wanted, _ = step(state, last)
    got, _ = step(again, last)
    jax.tree.map(np.testing.assert_array_equal, got.params, wanted.params)
    with pytest.raises(ValueError, match=r"sharded over model axes as .*'model'.*not at all"):
        restore(tmp_path / "state", make_params(), tx, mesh, zero)
    for resized in (mesh_of(data=4), mesh_of(data=4, model=2)):
        with pytest.raises(NotImplementedError, match=r"\['bias'\] is sharded over model axes"):
            resize(got, tx, resized, zero)


def test_bad_shardings():
    zero, mesh = ZeroConfig(stage=2), mesh_of(data=2, model=2)
    tx = make_tx(zero)
    odd = jax.ShapeDtypeStruct((7, 64), jnp.float32, sharding=NamedSharding(mesh, P("model")))
    with pytest.raises(ValueError, match=r"\['w'\] of shape \(7, 64\) does not divide.*model"):
        state_shardings({"w": odd}, tx, mesh, zero)
    params = place(make_params(), mesh)
    with pytest.raises(ValueError, match=r"sharded as .*'model'.*lacks"):
        init(params, tx, mesh_of(data=2), zero)
    deep = ZeroConfig(stage=3)
    both = NamedSharding(mesh_of(data=2, model=2, other=2), P("model", "other"))
    params = {"w": jax.device_put(np.ones((64, 64), np.float32), both)}
    with pytest.raises(ValueError, match=r"\['w'\].*model axes along every dim"):
        init(params, make_tx(deep), both.mesh, deep)
