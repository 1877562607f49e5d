"""A train step's time and memory over dense ZeRO AdamW, on emulated devices.

    python benchmarks/step.py [--params 8M] [--devices 8] [--repeats 15] [--json PATH]

Times and peak bytes are ratios to a dense step in the same run (steps interleaved, medians),
all in float32. Dense ZeRO-1: psum_scatter, AdamW on the owner's chunk, all_gather; the
baseline of stages 1 and 2. Dense ZeRO-3: parameters and optimizer state sharded by
``NamedSharding``, ``optax.adamw`` under plain ``jit``; the baseline of stage 3. Two-speed meshes
have two devices on the slow axis. Emulated devices share one memory, so the ratios show what
coding costs, not what a slow link gains. Persistent bytes are those of the state on one
device, beside the formula; peak bytes are the compiled program's temporaries and outputs
that alias no input, on top.
"""

import argparse
import json
import pathlib
import statistics
import sys
import time
from typing import Any

import jax

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "examples"))

WIDTH = 512


def parse_size(text: str) -> int:
    return int(float(text.rstrip("M")) * 1e6) if text.endswith("M") else int(text)


def nbytes(tree: Any) -> int:
    """Bytes on the first device."""
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def formula(zero: Any, slow: int, fast: int, error: int, momentum: int) -> float:
    """Persistent bytes per parameter and device, float32 replicas, without padding and scales.

    ``error`` and ``momentum``: bytes that a value of the worker error and momentum takes.
    """
    devices = slow * fast
    if zero.gather_mode == "momentum":  # replica, preconditioner, codes of M; e, E, v
        return 4 + 1 + zero.bits / 8 + error / fast + 8 / devices
    split = {"": 1, "fast": fast, "data": devices}["".join(zero.over)]
    worker = 1 if zero.flat else fast
    seen = split if zero.stage == 3 and not zero.flat else 1
    # Replica or shard; master, M, v; m and e; bits of v > 0.
    return 4 / split + 12 / devices + (momentum + error) / worker + 1 / 8 / seen


