"""Saved, restored, converted, damaged: nothing is lost and nothing wrong is loaded."""

import dataclasses
import functools
import gc
import json
import os
import pathlib
import pickle
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

from onebit_zero_jax import ZeroConfig, init, onebit_adamw, onebit_lion, train_step
from onebit_zero_jax.checkpoint import CheckpointManager, restore, save
from onebit_zero_jax.checkpoint_content import CorruptCheckpointError, _crc
from onebit_zero_jax.resize import resize

P = jax.P
WARMUP, REFRESH = 3, 2
ZEROS = {
    "stage 0": ZeroConfig(stage=0),
    "stage 0, params": ZeroConfig(stage=0, gather="params", momentum_dtype="bfloat16"),
    "stage 1": ZeroConfig(stage=1, error_dtype="int8"),
    "stage 2": ZeroConfig(stage=2),
    "stage 3": ZeroConfig(stage=3),
    "stage 3, fast": ZeroConfig(axis_name=("slow", "fast"), stage=3),
}
QUICK = ("stage 1", "stage 2", "stage 3, fast")
ZERO = ZEROS["stage 2"]


pytestmark = pytest.mark.usefixtures("few_optimizations")


def mesh_of(parts=2, kind=AxisType.Auto):
    return jax.make_mesh((parts,), ("data",), (kind,), devices=jax.devices()[:parts])


def mesh_for(zero):
    """The mesh that runs of ``zero`` are trained on."""
    shape = (2,) * len(zero.axes)
    kinds = (AxisType.Auto,) * len(shape)
    return jax.make_mesh(shape, zero.axes, kinds, devices=jax.devices()[: 2 ** len(shape)])


def make_params():
    rng = np.random.default_rng(0)
    return {
        "a/b.c": jnp.asarray(rng.normal(size=(32, 16)), jnp.float32),
        "b": [jnp.zeros(3), jnp.zeros((0, 4))],
    }


SHAPES = jax.eval_shape(make_params)


def make_tx(zero=ZERO, warmup=WARMUP, **kwargs):
    rate = optax.linear_schedule(0.1, 0.01, 10)
    return onebit_adamw(rate, zero=zero, warmup_steps=warmup, refresh=REFRESH, **kwargs)


def loss_fn(params, batch):
    pull = jnp.mean(jnp.square(params["a/b.c"] - batch[:, :, None]))
    return pull + jnp.sum(jnp.square(params["b"][0] - batch[0, :3]))


def batch_of(step):
    return np.random.default_rng(step).normal(size=(4, 32)).astype("f4")


@functools.cache
def step_of(zero):
    return train_step(loss_fn, make_tx(zero), mesh_for(zero), zero)


def run(state, zero, first, last):
    for t in range(first, last):
        state, _ = step_of(zero)(state, batch_of(t))
    return state


def start(zero=ZERO):
    return init(make_params(), make_tx(zero), mesh_for(zero), zero)


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
        assert x.sharding.mesh == y.sharding.mesh


