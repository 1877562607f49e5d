"""Remakes the HLO fixtures of tests/test_report.py: programs for chips that are not here.

    python tests/data/make_hlo.py tpu    # needs libtpu (pip install libtpu)
    python tests/data/make_hlo.py gpu    # needs jax[cuda12]; no GPU

Programs are compiled ahead of time, then trimmed to what a reader of collectives looks at:
collectives, the instructions around them, the loops and branches they are in, without backend
configurations, parameter lists and source positions. The script checks that the report of the
trimmed program is that of the whole one.
"""

import os
import pathlib
import re
import sys
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

import onebit_zero_jax as ob
from onebit_zero_jax import hlo
from onebit_zero_jax.pods import devices_of
from onebit_zero_jax.wire import LEGS

P = jax.P
HERE = pathlib.Path(__file__).parent
LEG = re.compile("|".join(LEGS))
# Instructions this far from a collective stay.
REACH = 3


def mesh_of(devices: Any, shape: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
    return Mesh(np.array(devices).reshape(shape), names, axis_types=(AxisType.Auto,) * len(names))


def shapes(tree: Any, mesh: Mesh, specs: Any) -> Any:
    def shape(x: Any, spec: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(shape, tree, specs)


def optimizer_step(devices: Any) -> Any:
    """Stage 1 under ``lax.cond``: the program holds both phases."""
    mesh = mesh_of(devices, (len(devices),), ("data",))
    zero = ob.ZeroConfig(stage=1)
    tx = ob.onebit_adamw(1e-3, zero=zero, warmup_steps=1)
    params = {
        "w": jax.ShapeDtypeStruct((4, 64, 64), jnp.float32),
        "b": jax.ShapeDtypeStruct((64,), jnp.float32),
    }
    where = ob.state_shardings(params, tx, mesh, zero)
    specs = jax.tree.map(lambda s: s.spec, where.opt_state)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(h @ w + params["b"]), None

        return jnp.mean(jnp.square(jax.lax.scan(layer, x, params["w"])[0] - 1))

    def step(params: Any, state: Any, x: jax.Array) -> Any:
        grads = jax.grad(loss)(params, x)
        updates, state = tx.update(grads, state, params)
        params = jax.tree.map(jnp.add, params, updates)
        return params, state, ob.global_norm(grads, "data")

    replicated = jax.tree.map(lambda x: P(), params)
    start = jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=specs, check_vma=False)
    state = shapes(jax.eval_shape(start, params), mesh, specs)
    batch = jax.ShapeDtypeStruct((2 * len(devices), 64), jnp.float32)
    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(replicated, specs, P("data")),
        out_specs=(replicated, specs, P()),
        check_vma=False,
    )
    args = (shapes(params, mesh, replicated), state, shapes(batch, mesh, P("data")))
    return jax.jit(mapped).lower(*args).compile().as_text()


def two_speed(devices: Any) -> Any:
    """Collectives over the slow axis, and over it and a fast one, on a mesh of three axes."""
    mesh = mesh_of(devices, (2, 4, 2), ("slow", "a", "b"))

    def f(y: jax.Array) -> Any:
        u = y.astype(jnp.uint8)
        with jax.named_scope("reduce_leg"):
            over_one = jax.lax.all_to_all(u, "slow", 0, 0, tiled=True)
            over_both = jax.lax.all_to_all(u + over_one, ("slow", "b"), 0, 0, tiled=True)
        with jax.named_scope("gather_leg"):
            gathered = jax.lax.all_gather(over_both, ("b", "slow"), tiled=True)
        scattered = jax.lax.psum_scatter(y * 2, "slow", scatter_dimension=0, tiled=True)
        moved = jax.lax.ppermute(y, "slow", [(0, 1), (1, 0)])
        with jax.named_scope("metrics"):
            total = jax.lax.psum(jnp.sum(y * 3, 0), ("slow", "b"))
        return over_one, gathered, scattered, moved, total

    mapped = jax.shard_map(
        f, mesh=mesh, in_specs=P(), out_specs=P(("slow", "a", "b")), check_vma=False
    )
    x = shapes(jax.ShapeDtypeStruct((64, 128), jnp.float32), mesh, P())
    return jax.jit(mapped).lower(x).compile().as_text()


def fused(devices: Any) -> Any:
    """TPU's asynchronous fusions and fused all-reduce-scatter, a loop, a permutation."""
    mesh = mesh_of(devices, (2, 4), ("data", "model"))

    def f(ws: jax.Array, x: jax.Array, y: jax.Array) -> Any:
        def layer(carry: Any, w: jax.Array) -> Any:
            h, full = carry
            following = jax.lax.all_gather(w, "data", axis=0, tiled=True)
            return (jnp.tanh(h @ full), following), None

        (h, _), _ = jax.lax.scan(layer, (x, jnp.zeros((4096, 4096), jnp.bfloat16)), ws)
        with jax.named_scope("reduce_leg"):
            scattered = jax.lax.psum_scatter(y, "data", scatter_dimension=0, tiled=True)
            packed = jax.lax.all_to_all(y.astype(jnp.uint8), "data", 0, 0, tiled=True)
        with jax.named_scope("metrics"):
            total = jax.lax.psum(jnp.sum(h), ("data", "model"))
        moved = jax.lax.ppermute(h, "model", [(i, (i + 1) % 4) for i in range(4)])
        return h, scattered, total, packed, moved, y @ y.T

    data, whole = P("data"), P()
    mapped = jax.shard_map(
        f,
        mesh=mesh,
        in_specs=(P(None, "data"), data, whole),
        out_specs=(data, data, whole, data, data, whole),
        check_vma=False,
    )
    args = (
        shapes(jax.ShapeDtypeStruct((6, 4096, 4096), jnp.bfloat16), mesh, P(None, "data")),
        shapes(jax.ShapeDtypeStruct((2048, 4096), jnp.bfloat16), mesh, data),
        shapes(jax.ShapeDtypeStruct((2048, 4096), jnp.float32), mesh, whole),
    )
    options: dict[str, str | bool] = {
        "xla_tpu_enable_async_collective_fusion": True,
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
        "xla_tpu_overlap_compute_collective_tc": True,
    }
    return jax.jit(mapped).lower(*args).compile(compiler_options=options).as_text()


