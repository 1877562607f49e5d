"""Formulas of the plan against compiled programs of the real train step; console script."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from onebit_zero_jax import ZeroConfig, cli, init, layer, onebit_adam, plan, train_step, wire_report

# Whole blocks; narrow ones with padding; dense leaves of three kinds.
SHAPES = {"big": (64, 128), "odd": (30, 50), "vector": (7,), "scalar": (), "small": (5, 8)}
BATCH = np.ones((8, 3), np.float32)


pytestmark = pytest.mark.usefixtures("few_optimizations")


def make_params(dtype=jnp.float32):
    return {k: jax.ShapeDtypeStruct(s, dtype) for k, s in SHAPES.items()}


def loss_fn(params, batch):
    return sum(
        jnp.mean(jnp.square(p.astype(jnp.float32) - jnp.mean(batch))) for p in params.values()
    )


def step_of(axes, options, dtype=jnp.float32, loss=loss_fn):
    shape = axes if isinstance(axes, tuple) else (axes,)
    names = ("slow", "fast")[: len(shape)]
    kinds = (AxisType.Auto,) * len(shape)
    mesh = jax.make_mesh(shape, names, kinds, devices=jax.devices()[: math.prod(shape)])
    zero = ZeroConfig(axis_name=names, **options)
    tx = onebit_adam(1e-3, zero=zero, warmup_steps=1)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), make_params(dtype))
    state = init(zeros, tx, mesh, zero)
    return train_step(loss, tx, mesh, zero), state, mesh


def nonzero(legs):
    return {leg: n for leg, n in legs.items() if n}


# ---------------------------------------------------------------- against programs


@pytest.mark.parametrize(
    "axes, options, phase, dtype",
    [
        (4, {"stage": 0}, "compressed", jnp.float32),
        ((2, 2), {"stage": 1}, "compressed", jnp.float32),
        ((2, 2), {"stage": 1}, "dense", jnp.float32),
        ((4, 2), {"stage": 2}, "compressed", jnp.float32),
        ((2, 2), {"stage": 2}, "dense", jnp.float32),
        (4, {"gather_bits": "dense", "momentum_dtype": "bfloat16"}, "compressed", jnp.bfloat16),
    ],
    ids=str,
)
def test_bytes_and_memory_of_compiled_steps(axes, options, phase, dtype):
    step, state, mesh = step_of(axes, options, dtype)
    found = plan(make_params(dtype), axes, **options)
    compiled = step.lower(state, BATCH, phase=phase).compile()
    report = wire_report(compiled, mesh, make_params(dtype))
    kind = {"dense": "dense step"}.get(phase, phase)
    for axis in mesh.axis_names:
        ours = {leg: by_axis[axis] for leg, by_axis in found.wire[kind].items()}
        assert nonzero(ours) == pytest.approx(nonzero(report.legs(axis)))
    assert found.bits[kind] == pytest.approx(report.bits_per_parameter("slow"))
    memory = compiled.memory_analysis()
    batch = BATCH.nbytes // found.slow // found.fast
    # Arguments: the state, the batch, the train step's own count.
    assert sum(found.memory.values()) + batch + 4 == memory.argument_size_in_bytes


CONFIGS = [
    {"stage": 0},
    {"stage": 0, "gather": "params", "gather_bits": 8},
    {"stage": 1, "gather_bits": 2, "error_dtype": "int8"},
    {"stage": 1, "gather": "params", "gather_bits": 3, "error_dtype": "bfloat16"},
    {"stage": 2, "gather": "momentum"},
    {"stage": 2, "gather_bits": 1, "momentum_dtype": "bfloat16"},
]


@pytest.mark.parametrize("options", CONFIGS, ids=str)
def test_bytes_and_memory_of_other_configurations(options):
    """Traced bytes are those of the compiled program (test_wire); memory is the state's."""
    step, state, _ = step_of(4, options)
    found = plan(make_params(), 4, **options)
    for kind, phase in (("compressed", "compressed"), ("dense step", "dense")):
        sent = step.bytes_sent(state, BATCH, phase=phase)
        ours = {leg: round(by_axis["slow"]) for leg, by_axis in found.wire[kind].items()}
        assert nonzero(ours) == nonzero(sent)
    kept = [x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state)]
    assert sum(found.memory.values()) + 4 == sum(kept)


