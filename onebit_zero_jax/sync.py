"""Do all devices still hold the same bits? :func:`digest` and :func:`assert_in_sync`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding

P = jax.P
Tree = Any

_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def _mix(h: jax.Array) -> jax.Array:
    """murmur3's finalizer: every input bit moves half of the output bits."""
    h = (h ^ (h >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> jnp.uint32(16))


def digest(x: jax.Array) -> jax.Array:
    """A 32-bit sum of an array's bits, the same however the array is sharded.

    ``sum_i mix(word_i + mix(i + 1))``, wrapping around, over the values' bits in row-major
    order: a changed, moved or swapped value changes it (two random arrays agree with
    probability 2^-32). It guards against accidents, not against forgery.

    Args:
      x: any shape; booleans, integers, floats or keys of up to 8 bytes a value.

    Returns:
      uint32 scalar.

    Example:
      >>> a, b = jnp.array([1.0, 2.0]), jnp.array([2.0, 1.0])
      >>> bool(digest(a) == digest(a)), bool(digest(a) == digest(b))
      (True, False)
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    elif x.dtype.itemsize == 8:
        x = lax.bitcast_convert_type(x, jnp.uint32)
    else:
        x = lax.bitcast_convert_type(x, _WORDS[x.dtype.itemsize])
    index = jnp.ones(x.shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(x.ndim)):
        step = jnp.uint32(stride & 0xFFFFFFFF)
        index = index + lax.broadcasted_iota(jnp.uint32, x.shape, axis) * step
        stride *= x.shape[axis]
    return jnp.sum(_mix(x.astype(jnp.uint32) + _mix(index)), dtype=jnp.uint32)


def _axes_of(spec: P) -> set[str]:
    """Mesh axes that an array is sharded over."""
    parts = [part if isinstance(part, tuple) else (part,) for part in spec if part is not None]
    return {axis for part in parts for axis in part}


@functools.lru_cache(maxsize=16)
def _program(mesh: Mesh, specs: tuple[P, ...]) -> Any:
    """Digests of what each device holds, ``(devices, arrays)``, the same on all devices."""

    def body(*arrays: jax.Array) -> jax.Array:
        mine = jnp.stack([digest(x) for x in arrays])
        return lax.all_gather(mine, mesh.axis_names, axis=0, tiled=False)

    mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    return jax.jit(mapped)


def assert_in_sync(state: Tree) -> None:
    """Raises if devices that should hold the same bits do not.

    Every array of ``state`` is replicated over the mesh axes that its sharding does not
    name: parameters, codes of the momentum, weights, counters. Each device takes a
    :func:`digest` of what it holds, the digests are gathered (4 bytes per array and
    device) and compared on the host. Arrays sharded over every axis have one copy and
    nothing to compare. It reads the state once and changes nothing: run it every few
    hundred steps. In a multi-process run every process calls it.

    Args:
      state: a :class:`TrainState`, or any tree of arrays on one mesh.

    Raises:
      AssertionError: a leaf differs; names it, and the devices that disagree with the first.
      ValueError: no array, or an array that is on no mesh or on another one.

    Example:
      >>> mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
      >>> everywhere = jax.NamedSharding(mesh, jax.P())
      >>> assert_in_sync({"w": jax.device_put(jnp.arange(3.0), everywhere)})
      >>> pieces = [jax.device_put(jnp.full(3, float(d.id)), d) for d in mesh.devices]
      >>> w = jax.make_array_from_single_device_arrays((3,), everywhere, pieces)
      >>> assert_in_sync({"w": w})  # doctest: +ELLIPSIS
      Traceback (most recent call last):
      AssertionError: ['w'] differs between devices: device 1 (process 0) ... device 0...
    """
    found: list[tuple[str, jax.Array, P]] = []
    mesh: Any = None
    for path, x in jax.tree.leaves_with_path(state):
        name = jax.tree_util.keystr(path) or "state"
        sharding = getattr(x, "sharding", None)
        if not isinstance(sharding, NamedSharding):
            raise ValueError(
                f"{name} is {sharding or type(x).__name__}, not an array on a mesh; pass the state "
                "that init or a train step returned."
            )
        mesh = mesh or sharding.mesh
        if sharding.mesh != mesh:
            raise ValueError(f"{name} is on {sharding.mesh}, other leaves are on {mesh}.")
        found.append((name, x, sharding.spec))
    if mesh is None:
        raise ValueError("state holds no array, so there is nothing to compare.")
    axes = {a for a, n in mesh.shape.items() if n > 1}
    copied = [(name, x, spec) for name, x, spec in found if axes - _axes_of(spec)]
    if not copied:
        return
    program = _program(mesh, tuple(spec for _, _, spec in copied))
    digests = np.asarray(program(*(x for _, x, _ in copied)))
    digests = digests.reshape(*mesh.devices.shape, len(copied))
    for k, (name, _, spec) in enumerate(copied):
        ours = digests[..., k]
        # The first device along every axis that should not matter.
        first = tuple(
            slice(None) if axis in _axes_of(spec) else slice(0, 1) for axis in mesh.axis_names
        )
        wrong = ours != ours[first]
        if np.any(wrong):
            devices = [f"{d.id} (process {d.process_index})" for d in mesh.devices[wrong]]
            good = sorted({d.id for d in mesh.devices[first].flat})
            raise AssertionError(
                f"{name} differs between devices: device {', '.join(devices[:8])}"
                f"{' and others' if len(devices) > 8 else ''} disagree(s) with device {good[0]}"
                f"{' and its like' if len(good) > 1 else ''}. Restore the last checkpoint; if it "
                "happens again, look for a loss, batch statistics or a link in front of "
                "zero_shard that each device decides alone, or for a faulty device."
            )
