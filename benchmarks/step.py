"""A train step's time and memory over dense ZeRO-1 AdamW, on emulated devices.

    python benchmarks/step.py [--params 8M] [--devices 8] [--repeats 15] [--json PATH]

Time is a ratio to the dense step in the same run (steps interleaved, medians): dense ZeRO-1
is psum_scatter, AdamW on the owner's chunk, all_gather, all in float32. Emulated devices
share one memory, so the ratio shows what coding costs, not what a slow link gains.
Persistent bytes are those of the state on one device, beside the formula; peak bytes
are the compiled program's temporaries and outputs that alias no input, on top.
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


def formula(mode: str, bits: Any, devices: int, error: int, momentum: int) -> float:
    """Persistent bytes per parameter and device, float32 replicas, without padding and scales."""
    if mode == "dense":
        return 4 + 8 / devices
    if mode == "params":  # replica; master, M, v; m and e; bit planes of v > 0
        return 4 + 12 / devices + momentum + error + 1 / 8
    return 4 + 1 + bits / 8 + error + 8 / devices


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    import jax.numpy as jnp
    import numpy as np
    import optax
    from dense_zero import DenseZero

    import onebit_zero_jax as ob

    mesh = jax.make_mesh((args.devices,), ("data",))
    layers = max(1, args.params // WIDTH**2)
    keys = jax.random.split(jax.random.key(0), layers)
    # Stacked like a scanned model's layers: one leaf, whatever the depth.
    params = {
        "w": jnp.stack([jax.random.normal(k, (WIDTH, WIDTH)) / WIDTH**0.5 for k in keys]),
        "b": jnp.zeros((WIDTH,)),
    }
    count = sum(x.size for x in jax.tree.leaves(params))

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(h @ w + params["b"]), None

        return jnp.mean(jnp.square(jax.lax.scan(layer, x, params["w"])[0] - 1))

    batch = np.ones((args.devices, WIDTH), np.float32)
    batch = ob.shard_batch(batch, mesh, ob.ZeroConfig())
    rows, calls = [], {}

    def add(name: str, persistent: int, expected: float, compiled: Any, call: Any) -> None:
        memory = compiled.memory_analysis()
        peak = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        rows.append(
            {
                "run": name,
                "persistent_bytes_per_param": persistent / count,
                "formula": expected,
                "extra_peak_bytes_per_param": peak / count,
            }
        )
        calls[name] = call

    dense = DenseZero(loss_fn, optax.adamw(1e-3), mesh, params)
    box = {"dense ZeRO-1": dense.init(params)}
    compiled = dense.step.lower(box["dense ZeRO-1"], batch).compile()

    def dense_call() -> None:
        box["dense ZeRO-1"], _ = jax.block_until_ready(dense.step(box["dense ZeRO-1"], batch))

    expected = formula("dense", None, args.devices, 0, 0)
    add("dense ZeRO-1", nbytes(box["dense ZeRO-1"]), expected, compiled, dense_call)

    settings: list[tuple[dict[str, Any], int, int]] = [
        ({"stage": 1}, 4, 4),
        ({"stage": 2}, 4, 4),
        ({"stage": 2, "error_dtype": "int8", "momentum_dtype": "bfloat16"}, 1, 2),
    ]
    for config, error, momentum in settings:
        zero = ob.ZeroConfig(**config)
        phases: list[tuple[Any, int]] = [("dense", 10**6), ("compressed", 1)]
        for phase, warmup in phases:
            tx = ob.onebit_adamw(1e-3, zero=zero, warmup_steps=warmup, refresh=None)
            step = ob.train_step(loss_fn, tx, mesh, zero)
            name = f"{zero.gather_mode} {zero.bits}, {phase}"
            name = f"stage {zero.stage}, {name}" + (", int8 e, bf16 m" if error == 1 else "")
            box[name] = ob.init(params, tx, mesh, zero)

            def call(name: str = name, step: Any = step) -> None:
                box[name], metrics = step(box[name], batch)
                jax.block_until_ready((box[name], metrics["loss"]))

            call()
            compiled = step.lower(box[name], batch, phase=phase).compile()
            mode = formula(zero.gather_mode, zero.bits, args.devices, error, momentum)
            add(name, nbytes(box[name]), mode, compiled, call)

    times: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(args.repeats + 2):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if repeat >= 2:
                times[name].append(time.perf_counter() - start)
    base = statistics.median(times["dense ZeRO-1"])
    for row in rows:
        row["time_over_dense"] = statistics.median(times[row["run"]]) / base
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
        f"{args.params / 1e6:.0f}M parameters, {args.devices} emulated devices, "
        f"jax {jax.__version__}"
    )
    print(f"{'':52}{'time/dense':>11}{'state B/param':>15}{'formula':>9}{'extra peak':>12}")
    for r in rows:
        print(
            f"{r['run']:52}{r['time_over_dense']:11.2f}{r['persistent_bytes_per_param']:15.2f}"
            f"{r['formula']:9.2f}{r['extra_peak_bytes_per_param']:12.2f}"
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
