"""Reports of compiled programs: of CPU here, of TPU and GPU from tests/data/make_hlo.py."""

import json
import math
import pathlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from onebit_zero_jax import (
    ZeroConfig,
    assert_compressed,
    onebit_adam,
    state_shardings,
    traffic,
    wire_report,
)

P = jax.P
DATA = pathlib.Path(__file__).parent / "data"
FIXTURES = {
    "gpu_step": {"data": 8},
    "tpu_slices_step": {"data": 16},
    "tpu_slices_two_speed": {"slow": 2, "a": 4, "b": 2},
    "tpu_fused": {"data": 2, "model": 4},
}


def abstract(axes):
    return AbstractMesh(tuple(axes.values()), tuple(axes))


def fixture(name, parameters=None):
    text = (DATA / f"{name}.hlo").read_text()
    return wire_report(text, abstract(FIXTURES[name]), parameters)


# ---------------------------------------------------------------- TPU and GPU


def rows(report):
    return [
        (c.op, c.dtype, c.leg, c.branch[-1][1] if c.branch else None) for c in report.collectives
    ]


def test_gpu_step():
    """NVIDIA H100, 8 devices: everything is a pair of a start and a done."""
    report = fixture("gpu_step", 4 * 64 * 64 + 64)
    assert rows(report) == [
        ("all-reduce", "f32", "dense_leaves+metrics", None),
        ("reduce-scatter", "f32", "reduce", 1),
        ("all-reduce", "f32", "weights", 1),
        ("all-gather", "u8", "gather", 1),
        ("all-to-all", "u8", "reduce", 0),
        ("all-gather", "u8", "gather", 0),
    ]
    assert all(c.asynchronous and c.overlapped is not None for c in report.collectives)
    by_row = {r: c for r, c in zip(rows(report), report.collectives, strict=True)}
    # Each device owns 2048 values, 2 blocks of 128 bytes and a scale.
    code = 2 * (128 + 4)
    for leg in (("all-to-all", "u8", "reduce", 0), ("all-gather", "u8", "gather", 0)):
        assert by_row[leg].sent == 7 * code
    assert by_row["reduce-scatter", "f32", "reduce", 1].sent == 7 * 2048 * 4
    # Branch 1 is the dense step.
    dense, compressed = (
        report.branches[f"{c.branch[0][0]}/{i}"] for c in report.collectives[1:2] for i in (1, 0)
    )
    assert dense.sent() > 5 * compressed.sent()
    assert report.sent() == dense.sent()


def test_tpu_step_between_slices():
    """TPU v5e, 2 slices of 8: collectives in two parts, names dropped."""
    report = fixture("tpu_slices_step")
    found = {
        (c.op, c.leg, c.branch[-1][1], c.between_slices): c for c in report.collectives if c.branch
    }
    code = 128 + 4  # one block
    # The all-to-all leaves through the host whole; an all-gather in two parts.
    assert found["all-to-all", "reduce", 0, True].sent == 15 * code
    assert found["all-gather", "gather", 0, True].sent == code
    assert found["all-gather", "gather", 0, False].sent == 7 * 2 * code
    # Within a slice XLA reduces all of the gradient, and scatters between slices only.
    assert found["all-reduce", "reduce", 1, False].sent == 2 * 7 / 8 * 4 * 4 * 64 * 64
    assert found["reduce-scatter", "reduce", 1, True].sent == 4 * 4 * 64 * 64 / 8 / 2
    between = [c for c in report.collectives if c.between_slices]
    assert all(c.asynchronous and c.leg_inferred and c.overlapped is not None for c in between)
    assert "reduce? [" in str(report)