def dense_zero_3(loss_fn: Any, mesh: Any, params: Any) -> tuple[Any, Any]:
    """``(state, step)``: what one writes with ``NamedSharding`` and leaves to XLA."""
    import jax.numpy as jnp
    import optax

    tx = optax.adamw(1e-3)

    def cut(x: jax.Array) -> Any:
        whole = x.ndim < 2 or x.shape[-1] % mesh.shape["data"]
        return jax.NamedSharding(mesh, jax.P() if whole else jax.P(*[None] * (x.ndim - 1), "data"))

    # A copy: a step that donates its state must not take the caller's arrays.
    shardings = jax.tree.map(cut, params)
    params = jax.jit(lambda p: jax.tree.map(jnp.copy, p), out_shardings=shardings)(params)
    opt_state = jax.jit(tx.init, out_shardings=jax.tree.map(cut, jax.eval_shape(tx.init, params)))(
        params
    )

    def step(state: Any, batch: Any) -> Any:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    state = params, opt_state
    out = jax.tree.map(lambda x: x.sharding, state), None
    return state, jax.jit(step, donate_argnums=0, out_shardings=out)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    import jax.numpy as jnp
    import numpy as np
    import optax
    from dense_zero import DenseZero
    from jax.sharding import AxisType

    import onebit_zero_jax as ob

    def mesh_of(**sizes: int) -> Any:
        return jax.make_mesh(tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes))

    mesh, two_speed = mesh_of(data=args.devices), mesh_of(slow=2, fast=args.devices // 2)
    depth = max(1, args.params // WIDTH**2)
    keys = jax.random.split(jax.random.key(0), depth)
    # Stacked like a scanned model's layers: one leaf, whatever the depth.
    params = {
        "w": jnp.stack([jax.random.normal(k, (WIDTH, WIDTH)) / WIDTH**0.5 for k in keys]),
        "b": jnp.zeros((WIDTH,)),
    }
    count = sum(x.size for x in jax.tree.leaves(params))

    @ob.layer
    def block(params: Any, h: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.tanh(h @ params["w"] + b)

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        def one(h: jax.Array, layer: Any) -> tuple[jax.Array, None]:
            return block(layer, h, params["b"]), None

        return jnp.mean(jnp.square(jax.lax.scan(one, x, {"w": params["w"]})[0] - 1))

    batch = np.ones((args.devices, WIDTH), np.float32)
    rows: list[dict[str, Any]] = []
    calls, box = {}, dict[str, Any]()

    def add(name: str, base: str, expected: float, step: Any, compiled: Any, batch: Any) -> None:
        memory = compiled.memory_analysis()
        peak = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes

        def call() -> None:
            box[name], out = step(box[name], batch)
            jax.block_until_ready((box[name], out["loss"] if isinstance(out, dict) else out))

        call()
        calls[name] = call
        rows.append(
            {
                "run": name,
                "base": base,
                "persistent_bytes_per_param": nbytes(box[name]) / count,
                "formula": expected,
                "extra_peak_bytes_per_param": peak / count,
            }
        )

    flat_batch = ob.shard_batch(batch, mesh, ob.ZeroConfig())
    dense = DenseZero(loss_fn, optax.adamw(1e-3), mesh, params)
    box["dense ZeRO-1"] = dense.init(params)
    compiled = dense.step.lower(box["dense ZeRO-1"], flat_batch).compile()
    expected = 4 + 8 / args.devices
    add("dense ZeRO-1", "dense ZeRO-1", expected, dense.step, compiled, flat_batch)
    box["dense ZeRO-3"], step = dense_zero_3(loss_fn, mesh, params)
    compiled = step.lower(box["dense ZeRO-3"], flat_batch).compile()
    add("dense ZeRO-3", "dense ZeRO-3", 12 / args.devices, step, compiled, flat_batch)

    slow_fast: dict[str, Any] = {"axis_name": ("slow", "fast")}
    small = {"error_dtype": "int8", "momentum_dtype": "bfloat16"}
    settings: list[tuple[dict[str, Any], Any, int, int]] = [
        ({"stage": 1}, mesh, 4, 4),
        ({"stage": 2}, mesh, 4, 4),
        ({"stage": 2, **small}, mesh, 1, 2),
        ({"stage": 3}, mesh, 4, 4),
        ({"stage": 1, **slow_fast}, two_speed, 4, 4),
        ({"stage": 2, **slow_fast}, two_speed, 4, 4),
        ({"stage": 3, **slow_fast}, two_speed, 4, 4),
    ]
    for config, where, error, momentum in settings:
        zero = ob.ZeroConfig(**config)
        slow, fast = where.shape[zero.slow], where.size // where.shape[zero.slow]
        phases: list[tuple[Any, int]] = [("dense", 10**6), ("compressed", 1)]
        for phase, warmup in phases:
            tx = ob.onebit_adamw(1e-3, zero=zero, warmup_steps=warmup, refresh=None)
            train = ob.train_step(loss_fn, tx, where, zero)
            name = f"{zero.gather_mode} {zero.bits}, {phase}"
            name = f"stage {zero.stage}, {name}" + (", int8 e, bf16 m" if error == 1 else "")
            name += f", {slow} x {fast}" if where is two_speed else ""
            box[name] = ob.init(params, tx, where, zero)
            here = ob.shard_batch(batch, where, zero)
            compiled = train.lower(box[name], here, phase=phase).compile()
            base = "dense ZeRO-3" if zero.stage == 3 else "dense ZeRO-1"
            expected = formula(zero, slow, fast, error, momentum)
            if warmup == 1:  # the first step is a dense one
                box[name], _ = train(box[name], here)
            add(name, base, expected, train, compiled, here)

    times: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(args.repeats + 2):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if repeat >= 2:
                times[name].append(time.perf_counter() - start)
    found = {row["run"]: row for row in rows}
    for row in rows:
        both = row["run"], row["base"]
        medians = [statistics.median(times[name]) for name in both]
        row["time_over_dense"] = medians[0] / medians[1]
        peaks = [found[name]["extra_peak_bytes_per_param"] for name in both]
        row["peak_over_dense"] = peaks[0] / peaks[1]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--params", type=parse_size, default=parse_size("8M"))
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", args.devices)
    rows = measure(args)
    print(
        f"{args.params / 1e6:g}M parameters, {args.devices} emulated devices, jax {jax.__version__}"
    )
    print(
        f"{'':46}{'over':>14}{'time':>7}{'state B/param':>15}{'formula':>9}"
        f"{'extra peak':>12}{'ratio':>7}"
    )
    for r in rows:
        print(
            f"{r['run']:46}{r['base']:>14}{r['time_over_dense']:7.2f}"
            f"{r['persistent_bytes_per_param']:15.2f}{r['formula']:9.2f}"
            f"{r['extra_peak_bytes_per_param']:12.2f}{r['peak_over_dense']:7.2f}"
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
