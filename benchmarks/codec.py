"""Time, temporaries and TPU traffic of the codec.

    python benchmarks/codec.py [--sizes 1M,16M,64M] [--senders 2,8,64] [--tpu] [--json PATH]

Time is a ratio to a plain copy of the same bytes in the same run: one that moves as many
bytes as the program must (each input read once, each output written once), half of them
in and half out. Copy and program take turns; each counts with its fastest run.
Temporaries are what the compiler reserves beside inputs and outputs, in bytes per value.

With --tpu, which needs libtpu but no TPU: the same programs, compiled ahead of time for
one v5e chip at the largest size with the errors donated, and the bytes that XLA counts
for them over the same floor. XLA counts an operand twice that a fusion uses twice.
"""

import argparse
import importlib.util
import json
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from onebit_zero_jax import codec, weighting
from onebit_zero_jax.codec import Packed
from onebit_zero_jax.weighting import Factors

M = 2**20
COLUMNS = 4096


class Program(NamedTuple):
    name: str
    call: Callable[..., Any]
    args: tuple[jax.ShapeDtypeStruct, ...]
    donated: tuple[int, ...]


def parse_size(text: str) -> int:
    size = int(float(text.removesuffix("M")) * M) if text.endswith("M") else int(text)
    if size <= 0 or size % COLUMNS:
        raise argparse.ArgumentTypeError(f"{text} is not a positive multiple of {COLUMNS}")
    return size


def numbers(parse: Callable[[str], int]) -> Callable[[str], list[int]]:
    return lambda text: [parse(item) for item in text.split(",")]


def encode(bits: int) -> Callable[..., Any]:
    return lambda x, e: codec.encode(x, e, bits=bits)


def encode_weighted(x: jax.Array, e: jax.Array, row: jax.Array, col: jax.Array) -> Any:
    weight = codec.to_blocks(weighting.weight_of(Factors(row, col)))
    return codec.encode(x, e, weight=weight)


def decode_mean(planes: jax.Array, scale: jax.Array) -> jax.Array:
    return codec.decode_mean(Packed(planes, scale))


def programs(size: int, senders: list[int]) -> Iterator[Program]:
    def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    blocks, lanes = codec.block_shape(size)
    x = array(blocks, codec.ROWS, lanes)
    row, col = array(size // COLUMNS, 1), array(1, COLUMNS)
    yield Program("encode 1 bit", encode(1), (x, x), (1,))
    yield Program("encode 1 bit, factored weight", encode_weighted, (x, x, row, col), (1,))
    yield Program("encode 4 bits", encode(4), (x, x), (1,))
    for p in senders:
        planes = array(p, blocks, 1, lanes, dtype=jnp.uint8)
        yield Program(f"decode mean of {p}", decode_mean, (planes, array(p, blocks, 1, 1)), ())


def floor_bytes(program: Program) -> int:
    """Each input read once, each output written once."""
    arrays = jax.tree.leaves((program.args, jax.eval_shape(program.call, *program.args)))
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in arrays)


def fill(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """A million random values again and again."""
    rng, count = np.random.default_rng(0), math.prod(shape.shape)
    if shape.dtype == jnp.uint8:
        some = rng.integers(0, 256, min(count, M)).astype(np.uint8)
    else:
        some = np.abs(rng.standard_normal(min(count, M), np.float32)) + np.float32(0.1)
        if len(shape.shape) == 3:  # values; else weights and scales
            some *= np.where(rng.random(some.size) < 0.5, np.float32(-1), np.float32(1))
    return jnp.asarray(np.resize(some, shape.shape))


def seconds(call: Callable[..., Any], args: tuple[jax.Array, ...]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call(*args))
    return time.perf_counter() - start


def temporaries(compiled: Any, size: int) -> float:
    """Bytes per value."""
    return compiled.memory_analysis().temp_size_in_bytes / size


def measure(program: Program, size: int, repeats: int) -> dict[str, Any]:
    compiled = jax.jit(program.call).lower(*program.args).compile()
    args = tuple(fill(shape) for shape in program.args)
    source = jnp.zeros(floor_bytes(program) // 8, jnp.uint32)
    copy = jax.jit(lambda x: x + jnp.uint32(1))
    times = [(seconds(copy, (source,)), seconds(compiled, args)) for _ in range(repeats + 1)]
    copied, coded = (min(column[1:]) for column in zip(*times, strict=True))
    return {
        "program": program.name,
        "values": size,
        "copy_ms": copied * 1e3,
        "time_over_copy": coded / copied,
        "temporaries_per_value": temporaries(compiled, size),
    }


def count_tpu(program: Program, size: int, device: Any) -> dict[str, Any]:
    sharding = SingleDeviceSharding(device)
    args = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in program.args]
    compiled = jax.jit(program.call, donate_argnums=program.donated).lower(*args).compile()
    costs: Any = compiled.cost_analysis()
    return {
        "program": program.name,
        "values": size,
        "device": "TPU v5e, ahead of time",
        "bytes_over_floor": costs["bytes accessed"] / floor_bytes(program),
        "temporaries_per_value": temporaries(compiled, size),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--sizes", type=numbers(parse_size), default="1M,16M,64M", help="values, M = 2^20")
    add("--senders", type=numbers(int), default="2,8,64", help="senders of decode mean")
    add("--repeats", type=int, default=9)
    add("--tpu", action="store_true", help="also count bytes on a TPU v5e (needs libtpu)")
    add("--json", type=pathlib.Path, help="write the rows here, too")
    args = parser.parse_args()
    if args.tpu and importlib.util.find_spec("libtpu") is None:
        parser.error("--tpu needs libtpu, which is not installed: pip install libtpu")

    rows = []
    device = jax.devices()[0]
    print(f"{device.device_kind}, jax {jax.__version__}, {os.cpu_count()} cores")
    print(f"{'program':32}{'values':>8}{'copy':>12}{'time / copy':>13}{'temporaries':>15}")
    for size in args.sizes:
        for program in programs(size, args.senders):
            row = measure(program, size, args.repeats) | {"device": device.device_kind}
            rows.append(row)
            print(
                f"{program.name:32}{size / M:>7g}M{row['copy_ms']:>9.1f} ms"
                f"{row['time_over_copy']:>12.2f}x{row['temporaries_per_value']:>8.2f} B/value",
                flush=True,
            )
    if args.tpu:
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        from jax.experimental import topologies

        chip = topologies.get_topology_desc("v5e:2x2", platform="tpu").devices[0]
        print(f"\nTPU v5e, ahead of time\n{'program':32}{'values':>8}{'bytes / floor':>15}")
        size = max(args.sizes)
        for program in programs(size, args.senders):
            row = count_tpu(program, size, chip)
            rows.append(row)
            print(
                f"{program.name:32}{size / M:>7g}M{row['bytes_over_floor']:>14.2f}x"
                f"{row['temporaries_per_value']:>8.2f} B/value of temporaries",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