# ---------------------------------------------------------------- trimming


def trim(text: str) -> str:
    module = hlo.parse(text)
    kept: dict[str, set[str]] = {}

    def holds(name: str) -> bool:
        body = module.computations.get(name, [])
        return any(
            x.op.removesuffix("-start") in (*hlo.COLLECTIVES, "send", "recv")
            or any(holds(c) for c in x.called)
            for x in body
        )

    def keep(name: str, all_of_it: bool) -> None:
        body = module.computations.get(name, [])
        where = {x.name: x for x in body}
        users: dict[str, list[str]] = {}
        for x in body:
            for operand in x.operands:
                users.setdefault(operand, []).append(x.name)
        ends = {x.name for x in body if x.root}
        sent = {
            x.name
            for x in body
            if re.sub("-(start|done)$", "", x.op) in (*hlo.COLLECTIVES, "send", "recv")
            or any(holds(c) for c in x.called)
        }
        near = set(sent)
        for step in (lambda x: x.operands, lambda x: users.get(x.name, [])):
            level = set(sent)
            for _ in range(REACH):
                level = {n for k in level if k in where for n in step(where[k]) if n in where}
                near |= level
        # What an asynchronous pair overlaps with is counted.
        inside = 0
        for x in body:
            inside += x.op.endswith("-start") or x.op == "send"
            inside += x.name.startswith("async-collective-start")
            if inside and x.op in ("fusion", "custom-call", "while", "call", "conditional"):
                near.add(x.name)
            inside -= x.op.endswith("-done") and x.op != "recv-done"
            inside -= x.name.startswith("async-collective-done")
        names = set(where) if all_of_it else near | ends
        if kept.setdefault(name, set()) >= names:
            return
        kept[name] |= names
        for x in body:
            if x.name in kept[name]:
                for c in x.called:
                    if any(holds(d) for d in x.called):
                        keep(c, x.op == "while")
                    elif x.op == "fusion":
                        inner = module.computations.get(c, [])
                        found = {y.name for y in inner if LEG.search(y.op_name)}
                        kept.setdefault(c, set()).update(found)

    keep(module.entry, False)
    out, current = [], None
    for line in text.splitlines():
        if line.startswith("HloModule"):
            title = line.split(",")[0]
            partitions = re.search(r"num_partitions=\d+", line)
            assert partitions
            out.append(f"{title}, is_scheduled=true, {partitions[0]}")
            assert module.scheduled
        header = re.match(r"(ENTRY )?%?([\w.\-]+) \(", line)
        if header and header[2] in kept:
            current = header[2]
            out += ["", f"{header[1] or ''}%{header[2]} (...) -> ... {{"]
        elif line.startswith("}") and current:
            out.append("}")
            current = None
        elif current:
            name = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = ", line)
            if name and name[1] in kept[current]:
                out.append(_shorten(line))
    return re.sub(r"\n[^\n]* \{\n\}\n", "", "\n".join(out) + "\n")


def _shorten(line: str) -> str:
    trips = re.search(r'"known_trip_count":\{[^}]*\}', line)
    line = re.sub(r", backend_config=.*", "", line)
    line = re.sub(r" ?(stack_frame_id=\d+|scheduling_name=\"[^\"]*\")", "", line)
    line = line.replace(", metadata={}", "")
    return line + (f", backend_config={{{trips[0]}}}" if trips else "")


def main() -> None:
    kind = sys.argv[1] if len(sys.argv) == 2 else ""
    if kind == "tpu":
        two_slices, one_slice = devices_of("tpu:v5e:2x4", 2), devices_of("tpu:v5e:2x4")
        made = {
            "tpu_slices_step": (optimizer_step(two_slices.ravel()), {"data": 16}),
            "tpu_slices_two_speed": (two_speed(two_slices.ravel()), {"slow": 2, "a": 4, "b": 2}),
            "tpu_fused": (fused(one_slice.ravel()), {"data": 2, "model": 4}),
        }
    elif kind == "gpu":
        made = {"gpu_step": (optimizer_step(devices_of("gpu:h100:2x4").ravel()), {"data": 8})}
    else:
        sys.exit(__doc__)
    for name, (text, axes) in made.items():
        mesh = AbstractMesh(tuple(axes.values()), tuple(axes))
        short = trim(text)
        whole, rest = ob.wire_report(text, mesh), ob.wire_report(short, mesh)
        if whole != rest:
            sys.exit(f"trimming {name} changed its report:\n{whole}\n\n{rest}")
        (HERE / f"{name}.hlo").write_text(short)


if __name__ == "__main__":
    main()
