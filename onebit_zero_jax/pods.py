"""Compiles the train step of a scanned transformer for chips that are not here."""

import dataclasses
import math
import os
import re
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh

from onebit_zero_jax.adam import onebit_adamw
from onebit_zero_jax.clip import clip_by_global_norm
from onebit_zero_jax.config import ZeroConfig
from onebit_zero_jax.layers import layer
from onebit_zero_jax.report import WireReport, wire_report
from onebit_zero_jax.train import train_step
from onebit_zero_jax.train_state import abstract_state

P = jax.P
# layers, width, heads, vocabulary
MODELS = {
    "10m": (4, 256, 4, 32_000),
    "100m": (12, 768, 12, 32_000),
    "1b": (24, 1792, 14, 32_000),
    "7b": (32, 4096, 32, 32_000),
}
_H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448 threads_per_core_limit: 2048
  core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84978434048 cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def devices_of(target: str, slices: int = 1) -> np.ndarray:
    """Devices of a topology, ``(slow, fast)``: slices x chips, or hosts x GPUs.

    Args:
      target: ``tpu:NAME:SHAPE`` (e.g. ``tpu:v5e:16x16``, one slice) or
        ``gpu:h100:HOSTSxGPUS``.
      slices: TPU slices.

    Raises:
      ValueError: unknown target, or the compiler for it is not installed.
    """
    from jax.experimental import topologies

    tpu = re.fullmatch(r"tpu:(v\w+:\d+(?:x\d+)+)", target)
    gpu = re.fullmatch(r"gpu:h100:(\d+)x(\d+)", target)
    if not tpu and not gpu:
        raise ValueError(
            f"target must be like tpu:v5e:16x16 or gpu:h100:HOSTSxGPUS, got {target!r}."
        )
    if type(slices) is not int or slices < 1:
        raise ValueError(f"slices must be an integer of at least 1, got {slices!r}.")
    # No chip is asked about, and none is taken from another process.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    try:
        if tpu:
            topology = topologies.get_topology_desc(tpu[1], platform="tpu", num_slices=slices)
            return np.array(topology.devices).reshape(slices, -1)
        if slices != 1:
            raise ValueError("slices are for TPU; hosts are the slow axis of GPUs.")
        assert gpu
        topology = topologies.get_topology_desc(
            "", platform="cuda", target_config=_H100, topology=f"1x{gpu[1]}x{gpu[2]}"
        )
        return np.array(topology.devices).reshape(int(gpu[1]), int(gpu[2]))
    except (RuntimeError, NotImplementedError) as e:
        need = "libtpu (pip install libtpu)" if tpu else "jax[cuda12]"
        raise ValueError(f"no topology for {target!r}: it needs {need}, no chip. {e}") from e


def model(name: str) -> tuple[Any, Any]:
    """Parameter shapes (float32) and loss of a decoder whose layers are stacked and scanned.

    Raises:
      ValueError: unknown name.
    """
    if name not in MODELS:
        raise ValueError(f"model must be one of {', '.join(MODELS)}, got {name!r}.")
    layers, width, heads, vocabulary = MODELS[name]

    def shape(*dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, jnp.float32)

    params = {
        "embedding": shape(vocabulary, width),
        "layers": {
            "qkv": shape(layers, width, 3 * width),
            "out": shape(layers, width, width),
            "up": shape(layers, width, 4 * width),
            "down": shape(layers, 4 * width, width),
            "norms": shape(layers, 2, width),
        },
        "norm": shape(width),
    }

    def normalize(x: jax.Array, scale: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        rms = jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + 1e-6)
        return (wide * rms).astype(x.dtype) * scale

    @jax.checkpoint
    @layer
    def block(p: Any, x: jax.Array) -> jax.Array:
        h = normalize(x, p["norms"][0])
        batch, length, _ = h.shape
        q, k, v = jnp.split((h @ p["qkv"]).reshape(batch, length, heads, -1), 3, -1)
        h = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + h.reshape(x.shape) @ p["out"]
        h = normalize(x, p["norms"][1])
        return x + jax.nn.gelu(h @ p["up"]) @ p["down"]

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        x = layer(lambda table: table[tokens[:, :-1]])(params["embedding"])
        x, _ = jax.lax.scan(lambda x, p: (block(p, x), None), x, params["layers"])
        x = normalize(x, params["norm"])
        logits = layer(lambda table: x @ table.T)(params["embedding"])
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits.astype(jnp.float32), tokens[:, 1:]
        )
        return jnp.mean(losses)

    return params, loss


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled step; ``str()`` is what the console script prints.

    Attributes:
      report: of the wire.
      seconds: of compilation.
      arguments, temporaries: bytes per device.
      accessed: bytes per device and step that the compiler counts (0: it does not).
      floor: bytes of arguments and outputs, each once.
    """

    report: WireReport
    seconds: float
    arguments: int
    temporaries: int
    accessed: float
    floor: float

    def __str__(self) -> str:
        gb = 1e9
        lines = [
            str(self.report),
            "",
            f"memory per device: state and batch {self.arguments / gb:.3f} GB, temporaries "
            f"{self.temporaries / gb:.3f} GB",
        ]
        if self.accessed:
            lines.append(
                f"bytes accessed per step: {self.accessed / gb:.3f} GB, "
                f"{self.accessed / self.floor:.1f} times arguments and outputs once (activations "
                "count too)"
            )
        return "\n".join([*lines, f"compiled in {self.seconds:.1f} s"])


def compile_step(
    target: str,
    name: str,
    *,
    slices: int = 1,
    phase: Any = "compressed",
    sequences: int = 1,
    length: int = 1024,
    **options: Any,
) -> Compiled:
    """Compiles a train step of AdamW with clipping, bfloat16 compute, for ``target``.

    Args:
      target, slices: as in :func:`devices_of`.
      name: of a model, see ``MODELS``.
      phase: ``"compressed"`` or ``"dense"``.
      sequences, length: of the batch, per device.
      **options: of :class:`ZeroConfig`.

    Raises:
      ValueError: unknown target, model or option; a compiler that is not installed.
    """
    params, loss = model(name)
    devices = devices_of(target, slices)
    names: Any = ("slow", "fast") if min(devices.shape) > 1 else ("data",)
    devices = devices if len(names) == 2 else devices.reshape(-1)
    mesh = Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))
    axis = names if len(names) == 2 else "data"
    zero = ZeroConfig(axis_name=axis, **{"tiles": target.startswith("tpu"), **options})
    tx = optax.chain(clip_by_global_norm(1.0, zero=zero), onebit_adamw(1e-3, zero=zero))
    rows = sequences * math.prod(devices.shape)
    batch = jax.ShapeDtypeStruct((rows, length + 1), jnp.int32)
    step = train_step(loss, tx, mesh, zero, compute_dtype=jnp.bfloat16)
    lowered = step.lower(abstract_state(params, tx, mesh, zero), batch, phase=phase)
    began = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - began
    memory: Any = compiled.memory_analysis()
    cost: Any = compiled.cost_analysis() or {}
    return Compiled(
        report=wire_report(compiled, mesh, params),
        seconds=seconds,
        arguments=memory.argument_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        accessed=float(cost.get("bytes accessed", 0.0)),
        floor=memory.argument_size_in_bytes + memory.output_size_in_bytes,
    )