def test_tpu_two_speed_axes():
    report = fixture("tpu_slices_two_speed")
    assert [(c.op, tuple(c.across), c.sent) for c in report.collectives if c.between_slices] == [
        ("collective-permute", ("slow",), 64 * 128 * 4),
        ("all-to-all", ("slow",), 64 * 128 / 2),
        ("all-to-all", ("slow", "b"), 64 * 128 * 3 / 4),
        ("reduce-scatter", ("slow",), 64 * 128 * 4 / 2),
        ("all-gather", ("slow",), 64 * 128),
        ("all-reduce", ("slow",), 128 * 4),
    ]
    # Of 3 peers in a group of slow x b, 2 are across slow.
    joint = report.collectives[2]
    assert joint.across == pytest.approx({"slow": joint.sent * 2 / 3, "b": joint.sent / 3})
    inside = [(c.op, tuple(c.across), c.sent) for c in report.collectives if not c.between_slices]
    assert inside == [("all-reduce", ("b",), 512), ("all-gather", ("b",), 64 * 128 * 2)]
    assert report.sent("a") == 0


def test_tpu_slices_on_a_mesh_of_other_order():
    """With the slices along the last axis, transfers between them cross that axis."""
    text = (DATA / "tpu_slices_two_speed.hlo").read_text()

    devices = [
        types.SimpleNamespace(slice_index=i % 2, id=(i % 2 + 1) * 100_000 + i // 2)
        for i in range(16)
    ]
    mesh = types.SimpleNamespace(shape={"fast": 8, "slow": 2}, devices=np.array(devices))
    found, _ = traffic.collectives(text, mesh)
    crossed = [tuple(c.across) for c in found if c.between_slices]
    assert crossed == [("slow",), ("slow",), ("fast", "slow"), ("slow",), ("slow",), ("slow",)]
    assert {tuple(c.across) for c in found if not c.between_slices} == {("fast",)}


def test_tpu_fusions():
    """Asynchronous fusions count once, in a loop of 6; all-reduce-scatter is a reduce-scatter."""
    report = fixture("tpu_fused")
    (gather,) = [c for c in report.collectives if c.op == "all-gather"]
    assert (gather.calls, gather.counted, gather.asynchronous) == (6, True, True)
    assert gather.overlapped == 1
    assert gather.sent == 4096 * 4096 * 2 / 2
    assert gather.total == 6 * gather.sent
    (scatter,) = [c for c in report.collectives if c.op == "reduce-scatter"]
    assert scatter.sent == 1064 * 4096 * 4  # XLA pads 1024 rows
    assert [tuple(c.across) for c in report.collectives if c.op == "collective-permute"] == [
        ("data",),
        ("model",),
    ]


# ---------------------------------------------------------------- programs of this machine


@pytest.fixture(scope="module")
def loops():
    """Loops, a branch and named phases on a mesh of two axes; and its report."""
    mesh = jax.make_mesh((2, 2), ("slow", "fast"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])

    def body(x, flag):
        def outer(carry, _):
            def inner(carry, _):
                return carry + jax.lax.psum(x + carry, "fast"), None

            carry, _ = jax.lax.scan(inner, carry, None, length=3)
            return carry + jax.lax.psum(carry, "slow"), None

        looped, _ = jax.lax.scan(outer, jnp.zeros(8), None, length=5)

        def dense():
            with jax.named_scope("phase_dense"), jax.named_scope("reduce_leg"):
                return jax.lax.psum(x, ("slow", "fast"))

        def compressed():
            with jax.named_scope("phase_compressed"), jax.named_scope("reduce_leg"):
                code = jax.lax.all_to_all(x.astype(jnp.uint8), "slow", 0, 0, tiled=True)
            return code.astype(jnp.float32)

        out = jax.lax.cond(flag, dense, compressed)

        def grow(carry):
            return jax.lax.psum(carry, "slow")

        return looped, out, jax.lax.while_loop(lambda c: c[0] < 100, grow, x)

    mapped = jax.shard_map(body, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False)
    compiled = jax.jit(mapped).lower(jnp.ones(8), True).compile()
    return wire_report(compiled, mesh, {"w": jnp.ones((4, 4))})


def test_loops_count_their_trips(loops):
    found = {(c.calls, tuple(c.across)): c for c in loops.collectives if not c.branch and c.counted}
    assert {k: c.total for k, c in found.items()} == {
        (15, ("fast",)): 15 * 32,
        (5, ("slow",)): 5 * 32,
    }
    (unknown,) = [c for c in loops.collectives if not c.counted]
    assert unknown.total == 32
    assert "1+" in str(loops)


def test_branches_and_phases(loops):
    dense, compressed = (
        [c for c in loops.collectives if c.phase == p] for p in ("dense", "compressed")
    )
    assert [(c.op, c.branch[0][1], c.total) for c in dense] == [("all-reduce", 1, 48)]
    assert [(c.op, c.branch[0][1], c.total) for c in compressed] == [("all-to-all", 0, 4)]
    rest = 15 * 32 + 5 * 32 + 32
    assert loops.sent() == rest + 48
    assert loops.in_phase("compressed").sent() == rest + 4
    assert sorted(r.sent() for r in loops.branches.values()) == [rest + 4, rest + 48]
    # One of three chunks of the dense step's all-reduce crosses the slow axis.
    assert loops.sent("slow") == 5 * 32 + 32 + 48 / 3
    assert loops.sent("slow") + loops.sent("fast") == loops.sent()
    assert loops.bits_per_parameter("slow") == 8 * loops.sent("slow") / 16


def test_json_and_table(loops):
    found = json.loads(json.dumps(loops.to_dict()))
    assert found["mesh"] == {"slow": 2, "fast": 2}
    assert found["totals"]["axes"]["slow"] == {
        "bytes": loops.sent("slow"),
        "bits_per_parameter": loops.bits_per_parameter("slow"),
    }
    assert len(found["collectives"]) == len(loops.collectives)
    table = str(loops).splitlines()
    assert table[0] == "mesh slow 2 x fast 2; bytes that a device sends per run"
    assert len([x for x in table if x.startswith("all-")]) == len(loops.collectives)


@pytest.fixture(scope="module")
def optimizer():
    """The transformation alone, which picks its phase with ``lax.cond``."""
    mesh = jax.make_mesh((4,), ("data",), (AxisType.Auto,), devices=jax.devices()[:4])
    zero = ZeroConfig(stage=2)
    tx = onebit_adam(1e-3, zero=zero)
    params = {"w": jax.ShapeDtypeStruct((64, 512), jnp.float32)}
    specs = jax.tree.map(lambda s: s.spec, state_shardings(params, tx, mesh, zero).opt_state)
    start = jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=specs, check_vma=False)
    update = jax.shard_map(
        tx.update, mesh=mesh, in_specs=(P(), specs, P()), out_specs=(P(), specs), check_vma=False
    )
    state = jax.eval_shape(start, params)
    return wire_report(jax.jit(update).lower(params, state, params).compile(), mesh, params)