@functools.cache
def trained(zero=ZERO, steps=4):
    return run(start(zero), zero, 0, steps)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of four steps, not to be changed."""
    path = tmp_path_factory.mktemp("saved") / "four"
    save(path, trained(), data_position={"example": 16})
    return path


@pytest.fixture
def copy(saved, tmp_path):
    yield pathlib.Path(shutil.copytree(saved, tmp_path / "copy"))
    gc.collect()  # reads that Orbax drops warn when they are collected: here, in no later test


drops_reads = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore:coroutine:RuntimeWarning"
)


# ---------------------------------------------------------------- as if it had not stopped


@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in ZEROS],
)
def test_restored_run_is_the_run(name, tmp_path):
    """Stopped in warm-up and after the first compressed step, in the middle of the refreshes."""
    zero = ZEROS[name]
    with CheckpointManager(tmp_path, keep=2) as manager:
        state = start(zero)
        for t in range(8):
            if t in (2, 4):
                manager.save(state, data_position={"next": t})
            # Donates what is being written.
            state = run(state, zero, t, t + 1)
    with CheckpointManager(tmp_path, keep=2) as manager:
        assert manager.steps() == [2, 4]
        for stopped in (2, 4):
            tx, mesh = make_tx(zero), mesh_for(zero)
            again, position = manager.restore(SHAPES, tx, mesh, zero, step=stopped)
            assert position == {"next": stopped}
            same(run(again, zero, position["next"], 8), state)


def test_everything_is_kept_bit_for_bit(saved):
    state, position = restore(saved, SHAPES, make_tx(), mesh_of(), ZERO)
    assert position == {"example": 16}
    same(state, trained())
    errors = state.opt_state.leaves["a/b.c"].worker_error
    assert np.any(np.asarray(errors))
    assert int(state.step) == int(state.opt_state.applied) == 4


def test_model_state_and_explicit_mesh(tmp_path):
    mesh = mesh_of(kind=AxisType.Explicit)
    stats = {"mean": jnp.arange(3.0), "seen": jnp.int32(7)}
    state = init(make_params(), make_tx(), mesh, ZERO, stats)
    save(tmp_path / "x", state)
    back, position = restore(tmp_path / "x", SHAPES, make_tx(), mesh, ZERO, stats)
    assert position is None
    same(back, state)
    with pytest.raises(ValueError, match=r"lacks .model_state\['more'\]"):
        restore(tmp_path / "x", SHAPES, make_tx(), mesh, ZERO, {**stats, "more": jnp.ones(2)})
    with pytest.raises(ValueError, match=r"holds .model_state\['mean'\] and .* no place"):
        restore(tmp_path / "x", SHAPES, make_tx(), mesh, ZERO)


def test_stage_3_on_an_explicit_two_speed_mesh(tmp_path):
    zero = ZeroConfig(axis_name=("slow", "fast"), stage=3)
    mesh = jax.make_mesh((2, 2), zero.axes, (AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    state = init(make_params(), make_tx(zero), mesh, zero)
    save(tmp_path / "x", state)
    same(restore(tmp_path / "x", SHAPES, make_tx(zero), mesh, zero)[0], state)


def test_without_worker_errors(tmp_path):
    tx = onebit_lion(1e-3, zero=ZERO)
    state = init(make_params(), tx, mesh_of(), ZERO)
    save(tmp_path / "x", state)
    same(restore(tmp_path / "x", SHAPES, tx, mesh_of(), ZERO)[0], state)


@pytest.mark.slow
def test_from_stage_3_to_others(tmp_path):
    """What links in front hold in the shape of shards is refused, before anything is read."""
    old, flat = ZEROS["stage 3, fast"], ZEROS["stage 3"]
    state = trained(old)
    save(tmp_path / "x", state)
    with pytest.raises(ValueError, match="saved with stage=3, zero has 2"):
        restore(tmp_path / "x", SHAPES, make_tx(), mesh_of(), ZERO)
    for zero, parts in ((ZERO, 2), (flat, 4)):
        mesh, tx = mesh_of(parts), make_tx(zero)
        there, _ = restore(tmp_path / "x", SHAPES, tx, mesh, zero, resize=True)
        same(there, resize(state, tx, mesh, zero))
    linked = lambda zero: optax.chain(optax.trace(0.9), make_tx(zero))
    save(tmp_path / "linked", init(make_params(), linked(old), mesh_for(old), old))
    with pytest.raises(ValueError, match=r"\.trace\['a/b.c'\] is state of a link in front"):
        restore(tmp_path / "linked", SHAPES, linked(ZERO), mesh_of(), ZERO, resize=True)


# ---------------------------------------------------------------- elsewhere


@pytest.mark.parametrize(
    ("shape", "name", "kind"),
    [
        ((4,), "stage 2", AxisType.Explicit),
        pytest.param((3,), "stage 1", AxisType.Auto, marks=pytest.mark.slow),
        ((2,), "stage 0", AxisType.Auto),
        ((2, 2), "stage 2", AxisType.Auto),
        ((2, 2), "stage 3", AxisType.Explicit),
        pytest.param((4,), "stage 3", AxisType.Auto, marks=pytest.mark.slow),
    ],
)
def test_restore_with_resize_is_resize(saved, shape, name, kind):
    names: Any = ("data",) if len(shape) == 1 else ("slow", "fast")
    zero = dataclasses.replace(ZEROS[name], axis_name=names)
    devices = jax.devices()[: int(np.prod(shape))]
    mesh = jax.make_mesh(shape, names, (kind,) * len(shape), devices=devices)
    there, position = restore(saved, SHAPES, make_tx(zero), mesh, zero, resize=True)
    assert position == {"example": 16}
    same(there, resize(trained(), make_tx(zero), mesh, zero))


def test_another_schedule_needs_resize_and_is_that_of_tx(saved):
    tx = make_tx(warmup=5)
    with pytest.raises(ValueError, match=r"saved with Phases\(warmup_steps=3.*tx has Phases"):
        restore(saved, SHAPES, tx, mesh_of(), ZERO)
    state, _ = restore(saved, SHAPES, tx, mesh_of(), ZERO, resize=True)
    assert state.opt_state.run.phases.warmup_steps == 5
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(state), jax.tree.leaves(trained()))


@pytest.mark.parametrize(
    ("message", "change"),
    [
        (r"saved on 2 \(data\) devices, the mesh has 4 \(data\).* pass resize=True", {"parts": 4}),
        ("saved with stage=2, zero has 1", {"zero": ZEROS["stage 1"]}),
        ("saved with error_dtype='float32', zero has 'int8'", {"zero": ZEROS["stage 1"]}),
        ("saved with gather_bits=None, zero has 2", {"zero": ZeroConfig(gather_bits=2)}),
    ],
)
def test_mismatches_are_named(saved, message, change):
    zero = change.get("zero", ZERO)
    with pytest.raises(ValueError, match=message):
        restore(saved, SHAPES, make_tx(zero), mesh_of(change.get("parts", 2)), zero)


def test_other_parameters_and_optimizers_are_refused(saved):
    wide = {**SHAPES, "a/b.c": jax.ShapeDtypeStruct((32, 17), jnp.float32)}
    with pytest.raises(ValueError, match=r"saved as float32 of shape \(32, 16\), params has .*17"):
        restore(saved, wide, make_tx(), mesh_of(), ZERO, resize=True)
    half = {**SHAPES, "a/b.c": jax.ShapeDtypeStruct((32, 16), jnp.bfloat16)}
    with pytest.raises(ValueError, match="params has bfloat16"):
        restore(saved, half, make_tx(), mesh_of(), ZERO)
    with pytest.raises(ValueError, match=r"params has a parameter \['new'\] that .*four lacks"):
        restore(saved, {**SHAPES, "new": jnp.ones(2)}, make_tx(), mesh_of(), ZERO)
    with pytest.raises(ValueError, match=r"four has a parameter \['b'\].* params lacks"):
        restore(saved, {"a/b.c": SHAPES["a/b.c"]}, make_tx(), mesh_of(), ZERO)
    traced = optax.chain(optax.trace(0.9), make_tx())
    with pytest.raises(ValueError, match=r"the checkpoint lacks \.opt_state"):
        restore(saved, SHAPES, traced, mesh_of(), ZERO)


# ---------------------------------------------------------------- many checkpoints


def test_retention_and_steps(tmp_path):
    state = start()
    with CheckpointManager(tmp_path / "runs", keep=2) as manager:
        assert manager.latest_step() is None
        with pytest.raises(FileNotFoundError, match="runs holds no complete checkpoint"):
            manager.restore(SHAPES, make_tx(), mesh_of(), ZERO)
        for t in range(4):
            manager.save(state, data_position=t)
            state = run(state, ZERO, t, t + 1)
        manager.wait()
        assert manager.steps() == [2, 3]
        assert manager.restore(SHAPES, make_tx(), mesh_of(), ZERO)[1] == 3
        with pytest.raises(FileNotFoundError, match=r"of step 1; there are \[2, 3\]"):
            manager.restore(SHAPES, make_tx(), mesh_of(), ZERO, step=1)
    assert sorted(os.listdir(tmp_path / "runs")) == ["2", "3"]


def test_half_written_checkpoints_are_never_seen(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "4")
    half = tmp_path / "5.orbax-checkpoint-tmp-12"
    shutil.copytree(saved, half)
    shutil.rmtree(half / "state")
    with pytest.raises(ValueError, match="never finished"):
        restore(half, SHAPES, make_tx(), mesh_of(), ZERO)
    with CheckpointManager(tmp_path) as manager:
        assert manager.steps() == [4]
        same(manager.restore(SHAPES, make_tx(), mesh_of(), ZERO)[0], trained())
    assert not half.exists()


# ---------------------------------------------------------------- damage


def files_of(path):
    return sorted(f.relative_to(path) for f in path.rglob("*") if f.is_file())


def attempt(path):
    """What is wrong with a checkpoint; None if it reads as it was written."""
    try:
        state, _ = restore(path, SHAPES, make_tx(), mesh_of(), ZERO)
    except CorruptCheckpointError as e:
        return str(e)
    same(state, trained())
    return None


def flipped(data, at):
    data = bytearray(data)
    for i in at:
        data[i] ^= 1 << (i % 8)
    return bytes(data)


@drops_reads
def test_damage_to_any_file_is_found_or_harmless(copy):
    """What is found names the directory, and the file if it holds values."""
    found = {}
    for file in files_of(copy):
        path = copy / file
        intact = path.read_bytes()
        bits = range(0, len(intact), max(1, len(intact) // 7))
        needed = file.name in ("_CHECKPOINT_METADATA", "manifest.ocdbt") or file.parent.name == "d"
        for damaged in (flipped(intact, bits), intact[: len(intact) // 2], None)[
            : 3 if needed else 1
        ]:
            path.unlink()
            if damaged is not None:
                path.write_bytes(damaged)
            error = attempt(copy)
            if error:
                assert str(copy) in error
                found.setdefault(str(file), []).append(error)
        path.write_bytes(intact)
    # Others (the time of the save, the process's own index) are not needed to read.
    values = {str(f) for f in files_of(copy) if f.parent.name == "d" and len(f.parts) == 4}
    assert len(values) == 1
    for file in values | {"_CHECKPOINT_METADATA", "state/manifest.ocdbt"}:
        assert len(found[file]) == 3
    for file in values:
        assert all(str(copy / file) in e or "no file at all" in e for e in found[file])


@drops_reads
def test_one_flipped_bit_of_a_value_is_found(copy):
    """Orbax loads it without a word: only our digest tells."""
    (file,) = copy.glob("state/ocdbt.process_0/d/*")
    intact = file.read_bytes()
    errors = []
    for at in range(100, len(intact), len(intact) // 4):
        file.write_bytes(flipped(intact, [at]))
        errors.append(attempt(copy))
    found = [e for e in errors if e]
    assert all(str(file) in e for e in found)
    assert any("came back with other values than were saved" in e for e in found)


def test_metadata_is_checked(copy):
    file = copy / "_CHECKPOINT_METADATA"
    intact = json.loads(file.read_text())

    def refuse(match, error=CorruptCheckpointError, **changes):
        content = json.loads(json.dumps(intact))
        ours = content["custom_metadata"]
        for key, value in changes.items():
            ours["onebit_zero_jax"][key] = value
        if error is ValueError or "signed" in match:
            ours["crc32"] = _crc(ours["onebit_zero_jax"])
        file.write_text(json.dumps(content))
        with pytest.raises(error, match=match.removeprefix("signed ")):
            restore(copy, SHAPES, make_tx(), mesh_of(), ZERO)

    refuse("checksum does not match", data_position={"example": 17})
    refuse("has format 9, this version reads 1", ValueError, format=9)
    refuse("signed does not make sense", zero={"stage": 7})
    refuse("signed does not make sense", zero={"__class__": "os.system"})
    refuse("signed does not make sense", arrays={".step": [[], "int32"]})
    cut = {k: v for k, v in intact.items() if k != "custom_metadata"}
    file.write_text(json.dumps(cut))
    with pytest.raises(CorruptCheckpointError, match="holds no metadata of onebit_zero_jax"):
        restore(copy, SHAPES, make_tx(), mesh_of(), ZERO)


def test_loading_unpickles_nothing(saved, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("pickle was called")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    restore(saved, SHAPES, make_tx(), mesh_of(), ZERO)


# ---------------------------------------------------------------- bad input


def test_bad_input(saved, tmp_path):
    state = trained()
    with pytest.raises(ValueError, match="four exists"):
        save(saved, state)
    with pytest.raises(ValueError, match="state must come from init, got dict"):
        save(tmp_path / "x", {"w": 1})
    for position in (object(), {1: 2}, float("nan"), (1, 2)):
        with pytest.raises(ValueError, match="data_position must come back from JSON"):
            save(tmp_path / "x", state, data_position=position)
    assert not (tmp_path / "x").exists()
    for path in ("", None, 3, "a\0b"):
        with pytest.raises(ValueError, match="path must name a directory"):
            save(path, state)
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at .*nothing"):
        restore(tmp_path / "nothing", SHAPES, make_tx(), mesh_of(), ZERO)
    for keep in (0, True, 1.5):
        with pytest.raises(ValueError, match="keep must be"):
            CheckpointManager(tmp_path, keep=keep)


def test_without_orbax_the_extra_is_named(monkeypatch, tmp_path):
    import sys

    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ImportError, match=r"onebit-zero-jax\[checkpoint\]"):
        save(tmp_path / "x", trained())
