"""What a checkpoint holds: arrays by path, and what restoring them must know."""

import dataclasses
import json
import zlib
from collections.abc import Collection
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from onebit_zero_jax import codec, storage, weighting
from onebit_zero_jax.config import ZeroConfig
from onebit_zero_jax.layout import is_shard
from onebit_zero_jax.phases import Phases
from onebit_zero_jax.resize import follows_shards
from onebit_zero_jax.resize_side import Parts, Side
from onebit_zero_jax.shards import model_sharding
from onebit_zero_jax.state import (
    ChunkState,
    DenseState,
    Log8,
    Run,
    ZeroState,
    is_zero_state,
    zero_states,
)
from onebit_zero_jax.sync import digest
from onebit_zero_jax.train_state import TrainState

Tree = Any

_FORMAT = 1
_KEY = "onebit_zero_jax"


class CorruptCheckpointError(ValueError):
    """A checkpoint is damaged; the message names the file, or the array and its file."""


class SavedArray(NamedTuple):
    """One array: what it must be when it is read."""

    shape: tuple[int, ...]
    dtype: str
    digest: int


@dataclasses.dataclass(frozen=True)
class Metadata:
    """What a checkpoint says of itself.

    Attributes:
      version: of this package.
      axes: of the mesh, by name.
      zero: stage, gather leg, codec.
      phases: schedule of each ``zero_shard``; None where it was traced.
      parameters: by path: shape, dtype, compressed, blocks of a chunk, lanes of a block, how
        it is sharded over model axes.
      arrays: by path in the TrainState.
      data_position: the user's.
    """

    version: str
    axes: dict[str, int]
    zero: ZeroConfig
    phases: list[Phases | None]
    parameters: dict[str, list[Any]]
    arrays: dict[str, SavedArray]
    data_position: Any

    def to_json(self) -> dict[str, Any]:
        """With a checksum over all of it."""
        body = {"format": _FORMAT, **dataclasses.asdict(self)}
        return {_KEY: body, "crc32": _crc(body)}

    @classmethod
    def from_json(cls, found: Any, where: str) -> Self:
        """Raises:
        CorruptCheckpointError: it is damaged, or not of this package.
        ValueError: it was written by a version of another format.
        """
        if not isinstance(found, dict) or not isinstance(found.get(_KEY), dict):
            raise CorruptCheckpointError(
                f"{where} holds no metadata of onebit_zero_jax: it is damaged, or this checkpoint "
                "was not written by onebit_zero_jax.save."
            )
        body = dict(found[_KEY])
        if _crc(body) != found.get("crc32"):
            raise CorruptCheckpointError(f"{where} is damaged: its checksum does not match.")
        written = body.pop("format", None)
        if written != _FORMAT:
            raise ValueError(
                f"{where} has format {written!r}, this version reads {_FORMAT}: it was written by "
                f"onebit_zero_jax {body.get('version')}, use that version."
            )
        try:
            zero = dict(body["zero"])
            for name in ("axis_name", "shard_params_over"):
                value = zero.get(name)
                zero[name] = tuple(value) if isinstance(value, list) else value
            config = ZeroConfig(**zero)
            axes = {str(a): int(n) for a, n in body["axes"].items()}
            if not all(axes[a] > 0 for a in config.axes):
                raise ValueError(f"mesh axes {axes}")
            return cls(
                version=str(body["version"]),
                axes=axes,
                zero=config,
                phases=[None if p is None else Phases(**p) for p in body["phases"]],
                parameters=dict(body["parameters"]),
                arrays={
                    name: SavedArray(tuple(map(int, shape)), str(dtype), int(value))
                    for name, (shape, dtype, value) in body["arrays"].items()
                },
                data_position=body["data_position"],
            )
        except (KeyError, TypeError, AttributeError, ValueError) as e:
            raise CorruptCheckpointError(f"{where} does not make sense: {e!r}.") from e


def _crc(body: Any) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True, default=list).encode())