def test_transformation_alone(optimizer):
    assert [
        (c.op, c.dtype, c.leg, c.branch[-1][1] if c.branch else None) for c in optimizer.collectives
    ] == [
        ("all-reduce", "f32", "dense_leaves", None),
        ("all-to-all", "u8", "reduce", 0),
        ("all-gather", "u8", "gather", 0),
        ("reduce-scatter", "f32", "reduce", 1),
        ("all-reduce", "f32", "weights", 1),
        # A refresh codes the momentum too.
        ("all-to-all", "u8", "reduce", 1),
        ("all-gather", "u8", "gather", 1),
    ]
    n, ring = 64 * 512, 3 / 4
    compressed, dense = optimizer.branches.values()
    # A flag; 1 and 4 bits and their scales; buffers from 4 KB on are rows of 128 bytes.
    rows = lambda size: 4 * 128 * math.ceil(size / 4 / 128)
    refresh = n / 8 + n / 1024 * 4
    gather = rows(n * 4 / 8 + n / 1024 * 4)
    assert compressed.sent("data") == ring * (8 + refresh + gather)
    weights, gather = 2 * 576 * 4, rows(n * 5 / 8 + n / 1024 * 4)
    assert dense.sent("data") == ring * (8 + n * 4 + refresh + weights + gather)