# ---------------------------------------------------------------- two axes, stand-ins


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_axis_is_a_fast_axis_of_one(stage):
    assert plan(10**7, 8, stage=stage) == plan(10**7, (8, 1), stage=stage)


@pytest.mark.parametrize("axes", [(4, 8), (2, 2), (1, 8), (16, 1)])
def test_bytes_per_parameter_on_two_axes(axes):
    """The docstring's formulas; padding, scales and vectors add a few per cent."""
    s, f = axes
    n = s * f
    found = plan(10**9, axes)
    per = {a: found.sent("compressed", a) / 10**9 for a in ("slow", "fast")}
    assert per["slow"] == pytest.approx((s - 1) / n * 5 / 8, rel=0.03)
    assert per["fast"] == pytest.approx((f - 1) / f * (4 + 1 / 2), rel=0.03)
    dense = {a: found.sent("dense bf16", a) / 10**9 for a in ("slow", "fast")}
    assert dense == pytest.approx({"slow": (s - 1) / n * 4, "fast": (f - 1) / f * 4})
    assert found.memory["worker error"] == pytest.approx(4 * 10**9 / f, rel=0.01)
    assert found.memory["master"] == pytest.approx(4 * 10**9 / n, rel=0.01)


def test_a_number_stands_for_a_tree():
    tree = {
        "layers": jax.ShapeDtypeStruct((12, 768, 3072), jnp.float32),
        "embedding": jax.ShapeDtypeStruct((8192, 768), jnp.float32),
        "norms": jax.ShapeDtypeStruct((12, 768), jnp.float32),
        "scale": jax.ShapeDtypeStruct((768,), jnp.float32),
    }
    real = plan(tree, 8)
    assert real.parameters == sum(math.prod(x.shape) for x in tree.values())
    stand_in = plan(real.parameters, 8)
    assert stand_in.parameters == real.parameters
    for kind, bits in real.bits.items():
        assert stand_in.bits[kind] == pytest.approx(bits, rel=0.03)
    assert sum(stand_in.memory.values()) == pytest.approx(sum(real.memory.values()), rel=0.01)


@pytest.mark.parametrize("axes", [(2, 2), 4], ids=str)
def test_stage_3(axes):
    """Traced bytes: XLA on CPU merges the second gather of a layer with the first."""

    def by_layers(params, batch):
        one = layer(lambda p: jnp.mean(p * (p * jnp.mean(batch))))
        return sum(one(p) for p in params.values())

    step, state, _ = step_of(axes, {"stage": 3}, loss=by_layers)
    found = plan(make_params(), axes, stage=3)
    for kind, phase in (("compressed", "compressed"), ("dense step", "dense")):
        sent = step.bytes_sent(state, BATCH, phase=phase)
        ours = {leg: round(sum(by_axis.values())) for leg, by_axis in found.wire[kind].items()}
        assert nonzero(ours) == nonzero(sent)
    kept = [x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state)]
    assert sum(found.memory.values()) + 4 == sum(kept)


def test_stage_3_against_the_table():
    """Bytes per parameter of the README's table of memory."""
    s, f = 4, 8
    found = plan(10**9, (s, f), stage=3, param_dtype="bfloat16")
    total = sum(found.memory.values()) / 10**9
    assert total == pytest.approx(2 / f + 12 / (s * f) + 8 / f, rel=0.03)
    slow = [plan(10**9, (s, f), stage=k).sent("compressed", "slow") for k in (2, 3)]
    assert slow[0] == pytest.approx(slow[1], rel=1e-3)
    flat = plan(10**9, 8, stage=3)
    assert "Flat stage 3 is a bad idea" in flat.recommendation
    assert flat.memory["worker error"] > flat.memory["parameters"]