def parameters(
    params: Tree, zero: ZeroConfig, parts: Parts, data_axes: Collection[str]
) -> dict[str, list[Any]]:
    """How each parameter is cut: the user's shape, dtype, compressed, blocks, lanes, model axes."""
    leaves = jax.tree.leaves(params, is_leaf=is_shard)
    return {
        path: [
            list(side.whole),
            jnp.dtype(side.leaf.dtype).name,
            side.leaf.compressed,
            side.leaf.blocks,
            side.leaf.lanes,
            model_sharding(x, data_axes),
        ]
        for (path, side), x in zip(Side.of(params, zero, parts).items(), leaves, strict=True)
    }


def flat(state: Tree) -> dict[str, Any]:
    """Leaves by path."""
    return {jax.tree_util.keystr(path): x for path, x in jax.tree.leaves_with_path(state)}


@jax.jit
def _digests(arrays: list[jax.Array]) -> jax.Array:
    return jnp.stack([digest(x) for x in arrays])


def digests(arrays: dict[str, jax.Array]) -> dict[str, int]:
    """:func:`digest` of each, in one program."""
    values = np.asarray(_digests(list(arrays.values())))
    return dict(zip(arrays, values.tolist(), strict=True))


def describe(state: TrainState, data_position: Any) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    """What Orbax is to save: arrays by path, and metadata."""
    import onebit_zero_jax

    if not isinstance(state, TrainState):
        raise ValueError(f"state must come from init, got {type(state).__name__}.")
    try:
        same = json.loads(json.dumps(data_position, allow_nan=False)) == data_position
    except (TypeError, ValueError):
        same = False
    if not same:
        raise ValueError(
            "data_position must come back from JSON as it is (dicts with string keys, lists, "
            f"strings, numbers, bools, None), got {data_position!r}."
        )
    arrays, states = flat(state), zero_states(state.opt_state)
    sharding = getattr(state.step, "sharding", None)
    if not states or not isinstance(sharding, NamedSharding):
        raise ValueError("state is on no mesh: pass what init or a train step returned.")
    keys = [n for n, x in arrays.items() if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
    if keys:
        raise ValueError(f"{keys[0]} is a typed key: store jax.random.key_data of it.")
    zero, axes = states[0].run.zero, dict(sharding.mesh.shape)
    sums = digests(arrays)
    metadata = Metadata(
        version=onebit_zero_jax.__version__,
        axes=axes,
        zero=zero,
        phases=[s.run.phases for s in states],
        parameters=parameters(state.params, zero, Parts.of(axes, zero), zero.axes),
        arrays={n: SavedArray(x.shape, x.dtype.name, sums[n]) for n, x in arrays.items()},
        data_position=data_position,
    )
    # Orbax refuses arrays without values; their shapes stand in the metadata.
    return {n: x for n, x in arrays.items() if x.size}, metadata.to_json()


def rebuild(arrays: dict[str, Any], metadata: Metadata, target: TrainState) -> TrainState:
    """The saved TrainState; ``target`` has its structure, but for the leaves of ``zero_shard``."""
    left = dict(arrays)

    def take(path: str) -> jax.Array:
        other = path.removesuffix(".value") if path.endswith(".value") else f"{path}.value"
        if path not in left and other in left:
            raise ValueError(follows_shards(path))
        if path not in left:
            raise ValueError(
                f"the checkpoint lacks {path}, which params, model_state and tx ask for. Pass "
                "those it was saved with."
            )
        return left.pop(path)

    def stored(path: str) -> Any:
        """An array, a code of several, or None."""
        if path in left:
            return left.pop(path)
        for kind in (storage.Int8, codec.Packed, weighting.Factors, Log8):
            if f"{path}.{kind._fields[0]}" in left:
                return kind(*(take(f"{path}.{f}") for f in kind._fields))
        return None

    def leaf_state(path: str) -> ChunkState | DenseState:
        names = (f"{path}.shared", f"{path}.shared.levels")
        kind: Any = ChunkState if any(n in left for n in names) else DenseState
        return kind(*(stored(f"{path}.{f}") for f in kind._fields))

    phases = iter(metadata.phases)

    def node(path: Any, x: Any) -> Any:
        name = jax.tree_util.keystr(path)
        if not isinstance(x, ZeroState):
            return take(name)
        leaves, treedef = jax.tree_util.tree_flatten_with_path(
            x.leaves, is_leaf=lambda x: isinstance(x, (ChunkState, DenseState))
        )
        parts = {
            f: jax.tree_util.tree_map_with_path(
                lambda path, _, f=f: take(f"{name}.{f}{jax.tree_util.keystr(path)}"), getattr(x, f)
            )
            for f in ZeroState._fields
            if f not in ("leaves", "run")
        }
        keys = [f"{name}.leaves{jax.tree_util.keystr(path)}" for path, _ in leaves]
        run = Run(metadata.zero, next(phases, None) if leaves else x.run.phases)
        return ZeroState(
            **parts, leaves=jax.tree.unflatten(treedef, map(leaf_state, keys)), run=run
        )

    state = jax.tree_util.tree_map_with_path(node, target, is_leaf=is_zero_state)
    if left:
        raise ValueError(
            f"the checkpoint holds {next(iter(left))} and params, model_state and tx have no place "
            "for it. Pass those it was saved with."
        )
    return state


def check_parameters(
    metadata: Metadata, params: Tree, zero: ZeroConfig, parts: Parts, path: Any
) -> None:
    """Raises if ``params`` are not those that were saved, or would be cut otherwise."""
    data_axes = {*metadata.zero.axes, *zero.axes}
    saved, ours = metadata.parameters, parameters(params, metadata.zero, parts, data_axes)
    for name in [*saved, *ours]:
        if name not in ours or name not in saved:
            has, lacks = ("params", path) if name in ours else (path, "params")
            raise ValueError(f"{has} has a parameter {name} that {lacks} lacks.")
        if saved[name][:2] != ours[name][:2]:
            (a, b), (c, d) = saved[name][:2], ours[name][:2]
            raise ValueError(
                f"parameter {name} was saved as {b} of shape {tuple(a)}, params has {d} of shape "
                f"{tuple(c)}."
            )
        if saved[name][5] != ours[name][5]:
            cuts = [x[5] or "not at all" for x in (saved[name], ours[name])]
            raise ValueError(
                f"parameter {name} was sharded over model axes as {cuts[0]}, params is as "
                f"{cuts[1]}. Pass parameters (or ShapeDtypeStructs) with the shardings of the "
                "saved run."
            )
        if saved[name] != ours[name]:
            raise ValueError(
                f"parameter {name} was cut into other blocks by onebit_zero_jax "
                f"{metadata.version} than this version would: {saved[name][2:]} against "
                f"{ours[name][2:]} (compressed, blocks, lanes). Use that version."
            )


def differences_from(
    metadata: Metadata, mesh: Mesh, zero: ZeroConfig, phases: list[Phases | None]
) -> list[str]:
    """What differs from the run that was saved, in words."""
    found = []
    ours = {a: mesh.shape[a] for a in zero.axes}
    saved = {a: metadata.axes.get(a) for a in metadata.zero.axes}
    if saved != ours:
        sizes = [" x ".join(f"{n} ({a})" for a, n in d.items()) for d in (saved, ours)]
        found.append(f"it was saved on {sizes[0]} devices, the mesh has {sizes[1]}")
    for field in dataclasses.fields(ZeroConfig):
        a, b = getattr(metadata.zero, field.name), getattr(zero, field.name)
        if a != b and field.name != "axis_name":
            found.append(f"it was saved with {field.name}={a!r}, zero has {b!r}")
    for a, b in zip(metadata.phases, phases, strict=False):
        if a != b:
            found.append(f"it was saved with {a}, tx has {b}")
    return found
