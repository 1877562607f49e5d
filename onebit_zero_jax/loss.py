"""A user's loss: its calling convention, whether it marks layers, whether it is local."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from onebit_zero_jax import collectives as coll
from onebit_zero_jax import layers
from onebit_zero_jax.config import ZeroConfig
from onebit_zero_jax.layout import is_shard
from onebit_zero_jax.shards import shard_specs, without
from onebit_zero_jax.train_state import P, Tree


def _floating(compute_dtype: Any) -> Any:
    try:
        dtype = jnp.dtype(compute_dtype)
    except TypeError as e:
        raise ValueError(f"compute_dtype must be a dtype or None, got {compute_dtype!r}.") from e
    if not jnp.issubdtype(dtype, jnp.floating) or jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(
            f"compute_dtype must be floating-point, and of 64 bits only with jax_enable_x64, got "
            f"{compute_dtype!r}."
        )
    return dtype


def _leaves(params: Tree) -> list[tuple[str, Any]]:
    """Paths and leaves, shards whole."""
    leaves = jax.tree.leaves_with_path(params, is_leaf=is_shard)
    return [(jax.tree_util.keystr(path), x) for path, x in leaves]


def over_data_axes(
    fn: Callable[..., Any], mesh: Mesh, zero: ZeroConfig, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """``fn`` mapped over the data-parallel axes alone; other axes stay with XLA or the loss.

    Where such a map begins and ends JAX (0.10.2) closes the shardings over other axes of an
    Explicit mesh, and XLA gathers over them. So its border is Auto, its inside Explicit again.

    Args:
      fn: of arrays of one device of the data-parallel axes.
      mesh, zero: as in :func:`train_step`.
      in_specs: trees that begin the arguments', of data-parallel axes.
      out_specs: of the results, whole, model axes too.
    """
    axes = zero.axes
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    explicit = tuple(a for a, kind in kinds.items() if kind == AxisType.Explicit)
    model = tuple(a for a in explicit if a not in axes)
    over_data = jax.tree.map(lambda spec: without(spec, {*mesh.axis_names} - {*axes}), out_specs)
    kwargs: dict[str, Any] = {"in_specs": in_specs, "out_specs": over_data}
    # Without axis types: a user's loss may scan from a constant carry.
    kwargs |= {"axis_names": {*axes}, "check_vma": False}
    if not model:
        return jax.shard_map(fn, mesh=mesh, **kwargs)
    outside = jax.tree.map(lambda spec: without(spec, {*mesh.axis_names} - {*explicit}), out_specs)

    def run(*args: Any) -> Any:
        inside = jax.tree.map(lambda x: without(jax.typeof(x).sharding.spec, axes), args)
        local = jax.sharding.explicit_axes(fn, axes=model, in_sharding=inside)
        mapped = jax.shard_map(local, **kwargs)
        around: Any = mesh
        with jax.sharding.use_abstract_mesh(getattr(around, "abstract_mesh", around)):
            return jax.sharding.auto_axes(mapped, axes=model, out_sharding=outside)(*args)

    return run


class Loss:
    """A user's loss in one calling convention: (params, model_state, batch, rng)."""

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        has_aux: bool,
        with_rng: bool,
        has_model_state: bool,
        compute_dtype: Any,
    ) -> None:
        """Arguments are those of :func:`train_step`."""
        if not callable(loss_fn):
            raise ValueError(f"loss_fn must be callable, got {loss_fn!r}.")
        flags = {"has_aux": has_aux, "with_rng": with_rng, "has_model_state": has_model_state}
        for name, value in flags.items():
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be True or False, got {value!r}.")
        self.loss_fn, self.has_aux, self.with_rng = loss_fn, has_aux, with_rng
        self.has_model_state = has_model_state
        self.compute_dtype = None if compute_dtype is None else _floating(compute_dtype)
        # Whether layers gather their own shards; known once the loss has been traced.
        self.layered = False

    def __call__(
        self, params: Tree, model_state: Tree, batch: Tree, rng: Any
    ) -> tuple[jax.Array, tuple[Tree, Tree]]:
        """The loss by parameters from :func:`layers.wrap`."""
        params = layers.into_loss(params, self.compute_dtype, self.layered)
        args = (params, *([model_state] if self.has_model_state else []), batch)
        out = self.loss_fn(*args, *([rng] if self.with_rng else []))
        extras = int(self.has_model_state) + int(self.has_aux)
        loss, *rest = out if extras and isinstance(out, tuple) else (out,)
        if len(rest) == 1 and extras == 2 and isinstance(rest[0], tuple):
            rest = list(rest[0])
        if len(rest) != extras or not hasattr(loss, "shape") or loss.shape != ():
            wanted = ["loss", *["model_state"] * self.has_model_state, *["aux"] * self.has_aux]
            raise ValueError(
                f"loss_fn must return {', '.join(wanted) if extras else 'a scalar loss'}, got "
                f"{jax.tree.map(lambda x: getattr(x, 'shape', x), out)}; see has_aux and "
                "has_model_state."
            )
        if not jnp.issubdtype(loss.dtype, jnp.floating):
            raise ValueError(f"the loss must be floating-point, got {loss.dtype}.")
        state = rest.pop(0) if self.has_model_state else model_state
        return loss.astype(jnp.float32), (state, rest[0] if rest else None)

    def find_layers(self, mesh: Mesh, zero: ZeroConfig, *args: Tree) -> None:
        """At stage 3, finds out whether the loss marks layers.

        Raises:
          ValueError: it does, and uses shards outside of them.
        """
        if zero.stage < 3:
            return

        def probe(params: Tree, model_state: Tree, batch: Tree, rng: Any) -> jax.Array:
            return self(layers.wrap(params, zero, self.compute_dtype), model_state, batch, rng)[0]

        # An error of the loss itself is raised where the step is traced.
        with layers.marked_layers() as calls, contextlib.suppress(Exception):
            self._trace(probe, mesh, zero.axes, *args, check_vma=False)
        self.layered = bool(calls)
        names = [path for path, x in _leaves(args[0]) if is_shard(x)]
        outside = functools.partial(self._depends_on, mesh=mesh, zero=zero, args=args)
        # A loss that does not trace with typed axes runs all the same.
        if self.layered and outside([]) is False and outside(names) is not False:
            found = [name for name in names if outside([name]) is not False]
            raise ValueError(
                f"the loss uses shards of {', '.join(found)} outside layer(fn), where a device has "
                "its own part alone (jax.tree.leaves(params) reaches it): a loss that marks "
                "layers must pass every one to a layer, in its first argument."
            )

    def _depends_on(
        self, names: list[str], mesh: Mesh, zero: ZeroConfig, args: tuple[Tree, ...]
    ) -> bool | None:
        """Whether the loss depends on these shards other than through layers.

        Types tell: an axis of a mesh made for it, over which nothing varies but these. None
        if the loss does not trace so: a scan from a constant carry, say, that adds them up.
        """
        axis = "".join(["shards", *mesh.axis_names])
        kinds = mesh.axis_types
        wider = AbstractMesh((*mesh.axis_sizes, 1), (*mesh.axis_names, axis), (*kinds, kinds[0]))
        specs = (shard_specs(args[0]), P(), P(zero.axes), P())

        def local(x: Any, spec: P) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(NamedSharding(mesh, spec).shard_shape(x.shape), x.dtype)

        shapes = [
            jax.tree.map(lambda s, x: jax.tree.map(lambda y: local(y, s), x), spec, arg)
            for arg, spec in zip(args, specs, strict=True)
        ]
        varies = []

        def probe(params: Tree, *others: Any) -> jax.Array:
            mark = lambda path, x: (
                dataclasses.replace(x, value=coll.vary(x.value, axis)) if path in names else x
            )
            marked = [mark(path, x) for path, x in _leaves(params)]
            params = jax.tree.unflatten(jax.tree.structure(params, is_leaf=is_shard), marked)
            loss, _ = self(layers.wrap(params, zero, self.compute_dtype), *others)
            varies.append(axis in jax.typeof(loss).manual_axis_type.varying)
            return jnp.zeros(())

        mapped = jax.shard_map(
            probe, mesh=wider, in_specs=P(), out_specs=P(), axis_names={*zero.axes, axis}
        )
        with layers.severed(), contextlib.suppress(Exception):
            jax.eval_shape(mapped, *shapes)
        return any(varies) if varies else None

    def _trace(
        self, probe: Callable[..., Any], mesh: Mesh, axes: Any, *args: Tree, check_vma: bool = True
    ) -> None:
        specs = (shard_specs(args[0]), P(), P(axes), P())

        def shape(x: Any, spec: P) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

        shapes = [
            jax.tree.map(lambda s, x: jax.tree.map(lambda y: shape(y, s), x), spec, arg)
            for arg, spec in zip(args, specs, strict=True)
        ]
        mapped = jax.shard_map(
            probe,
            mesh=mesh,
            in_specs=specs,
            out_specs=P(),
            axis_names=set(axes),
            check_vma=check_vma,
        )
        jax.eval_shape(mapped, *shapes)

    def check_local(self, mesh: Mesh, zero: ZeroConfig, *args: Tree) -> None:
        """Raises if the loss is already reduced over an axis (its gradient would be too)."""
        axes = zero.axes
        wide = {axis for axis in axes if mesh.shape[axis] > 1}
        reduced: list[str] = []

        def probe(params: Tree, model_state: Tree, batch: Tree, rng: Any) -> jax.Array:
            params = jax.tree.map(lambda x: coll.vary(x, axes), params)
            model_state = jax.tree.map(lambda x: coll.vary(x, axes), model_state)
            params = layers.wrap(params, zero, self.compute_dtype)
            loss, _ = self(params, model_state, batch, rng)
            reduced.extend(wide - jax.typeof(loss).manual_axis_type.varying)
            return jnp.zeros(())

        # Losses that do not trace with typed axes (a scan from a constant carry) run all
        # the same: the step itself does without types.
        with contextlib.suppress(Exception):
            self._trace(probe, mesh, axes, *args)
        if reduced:
            raise ValueError(
                f"loss_fn returns the same loss on every device of axis {reduced[0]!r}: it was "
                "already reduced. Return the mean over the examples "
                "of this device alone; train_step averages over devices."
            )