# ---------------------------------------------------------------- time


def test_average_over_the_run():
    found = plan(10**7, 8, steps=100, warmup_steps=20, refresh=10)
    # Refreshes after 10, 20, ... 80 of the 80 steps after warm-up.
    assert found.dense_fraction == (20 + 8) / 100
    both = [found.sent(k, "slow") for k in ("dense step", "compressed")]
    assert found.sent("average", "slow") == pytest.approx(0.28 * both[0] + 0.72 * both[1])
    assert plan(10**7, 8, steps=100, warmup_steps=20, refresh=None).dense_fraction == 0.2


def test_times_add_up():
    found = plan(10**8, (4, 8), slow_gbps=10, fast_gbps=1000, compute_seconds=0.5, tokens=10**6)
    want = 8 * found.sent("compressed", "slow") / 10e9
    want += 8 * found.sent("compressed", "fast") / 1000e9
    assert found.communication_seconds("compressed") == pytest.approx(want)
    assert found.step_seconds("compressed") == pytest.approx(want + 0.5 + found.coding_seconds)
    assert found.step_seconds("dense bf16") == pytest.approx(
        0.5 + found.communication_seconds("dense bf16")
    )
    from_flops = plan(10**8, 8, slow_gbps=10, tokens=10**6, flops=1e14)
    assert from_flops.compute_seconds == pytest.approx(6 * 10**8 * 10**6 / (8 * 1e14))
    assert plan(10**8, 8, coding_seconds=0.25).coding_seconds == 0.25


@pytest.mark.parametrize("axes, fast_gbps", [(8, None), ((4, 8), 1600.0)])
def test_break_even_is_where_the_times_meet(axes, fast_gbps):
    found = plan(10**9, axes, slow_gbps=10, fast_gbps=fast_gbps, compute_seconds=0.1)
    at = found.break_even_gbps
    assert found.step_seconds("average", at) == pytest.approx(found.step_seconds("dense bf16", at))
    below = plan(10**9, axes, slow_gbps=at * 0.99, fast_gbps=fast_gbps)
    above = plan(10**9, axes, slow_gbps=at * 1.01, fast_gbps=fast_gbps)
    assert (below.pays, above.pays) == (True, False)
    assert "times faster" in below.recommendation
    assert "Dense is faster here" in above.recommendation
    assert plan(10**9, 8).pays is None


def test_where_compression_never_pays():
    alone = plan(10**6, 1, slow_gbps=1)
    assert alone.break_even_gbps == 0
    assert not alone.pays
    # Dense steps in float32 send more than bfloat16 ZeRO.
    always_dense = plan(10**6, 8, steps=10, warmup_steps=10, slow_gbps=1e-3)
    assert always_dense.break_even_gbps == 0
    assert "does not pay at any bandwidth. Dense is faster here" in always_dense.recommendation
    assert plan(10**9, 8, coding_seconds=0.0).break_even_gbps == math.inf


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "options, match",
    [
        ({"params": 0}, "params must be a positive number or a tree, got 0"),
        ({"params": True}, "params must be a positive number or a tree, got True"),
        ({"params": {}}, "params is an empty tree"),
        ({"axes": 0}, r"axes must be the devices on the data axis, or \(slow, fast\), got 0"),
        ({"axes": (2, 2, 2)}, r"axes must be .*got \(2, 2, 2\)"),
        ({"axes": 2.0}, "axes must be .*got 2.0"),
        ({"stage": 4}, "stage must be 0, 1, 2 or 3, got 4"),
        ({"stage": 3, "gather": "momentum"}, "gather='momentum' needs replicated"),
        ({"gather_bits": 5}, "gather_bits must be one of"),
        ({"param_dtype": "foo"}, "param_dtype must be a floating dtype, got 'foo'"),
        ({"param_dtype": "int8"}, "not a floating-point array"),
        ({"slow_gbps": 0}, "slow_gbps must be positive and finite, got 0"),
        ({"slow_gbps": math.nan}, "slow_gbps must be positive and finite, got nan"),
        ({"axes": (2, 2), "slow_gbps": 1}, "fast_gbps is needed too"),
        ({"compute_seconds": -1}, "compute_seconds must be finite and at least 0, got -1"),
        ({"flops": 1e12}, "flops needs tokens"),
        ({"tokens": 0}, "tokens must be an integer of at least 1, got 0"),
        ({"steps": 10, "warmup_steps": 11}, "warmup_steps=11 exceeds steps=10"),
        ({"refresh": 0}, "refresh must be an integer of at least 1, got 0"),
    ],
    ids=str,
)
def test_bad_input(options, match):
    with pytest.raises(ValueError, match=match):
        plan(**{"params": 10**6, "axes": 8, **options})


