"""Rows of benchmarks/pods.py: a failed one is kept, one measured again replaces the old."""

import importlib.util
import json
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench_pods", ROOT / "benchmarks" / "pods.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_pods"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["bench_pods"]


def test_a_row_that_fails_says_so(bench, tmp_path, monkeypatch):
    row = bench.Row("tpu:v5e:nowhere", 1, "10m", 2)
    monkeypatch.setattr(bench.subprocess, "run", lambda *a, **k: raise_timeout(bench, *a, **k))
    failed = bench.run(row, 1.0)
    assert (failed["ok"], failed["error"]) == (False, "no result within 1 s")
    path = tmp_path / "results" / "pods.jsonl"
    bench.write(path, failed)
    bench.write(path, {**failed, "row": "another"})
    bench.write(path, {**failed, "error": "again"})
    rows = list(bench.read(path).values())
    assert [r["error"] for r in rows] == ["again", "no result within 1 s"]
    assert "failed: again" in bench.table(rows)
    json.dumps(rows)


def raise_timeout(bench, command, timeout, **_):
    raise bench.subprocess.TimeoutExpired(command, timeout)


def test_an_error_of_the_child_is_the_row(bench):
    # No such row: the child ends with an exception.
    failed = bench.run(bench.Row("tpu:v5e:2x4", 0, "10m", 2), 60.0)
    assert not failed["ok"]
    assert "StopIteration" in failed["error"]


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
def test_a_row_of_a_compiled_program(bench):
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh

    from onebit_zero_jax import pods, wire_report

    mesh = Mesh(pods.devices_of("tpu:v5e:2x4", 2), ("slow", "fast"))
    step = jax.shard_map(
        lambda x: jax.lax.psum(jax.lax.all_gather(x.astype(jnp.uint8), "slow"), "fast"),
        mesh=mesh,
        in_specs=jax.P(),
        out_specs=jax.P(),
        check_vma=False,
    )
    args = jax.ShapeDtypeStruct((1 << 20,), np.float32)
    compiled = jax.jit(step).lower(args).compile()
    report = wire_report(compiled, mesh, 1 << 20)
    found = pods.Compiled(report, 1.0, 1 << 22, 0, 3.0, 1.5)
    row = bench.summary(bench.Row("tpu:v5e:2x4", 2, "10m", 2), found, 1e6)
    # The sum of bytes over fast is an all-reduce of no small leg.
    assert row["compressed"] == "yes"
    assert row["accessed_over_floor"] == 2.0
    assert any("all-reduce" in x and "fast" in x for x in row["rewrites"])
    assert row["row"] in bench.table([row])
