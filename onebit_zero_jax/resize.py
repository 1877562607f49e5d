"""A state on another number of devices, another split of them, or in another stage."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from onebit_zero_jax.config import ZeroConfig
from onebit_zero_jax.layout import is_shard
from onebit_zero_jax.resize_leaf import Known, convert_leaf, recut, rework
from onebit_zero_jax.resize_side import Parts, Side
from onebit_zero_jax.shards import model_sharding, whole_shapes
from onebit_zero_jax.state import ChunkState, DenseState, ZeroState, is_zero_state, zero_states
from onebit_zero_jax.train_state import TrainState, abstract_state

P = jax.P
Tree = Any


@functools.lru_cache(maxsize=256)
def _program(old: Side, new: Side, treedef: Any, shardings: tuple[NamedSharding, ...]) -> Any:
    return jax.jit(
        functools.partial(convert_leaf, old, new),
        out_shardings=jax.tree.unflatten(treedef, shardings),
    )


def spread(shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """Axis 0 over as many devices of the mesh as divide it; equal copies on the rest."""
    devices = mesh.devices.reshape(-1)
    parts = int(np.gcd(shape[0], devices.size)) if shape else 1
    work = Mesh(devices.reshape(parts, -1), ("parts", "copies"))
    return NamedSharding(work, P("parts") if shape else P())


def _put(x: jax.Array, sharding: Any, name: str) -> jax.Array:
    if not x.is_fully_addressable and x.sharding.device_set != sharding.device_set:
        raise ValueError(
            f"{name} lives on devices of several processes and the new mesh has other devices: "
            "save it and restore it with resize=True in a job on the new mesh."
        )
    return jax.device_put(x, sharding)


def decays(
    tx: optax.GradientTransformation, params: Tree, zero: ZeroConfig
) -> list[tuple[float, float]]:
    """b1 and b2 of every ``zero_shard`` in ``tx``, read from what a step of it does.

    Leaves of one value with M = v = 1 and a zero gradient become b1 and b2.
    """
    one = np.asarray(jax.local_devices()[:1]).reshape((1,) * len(zero.axes))
    mesh = Mesh(one, zero.axes)
    full = optax.with_extra_args_support(tx)

    def started(s: Any) -> Any:
        return s._replace(leaves=jax.tree.map(jnp.ones_like, s.leaves)) if is_zero_state(s) else s

    def after(tiny: Tree) -> list[tuple[jax.Array, jax.Array]]:
        state = jax.tree.map(started, full.init(tiny), is_leaf=is_zero_state)
        _, state = full.update(tiny, state, tiny, phase="dense")
        found = []
        for s in zero_states(state):
            leaves = jax.tree.leaves(s.leaves, is_leaf=lambda x: isinstance(x, DenseState))
            found.append((leaves[0].momentum[0], leaves[0].variance[0]))
        return found

    tiny = jax.tree.map(lambda x: np.zeros(1, x.dtype), params)
    mapped = jax.shard_map(after, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return [(float(b1), float(b2)) for b1, b2 in jax.jit(mapped)(tiny)]


def _is_leaf_state(x: Any) -> bool:
    return isinstance(x, (ChunkState, DenseState))


@dataclasses.dataclass
class _Resizing:
    """One conversion: what it needs all over the tree, and the parameters it changes."""

    old: TrainState
    new: TrainState
    zeros: tuple[ZeroConfig, ZeroConfig]
    parts: tuple[Parts, Parts]
    tx: optax.GradientTransformation
    mesh: Mesh

    def __post_init__(self) -> None:
        old, new = (
            Side.of(self.old.params, zero, parts)
            for zero, parts in zip(self.zeros, self.parts, strict=True)
        )
        self.sides = {path: (side, new[path]) for path, side in old.items()}
        paths = jax.tree.leaves_with_path(self.old.params, is_leaf=is_shard)
        self.params = {_name(path, "params"): _value(x) for path, x in paths}
        targets, self.params_def = jax.tree.flatten(self.new.params, is_leaf=is_shard)
        self.targets = dict(zip(self.params, targets, strict=True))

    @functools.cached_property
    def decays(self) -> list[tuple[float, float]]:
        return decays(self.tx, whole_shapes(self.old.params), self.zeros[1])

    def run(self) -> TrainState:
        """The converted state."""
        self.check_links()
        old_def: Any = jax.tree.structure(self.old.opt_state, is_leaf=is_zero_state)
        new_def: Any = jax.tree.structure(self.new.opt_state, is_leaf=is_zero_state)
        if old_def != new_def:
            raise ValueError(
                f"the state was made with another optimizer than tx: its tree is {old_def}, that "
                f"of tx is {new_def}. Build tx as before; only zero and the mesh may change."
            )
        nodes = zip(
            jax.tree.leaves_with_path(self.old.opt_state, is_leaf=is_zero_state),
            jax.tree.leaves(self.new.opt_state, is_leaf=is_zero_state),
            strict=True,
        )
        converted: list[Any] = []
        order = {id(s): k for k, s in enumerate(zero_states(self.old.opt_state))}
        for (path, a), b in nodes:
            name = _name(path, "opt_state")
            if is_zero_state(a):
                converted.append(self.zero_state(name, a, b, order.get(id(a))))
            else:
                converted.append(self.outer(name, a, b))
        opt_state = jax.tree.unflatten(new_def, converted)
        params = [self.parameter(path, x) for path, x in self.params.items()]
        kept = (self.old.step, jax.tree.unflatten(self.params_def, params), self.old.model_state)
        targets = (self.new.step, self.new.params, self.new.model_state)
        step, params, model_state = jax.tree.map(
            lambda x, t: _put(x, t.sharding, "the state"), kept, targets
        )
        return TrainState(step, params, opt_state, model_state)

    def check_links(self) -> None:
        """Raises where links around ``zero_shard`` have state in the shape of shards."""
        if self.zeros[0] == self.zeros[1] and self.parts[0] == self.parts[1]:
            return
        for state in (self.old.opt_state, self.new.opt_state):
            nodes = jax.tree.leaves_with_path(
                state, is_leaf=lambda x: is_zero_state(x) or is_shard(x)
            )
            for path, x in nodes:
                if is_shard(x):
                    raise ValueError(follows_shards(_name(path, "opt_state")))

    def parameter(self, path: str, x: jax.Array) -> Any:
        """A parameter as the new state keeps it, from the old or from the new shape."""
        (old, new), target = self.sides[path], self.targets[path]
        if x.shape != new.padded:  # No zero_shard has it.
            x = _put(x, spread(x.shape, self.mesh), path)
            x = jax.jit(lambda x: new.pad(old.unpad(x)))(x)
        return dataclasses.replace(target, value=x) if is_shard(target) else x

    def zero_state(self, name: str, a: ZeroState, b: ZeroState, order: int | None) -> ZeroState:
        old = jax.tree.leaves_with_path(a.leaves, is_leaf=_is_leaf_state)
        new, treedef = jax.tree.flatten(b.leaves, is_leaf=_is_leaf_state)
        structure: Any = jax.tree.structure(a.leaves, is_leaf=_is_leaf_state)
        if structure != treedef:
            raise ValueError(
                f"{name} was made for other parameters than those tx gives it now; build tx "
                "(its masks and labels) as before."
            )
        leaves = [
            self.leaf(_name(path, "params"), s, t, a, order)
            for (path, s), t in zip(old, new, strict=True)
        ]
        inner_def: Any = jax.tree.structure(a.inner)
        if inner_def != jax.tree.structure(b.inner):
            raise ValueError(
                f"{name}.inner is the state of another inner chain than that of tx: build tx as "
                "before."
            )
        inner = [
            self.inner(_name(path, ""), f"{name}.inner", x, t)
            for (path, x), t in zip(
                jax.tree.leaves_with_path(a.inner), jax.tree.leaves(b.inner), strict=True
            )
        ]
        residual = a.residual
        if residual.shape != b.residual.shape:
            # Summed over devices wherever it is used.
            total = np.sum(np.asarray(_put(residual, spread((), self.mesh), name)), axis=0)
            residual = jnp.asarray(np.broadcast_to(total / b.residual.shape[0], b.residual.shape))
        staleness = a.staleness
        if staleness.shape != b.staleness.shape:
            # Momenta of other workers have other norms: the first codes are compared with anew.
            staleness = jnp.zeros(b.staleness.shape, jnp.float32)
        counters: dict[str, Any] = {
            f: _put(getattr(a, f), getattr(b, f).sharding, f"{name}.{f}")
            for f in ("step", "applied", "variance_updates", "nonfinite", "starts", "norms")
        }
        return b._replace(
            residual=_put(residual, b.residual.sharding, name),
            staleness=_put(staleness, b.staleness.sharding, name),
            leaves=jax.tree.unflatten(treedef, leaves),
            inner=jax.tree.unflatten(inner_def, inner),
            **counters,
        )

    def leaf(self, path: str, s: Any, target: Any, z: ZeroState, order: int | None) -> Any:
        if path not in self.sides:
            raise ValueError(f"the optimizer state has a leaf {path} that the parameters lack.")
        old, new = self.sides[path]
        if old == new:
            return jax.tree.map(lambda x, t: _put(x, t.sharding, path), s, target)
        if isinstance(target, ChunkState):
            new = dataclasses.replace(new, feedback=target.worker_error is not None)
        same_codes = (old.zero, old.order, old.weighed) == (new.zero, new.order, new.weighed)
        b1 = b2 = bc2 = live = 0.0
        if not same_codes and order is not None:
            b1, b2 = self.decays[order]
            bc2, live = (1 - b2 ** int(np.asarray(n)) for n in (z.variance_updates, z.applied))
        known = Known(*(jnp.float32(x) for x in (b1, b2, bc2, live)))
        y = self.params[path]
        if old.gathers_params and not new.gathers_params and y.dtype != jnp.float32:
            raise ValueError(
                f"parameter {path} is {y.dtype}: gather='momentum' keeps no float32 master, so the "
                "low bits of the master parameters would be lost. Keep gather='params'."
            )
        s, y = jax.tree.map(lambda x: _put(x, spread(x.shape, self.mesh), path), (s, y))
        outputs = (target, _value(self.targets[path]))
        work = jax.tree.map(lambda t: spread(t.shape, self.mesh), outputs)
        shardings, treedef = jax.tree.flatten(work)
        state, self.params[path] = _program(old, new, treedef, tuple(shardings))(s, y, known)
        return jax.tree.map(lambda x, t: _put(x, t.sharding, path), state, target)

    def inner(self, path: str, name: str, x: jax.Array, target: Any) -> jax.Array:
        """State of the inner chain: whole leaves, chunks of leaves, or neither."""
        if x.dtype != target.dtype:
            raise ValueError(f"{name}{path} is {x.dtype}, with tx it would be {target.dtype}.")
        owner = max((leaf for leaf in self.sides if path.endswith(leaf)), key=len, default=None)
        if owner is not None and x.ndim:
            old, new = self.sides[owner]
            fits = x.shape in (old.whole, old.shape) and target.shape in (new.whole, new.shape)
            if fits and (x.shape != target.shape or old.order != new.order):
                x = _put(x, spread(x.shape, self.mesh), name + path)
                work = spread(target.shape, self.mesh)
                again = jax.jit(recut, static_argnums=(0, 1, 3), out_shardings=work)
                return _put(again(old, new, x, target.shape), target.sharding, name + path)
            tied = not fits and x.shape[0] == old.blocks and old.order != new.order
            if x.shape == target.shape and not tied:
                return _put(x, target.sharding, name + path)
        elif x.shape == target.shape:
            return _put(x, target.sharding, name + path)
        raise ValueError(
            f"{name}{path} has shape {x.shape} and would have {target.shape}: it belongs to the "
            "blocks of a number of devices and cannot be cut again. Keep the mesh, or use an "
            "inner chain whose state has the shape of the parameters or none."
        )

    def outer(self, name: str, x: jax.Array, target: Any) -> jax.Array:
        """State of links around ``zero_shard``: replicated, or one per device on axis 0."""
        if x.dtype != target.dtype:
            raise ValueError(f"{name} is {x.dtype}, with tx it would be {target.dtype}.")
        if x.shape != target.shape:
            old, new = (p.owners for p in self.parts)
            stacked = x.shape[0] // old == target.shape[0] // new if x.ndim else False
            if not stacked or not jnp.issubdtype(x.dtype, jnp.floating):
                raise ValueError(
                    f"{name} has shape {x.shape} and would have {target.shape}, and no mean over "
                    "devices to keep. Keep the mesh."
                )
            x = _put(x, spread((), self.mesh), name)
            each = np.asarray(x, np.float32).reshape(old, -1, *x.shape[1:])
            x = rework(jnp.asarray(each), new).reshape(target.shape).astype(x.dtype)
        return _put(x, target.sharding, name)


def _name(path: Any, empty: str) -> str:
    return jax.tree_util.keystr(path) or empty


def _value(x: Any) -> Any:
    """The array of a parameter."""
    return x.value if is_shard(x) else x


def follows_shards(name: str) -> str:
    """Why state of a link in front of ``zero_shard`` cannot be converted at stage 3."""
    return (
        f"{name} is state of a link in front of zero_shard and has the shape of stage 3's shards, "
        "each made of the gradients of other devices: it cannot be cut again. Keep the mesh and "
        "zero, or use links without such state (clip_by_global_norm)."
    )


def refuse_model_axes(params: Tree, zero: ZeroConfig) -> None:
    """Raises where a parameter is sharded over a model axis."""
    for path, x in jax.tree.leaves_with_path(params, is_leaf=is_shard):
        cut = model_sharding(x, zero.axes)
        if cut:
            raise NotImplementedError(
                f"parameter {_name(path, 'params')} is sharded over model axes ({cut}): its state "
                "is that of pieces and cannot be converted in this version. Keep the mesh and "
                "zero, or start with init from the parameters."
            )


def convert(
    state: TrainState,
    zero_before: ZeroConfig,
    parts_before: Parts,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    zero: ZeroConfig,
) -> TrainState:
    """:func:`resize` of a state whose arrays may lie anywhere on the devices of ``mesh``."""
    new = abstract_state(whole_shapes(state.params), tx, mesh, zero, state.model_state)
    parts = Parts.of(mesh.shape, zero)
    return _Resizing(state, new, (zero_before, zero), (parts_before, parts), tx, mesh).run()


def resize(
    state: TrainState, tx: optax.GradientTransformation, mesh: Mesh, zero: ZeroConfig
) -> TrainState:
    r"""The state on another mesh, another slow x fast split of it, or in another stage.

    With W workers before and W' after:

    - parameters, master parameters, variance, weights, counters and the server error
      keep their values: they are cut again, and nothing is rounded;
    - worker errors and local momenta keep their mean over workers: groups are averaged
      when W' divides W, copied when W divides W', else everyone gets the mean;
    - codes (the packed momentum of ``gather="momentum"``, int8 and bfloat16 storage) stay
      bit for bit where the blocks keep their width, which all but small leaves do; else
      they are decoded and encoded again. What the packed momentum loses, times b1,
      goes into the server error, so that the next step sends what it would have sent;
    - a leaf that becomes dense (too small for many devices) takes its errors into the
      momentum, over which they are applied in full (dropped if b1 = 0); one that becomes
      compressed starts with error 0 and its momentum on all workers.

    All stages and both gather legs convert into each other: to
    ``gather="params"`` the parameters become the master parameters and the server
    error moves to the workers; to ``gather="momentum"`` the master parameters become
    the parameters (float32 ones; others are refused, their masters hold more) and the
    mean of the local momenta becomes the momentum. Stage 3 cuts a leaf along an axis
    before it is cut into blocks: there the factors of the weight are made anew from
    v, as the last dense step would have made them.

    Where the split and ``zero`` stay the same, no bit changes. One leaf is converted at a
    time: at its peak a device holds the old state, the new one, and a few copies of
    the largest leaf. Unchanged arrays are shared with ``state``; do not use that again.

    Args:
      state: from :func:`init`, a train step or :func:`restore`.
      tx: the optimizer as before, built with the new ``zero``.
      mesh: the new mesh. In a multi-process run its devices must be those of the old
        one; for others go through a checkpoint.
      zero: the new configuration.

    Returns:
      A TrainState as :func:`init` with these arguments makes it.

    Raises:
      ValueError: another optimizer or other parameters; state of the inner chain that
        depends on blocks, or of a link in front that has the shape of stage 3's shards;
        bfloat16 parameters without a master afterwards; devices of other processes.

    Example:
      >>> from onebit_zero_jax import init, onebit_adam
      >>> zero = ZeroConfig()
      >>> tx = onebit_adam(0.1, zero=zero)
      >>> meshes = [jax.make_mesh((n,), ("data",), devices=jax.devices()[:n]) for n in (4, 2)]
      >>> state = init({"w": jnp.ones((32, 32))}, tx, meshes[0], zero)
      >>> state.opt_state.leaves["w"].worker_error.shape
      (16, 8, 32)
      >>> resize(state, tx, meshes[1], zero).opt_state.leaves["w"].worker_error.shape
      (4, 8, 64)
    """
    if not isinstance(state, TrainState):
        raise ValueError(f"state must come from init, got {type(state).__name__}.")
    states = zero_states(state.opt_state)
    sharding = getattr(state.step, "sharding", None)
    if not states or not isinstance(sharding, NamedSharding):
        raise ValueError("state is on no mesh: pass what init, a train step or restore returned.")
    before = states[0].run.zero
    refuse_model_axes(state.params, before)
    parts = Parts.of(sharding.mesh.shape, before)
    return convert(state, before, parts, tx, mesh, zero)