# ---------------------------------------------------------------- console script


def run(capsys, *arguments):
    cli.main(["plan", *arguments])
    return capsys.readouterr().out


def test_console_table_and_json(capsys):
    line = ("--params", "1.3b", "--slow", "4", "--fast", "8", "--host-gbps", "100")
    line += ("--devices-per-host", "8", "--fast-gbps", "1600", "--tokens", "512k")
    table = run(capsys, *line)
    same = plan(1_300_000_000, (4, 8), slow_gbps=12.5, fast_gbps=1600.0, tokens=512_000)
    assert table == f"{same}\n"
    assert "12.5 Gbit/s slow, 1600 fast" in table
    found = json.loads(run(capsys, *line, "--json"))
    assert found == json.loads(json.dumps(same.to_dict()))
    assert found["break_even_gbps"] == same.break_even_gbps
    assert found["pays"] is True


def test_console_options(capsys):
    line = ("--params", "1e8", "--devices", "8", "--steps", "1000", "--refresh", "none")
    line += ("--gather-bits", "dense", "--compute-ms", "20", "--coding-ms", "5")
    found = json.loads(run(capsys, *line, "--json", "--slow-gbps", "1"))
    assert found["dense_fraction"] == 0.15
    assert (found["compute_seconds"], found["coding_seconds"]) == (0.02, 0.005)
    assert found["gather"] == "params, dense"


def test_chart(tmp_path, capsys):
    chart = tmp_path / "chart.svg"
    run(capsys, "--params", "1b", "--devices", "8", "--slow-gbps", "10", "--chart", str(chart))
    assert "break-even" in chart.read_text()
    assert [p.name for p in tmp_path.iterdir()] == ["chart.svg"]


@pytest.mark.parametrize(
    "line, match",
    [
        ("--params x --devices 8", "'x' is no number such as 350m, 1.3b or 1e9"),
        ("--params 1b", "give --devices, or --slow and --fast"),
        ("--params 1b --devices 8 --slow 2", "give --devices, or --slow and --fast"),
        ("--params 1b --slow 2", "give --devices, or --slow and --fast"),
        ("--params 1b --devices 8 --host-gbps 3", "--host-gbps and --devices-per-host go together"),
        ("--params 1b --devices 8 --refresh x", "'x' is neither a number of steps nor none"),
        ("--params 1b --devices 8 --gather-bits 5", "gather_bits must be one of"),
        ("--params 1b --devices 8 --chart x.gif", "--chart must end in one of"),
        ("--params 1b --devices 8 --chart nowhere/x.png", "there is no folder 'nowhere'"),
        ("--params 1b --slow 2 --fast 2 --chart x.png", "needs --fast-gbps"),
    ],
)
def test_console_errors(capsys, line, match):
    with pytest.raises(SystemExit) as stop:
        cli.main(["plan", *line.split()])
    assert stop.value.code == 2
    assert match in capsys.readouterr().err