def test_example_of_the_docs(capsys):
    """docs/wire.md runs, and prints what it says it prints."""
    text = (DATA.parent.parent / "docs" / "wire.md").read_text()
    code, printed = text.split("```python\n")[1].split("```")[0], text.split("```\n")[2]
    exec(compile(code, "docs/wire.md", "exec"), {})
    assert capsys.readouterr().out == printed


# ---------------------------------------------------------------- the check for users' tests


def test_assert_compressed(optimizer):
    with pytest.raises(
        AssertionError,
        match=r"of the bytes over 'data' with branch \S*/1 are not uint8 \(at most 10.0 %\); "
        r"the largest: reduce-scatter %\S+ \(f32\[8192\], leg reduce, dense phase, branch 1 of .*, "
        r"98.3 kB\)",
    ):
        assert_compressed(optimizer, "data")
    (name, taken), *_ = optimizer.branches.items()
    assert name.endswith("/0")
    assert_compressed(taken, "data")
    assert_compressed(taken, "data", max_bits=5.0 * 3 / 4 + 0.13)
    with pytest.raises(AssertionError, match=r"3.8\d bits per parameter cross 'data'.*all-gather"):
        assert_compressed(taken, "data", max_bits=3.75)
    with pytest.raises(AssertionError, match="leg dense_leaves"):
        assert_compressed(taken, "data", max_other=0.0)


def test_assert_compressed_by_phase(loops):
    with pytest.raises(AssertionError, match="loop of unknown trip count"):
        assert_compressed(loops, "slow", max_bits=1e6, max_other=0.99, phase="compressed")
    branches = tuple(c for c in loops.collectives if c.branch)
    report = type(loops)(branches, loops.axes)
    with pytest.raises(AssertionError, match="dense phase"):
        assert_compressed(report, "slow")
    assert_compressed(report, "slow", phase="compressed")


def test_assert_compressed_of_a_program_without_traffic(optimizer):
    empty = type(optimizer)((), {"data": 4})
    with pytest.raises(AssertionError, match="nothing crosses axis 'data': is this the right"):
        assert_compressed(empty, "data")


@pytest.mark.parametrize(
    "options, match",
    [
        ({"axis": "model"}, r"axes \('data',\), not 'model'"),
        ({"max_other": 1.0}, "max_other is a share"),
        ({"phase": "warm-up"}, "phase must be 'dense', 'compressed' or None, got 'warm-up'"),
    ],
)
def test_bad_bounds(optimizer, options, match):
    with pytest.raises(ValueError, match=match):
        assert_compressed(optimizer, **{"axis": "data", **options})


def test_bad_input():
    mesh = abstract({"data": 4})
    text = "HloModule f, num_partitions=8\n\nENTRY %main () -> f32[] {\n}\n"
    with pytest.raises(ValueError, match=r"for 8 devices, the mesh has 4: \{'data': 4\}"):
        wire_report(text, mesh)
    with pytest.raises(ValueError, match="not the text of an HLO module: 'module @jit_f"):
        wire_report("module @jit_f {}", mesh)
    with pytest.raises(ValueError, match="no ENTRY computation"):
        wire_report("HloModule f\n", mesh)
    with pytest.raises(ValueError, match="compiled must be jit"):
        wire_report(jax.jit(jnp.sin).lower(1.0), mesh)
    with pytest.raises(ValueError, match=r"mesh must be a jax\.sharding\.Mesh, got 4"):
        wire_report(text, 4)
    with pytest.raises(ValueError, match="parameters must be a positive number or a tree, got 0"):
        wire_report(text, abstract({"data": 8}), 0)
    report = wire_report(text, abstract({"data": 8}))
    with pytest.raises(ValueError, match=r"wire_report\(..., parameters"):
        report.bits_per_parameter()
    with pytest.raises(ValueError, match="max_bits needs"):
        assert_compressed(report, "data", max_bits=5)
