"""A compiled train step on a mesh, one program per phase, and evaluation."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from onebit_zero_jax import collectives as coll
from onebit_zero_jax import layers
from onebit_zero_jax.clip import global_norm
from onebit_zero_jax.config import ZeroConfig
from onebit_zero_jax.layout import is_shard
from onebit_zero_jax.loss import Loss, over_data_axes
from onebit_zero_jax.opt_specs import check_tx, with_extra_args
from onebit_zero_jax.phases import CHECK_EVERY, NOTICE, Phases
from onebit_zero_jax.shard import Phase
from onebit_zero_jax.shards import check_mesh, shard_specs, without
from onebit_zero_jax.state import zero_states
from onebit_zero_jax.train_state import (
    P,
    TrainState,
    Tree,
    shard_batch,
    state_specs,
)
from onebit_zero_jax.wire import traced_bytes


def _mean_over(tree: Tree, axes: coll.AxisName) -> Tree:
    """Floating-point leaves averaged over devices, integers and bools summed."""

    def reduce(x: Any) -> jax.Array:
        x = jnp.asarray(x)
        if jnp.issubdtype(x.dtype, jnp.inexact):
            return lax.pmean(x, axes)
        return lax.psum(x.astype(jnp.int32) if x.dtype == jnp.bool_ else x, axes)

    with jax.named_scope("metrics"):
        return jax.tree.map(reduce, tree)


class TrainStep:
    """A compiled train step; made by :func:`train_step`. One program per phase."""

    def __init__(
        self,
        loss: Loss,
        tx: optax.GradientTransformation,
        mesh: Mesh,
        zero: ZeroConfig,
        accumulate: int,
    ) -> None:
        """Use :func:`train_step`."""
        self._loss, self._mesh, self._zero = loss, mesh, zero
        self._tx = with_extra_args(tx)
        self._accumulate = accumulate
        self._programs: dict[Any, tuple[Any, dict[str, int]]] = {}
        self._specs: TrainState | None = None
        self._phases: Phases | None = None
        self._traced = self._checked = False
        # The optimizer's step count returned last, and its value: known without asking the device.
        self._last: tuple[jax.Array, int] | None = None
        self._frozen = False
        # What the host knows of `starts` of each zero_shard, and what the device has told since.
        self._starts: list[tuple[int, ...]] = []
        self._told: tuple[int, list[jax.Array]] | None = None

    def __call__(self, state: TrainState, batch: Tree, rng: Any = None) -> tuple[TrainState, Any]:
        """One step: ``(state, batch[, rng]) -> (state, metrics)``; ``state`` is donated."""
        batch = self._prepare(state, batch, rng)
        step, phase = self._next_phase(state)
        program, sent = self._program(phase, state, batch, rng)
        state, metrics = program(state, batch, rng)
        self._last = (zero_states(state.opt_state)[0].step, step + 1)
        if self._phases is not None and self._phases.decides and (step + 1) % CHECK_EVERY == 0:
            # Copies, for the next step consumes the state; read NOTICE steps later.
            starts = [s.starts.addressable_data(0) for s in zero_states(state.opt_state)]
            self._told = step + 1 + NOTICE, [jnp.copy(x) for x in starts]
        metrics = dict(metrics, phase=phase or "device", bytes_sent=dict(sent))
        return state, metrics

    def lower(
        self, state: TrainState, batch: Tree, rng: Any = None, phase: Phase | None = "compressed"
    ) -> Any:
        """The program of a phase as ``jax.stages.Lowered``; ``.compile()`` it to read it."""
        batch = self._prepare(state, batch, rng)
        return self._jit(phase, batch).lower(state, batch, rng)

    def bytes_sent(
        self, state: TrainState, batch: Tree, rng: Any = None, phase: Phase | None = "compressed"
    ) -> dict[str, int]:
        """Bytes each device sends in a step of the given phase, by leg; runs nothing."""
        batch = self._prepare(state, batch, rng)
        return dict(self._program(phase, state, batch, rng)[1])

    def _prepare(self, state: TrainState, batch: Tree, rng: Any) -> Tree:
        if not isinstance(state, TrainState):
            raise ValueError(f"state must come from init, got {type(state).__name__}.")
        if self._loss.with_rng != (rng is not None):
            raise ValueError(
                "step(state, batch, rng) needs a key: train_step was made with with_rng=True."
                if self._loss.with_rng
                else "step(state, batch) takes no rng: make it with train_step(with_rng=True)."
            )
        if rng is not None and not (self._traced and isinstance(rng, (jax.Array, np.ndarray))):
            try:
                jax.eval_shape(lambda: jax.random.fold_in(rng, 0))
            except (TypeError, ValueError) as e:
                raise ValueError(f"rng must be a key, e.g. jax.random.key(0), got {rng!r}.") from e
        if self._loss.has_model_state != (state.model_state is not None):
            raise ValueError(
                "has_model_state=True needs init(..., model_state=...), and the other way round."
            )
        if self._specs is None:
            self._check_devices(state)
            self._specs = state_specs(
                state.params, self._tx, self._mesh, self._zero, state.model_state
            )
            self._phases = check_tx(state.opt_state, self._zero)
            expected: Any = jax.tree.structure(self._specs.opt_state)
            if jax.tree.structure(state.opt_state) != expected:
                raise ValueError("state was not made by init with this tx; call init again.")
        batch = shard_batch(batch, self._mesh, self._zero)
        if not self._traced:
            args = (state.params, state.model_state, batch, rng)
            self._loss.find_layers(self._mesh, self._zero, *args)
            self._traced = True
        return batch

    def _check_devices(self, state: TrainState) -> None:
        sharding = getattr(state.step, "sharding", None)
        meshes = self._mesh, getattr(sharding, "mesh", None)
        if not isinstance(sharding, NamedSharding) or any(
            isinstance(mesh, AbstractMesh) for mesh in meshes
        ):
            return
        devices: list[Any] = [self._mesh.devices.flat, sharding.device_set]
        here, there = (sorted(d.id for d in x) for x in devices)
        if here != there:
            raise ValueError(
                f"state is on devices {there}, but the mesh of train_step has {here}: pass the "
                "mesh of init, or move the state with resize."
            )

    def _next_phase(self, state: TrainState) -> tuple[int, Phase | None]:
        count = zero_states(state.opt_state)[0].step
        if self._last is not None and self._last[0] is count:
            step = self._last[1]
        else:  # The first step, or a state from elsewhere: ask the device once.
            step, self._frozen, self._told = int(count), False, None
            self._starts = _read([s.starts for s in zero_states(state.opt_state)])
        if self._told is not None and step >= self._told[0]:
            self._starts, self._told = _read(self._told[1]), None
        if self._phases is None:
            return step, None
        dense = {self._phases.is_dense(step, starts) for starts in self._starts}
        if len(dense) > 1:  # Groups whose warm-up or learning rates differ.
            return step, None
        if dense.pop():
            return step, "dense"
        if not self._frozen:
            # All of warm-up may have been skipped; asked once per run.
            updates = [int(s.variance_updates) for s in zero_states(state.opt_state)]
            if min(updates) == 0:
                return step, "dense"
            self._frozen = True
        return step, "compressed"

    def _program(
        self, phase: Phase | None, state: TrainState, batch: Tree, rng: Any
    ) -> tuple[Any, dict[str, int]]:
        shapes = jax.tree.map(lambda x: (x.shape, x.dtype), batch)
        key = (phase, jax.tree.structure(batch), tuple(jax.tree.leaves(shapes)))
        if key not in self._programs:
            if not self._checked:
                args = (state.params, state.model_state, batch, rng)
                self._loss.check_local(self._mesh, self._zero, *args)
                self._checked = True
            jitted = self._jit(phase, batch)
            traced = jitted.trace(state, batch, rng)
            self._programs[key] = jitted, traced_bytes(traced.jaxpr, dict(self._mesh.shape))
        return self._programs[key]

    def _jit(self, phase: Phase | None, batch: Tree) -> Any:
        """Two maps in one program: the loss leaves model axes to XLA, the optimizer does not."""
        specs, mesh, axes = self._specs, self._mesh, self._zero.axes
        assert specs is not None
        batch_specs = jax.tree.map(lambda x: P(axes), batch)
        local_specs = jax.tree.map(lambda spec: P(axes, *without(spec, axes)), specs.params)
        update = jax.shard_map(
            functools.partial(self._update, phase),
            mesh=mesh,
            in_specs=(specs.params, specs.opt_state, P(axes), local_specs),
            out_specs=(specs.params, specs.opt_state, P(), P()),
        )

        def run(state: TrainState, batch: Tree, rng: Any) -> tuple[TrainState, dict[str, Any]]:
            in_specs = (shard_specs(state.params), P(), P(), batch_specs, P())
            out_specs = (P(axes), local_specs, P(), P())
            differentiate = over_data_axes(self._local, mesh, self._zero, in_specs, out_specs)
            loss, grads, model_state, aux = differentiate(
                state.params, state.model_state, state.step, batch, rng
            )
            params, opt_state, applied, metrics = update(state.params, state.opt_state, loss, grads)
            # A skipped step must not leave its non-finite statistics behind.
            model_state = jax.tree.map(
                lambda new, old: jnp.where(applied, new, old), model_state, state.model_state
            )
            if self._loss.has_aux:
                metrics["aux"] = aux
            return TrainState(state.step + 1, params, opt_state, model_state), metrics

        return jax.jit(run, donate_argnums=0)

    def _local(
        self, params: Tree, model_state: Tree, step: jax.Array, batch: Tree, rng: Any
    ) -> tuple[jax.Array, Tree, Tree, Tree]:
        """This device's loss and gradients, with an axis in front for the devices."""
        axes = self._zero.axes
        if rng is not None:
            rng = jax.random.fold_in(jax.random.fold_in(rng, step), lax.axis_index(axes))
        loss, grads, model_state, aux = self._gradients(params, model_state, batch, rng)
        loss, grads = jax.tree.map(lambda x: x[None], (loss, grads))
        return loss, grads, _mean_over_floats(model_state, axes), _mean_over(aux, axes)

    def _update(
        self, phase: Phase | None, params: Tree, opt_state: Any, loss: jax.Array, grads: Tree
    ) -> tuple[Tree, Any, jax.Array, dict[str, Any]]:
        """The optimizer's step; also whether it was applied, and metrics."""
        axes = self._zero.axes
        loss, grads = jax.tree.map(lambda x: x[0], (loss, grads))
        extra = {} if phase is None else {"phase": phase}
        before = zero_states(opt_state)
        updates, opt_state = self._tx.update(grads, opt_state, params, **extra)
        params = optax.apply_updates(params, jax.tree.map(_typed_as, updates, params))
        zeros = zero_states(opt_state)
        applied = [new.applied > old.applied for new, old in zip(zeros, before, strict=True)]
        lost = sum((s.residual for s in zeros), jnp.zeros((1, 2), jnp.float32))
        now, first = sum((_norms(s.staleness) for s in zeros), jnp.zeros(2, jnp.float32))
        shares = jnp.concatenate([jnp.ravel(lost), jnp.stack([now, first])])
        with jax.named_scope("metrics"):
            pieces = coll.sum_over_model_axes([shares], axes)
            totals = lax.psum(jnp.concatenate([loss[None], *pieces]), axes)
        growth = jnp.where(totals[4] > 0, totals[3] / jnp.where(totals[4] > 0, totals[4], 1.0), 1.0)
        metrics = {
            "loss": totals[0] / coll.axis_size(axes),
            "gradient_norm": global_norm(grads, axes),
            "residual_ratio": jnp.sqrt(totals[1] / jnp.where(totals[2] > 0, totals[2], 1.0)),
            "variance_staleness": jnp.square(growth),
            "skipped_steps": jnp.max(jnp.stack([s.step - s.applied for s in zeros])),
        }
        return params, opt_state, jnp.all(jnp.stack(applied)), metrics

    def _gradients(
        self, params: Tree, model_state: Tree, batch: Tree, rng: Any
    ) -> tuple[jax.Array, Tree, Tree, Tree]:
        """Local loss, gradients, model state and aux, over all micro-batches."""
        wrapped = layers.wrap(params, self._zero, self._loss.compute_dtype)

        def differentiate(*args: Any) -> tuple[Any, Tree]:
            out, grads = jax.value_and_grad(self._loss, has_aux=True)(wrapped, *args)
            return out, layers.unwrap(grads, params)

        k = self._accumulate
        if k == 1:
            (loss, (model_state, aux)), grads = differentiate(model_state, batch, rng)
            return loss, grads, model_state, aux

        def split(path: Any, x: jax.Array) -> jax.Array:
            if x.shape[0] % k:
                raise ValueError(
                    f"batch{jax.tree_util.keystr(path)} has {x.shape[0]} examples per device, "
                    f"not a multiple of accumulate={k}."
                )
            return x.reshape(k, x.shape[0] // k, *x.shape[1:])

        batches = jax.tree_util.tree_map_with_path(split, batch)

        def add(carry: Any, xs: Any) -> tuple[Any, Any]:
            total, model_state = carry
            i, batch = xs
            key = None if rng is None else jax.random.fold_in(rng, i)
            (loss, (model_state, aux)), grads = differentiate(model_state, batch, key)
            total = jax.tree.map(lambda t, g: t + g.astype(jnp.float32) / k, total, grads)
            return (total, model_state), (loss, aux)

        def zero(x: Any) -> Any:
            if is_shard(x):
                return dataclasses.replace(x, value=layers.gradient_zeros(x, self._zero))
            return jnp.zeros_like(x, jnp.float32)

        zeros = jax.tree.map(zero, params, is_leaf=is_shard)
        (grads, model_state), (losses, auxes) = lax.scan(
            add, (zeros, model_state), (jnp.arange(k), batches)
        )
        aux = jax.tree.map(
            lambda x: (
                jnp.mean(x, axis=0) if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.sum(x, axis=0)
            ),
            auxes,
        )
        return jnp.mean(losses), grads, model_state, aux


def _typed_as(update: jax.Array, param: jax.Array) -> jax.Array:
    """``update``; zeros made in the image of a local gradient get the parameter's type."""
    varying = [jax.typeof(x).manual_axis_type.varying for x in (update, param)]
    same = update.shape == param.shape and varying[0] <= varying[1]
    return update if same else jnp.zeros_like(param)


def _norms(staleness: jax.Array) -> jax.Array:
    """The weighted norm of what was last encoded, and the mean of the first ones."""
    now, total, count = staleness[0]
    return jnp.stack([now, total / jnp.maximum(count, 1.0)])


def _read(starts: list[jax.Array]) -> list[tuple[int, ...]]:
    return [tuple(np.asarray(x).tolist()) for x in starts]


def _mean_over_floats(tree: Tree, axes: coll.AxisName) -> Tree:
    """Floating-point leaves averaged over devices; others are taken as equal on all."""
    with jax.named_scope("metrics"):
        return jax.tree.map(
            lambda x: lax.pmean(x, axes) if jnp.issubdtype(x.dtype, jnp.inexact) else x, tree
        )


def train_step(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    mesh: Mesh,
    zero: ZeroConfig,
    has_aux: bool = False,
    with_rng: bool = False,
    accumulate: int = 1,
    *,
    has_model_state: bool = False,
    compute_dtype: Any = None,
) -> TrainStep:
    """A train step on the mesh: jitted, donating, one program per phase.

    The phase of a step is picked on the host from the step count, without waiting for
    the device. ``loss_fn`` runs on each device's own examples and returns their mean
    loss: no collective over the data-parallel axis, but for statistics such as
    synchronised batch normalisation.

    Args:
      loss_fn: ``loss_fn(params, [model_state,] batch[, rng])`` returns
        ``loss``, ``(loss, aux)``, ``(loss, model_state)`` or ``(loss, (model_state, aux))``.
      tx: optimizer holding a ``zero_shard``; ``optax.chain`` in front of it, partitions
        and masks around it are fine.
      mesh: mesh with the data-parallel axis.
      zero: the configuration ``tx`` was built with.
      has_aux: ``loss_fn`` returns auxiliary output; ``metrics["aux"]`` has its
        floating-point leaves averaged over devices and micro-batches, integers summed.
      with_rng: the step takes a key; folded with the step, device and micro-batch.
      accumulate: micro-batches per step; gradients add up in float32 and are sent once.
      has_model_state: ``loss_fn`` takes and returns mutable model state; its
        floating-point leaves are averaged over devices, all others must come out equal.
      compute_dtype: dtype that parameters are cast to for ``loss_fn``, e.g. ``jnp.bfloat16``.

    Returns:
      ``step(state, batch[, rng]) -> (state, metrics)``. ``batch`` goes through
      :func:`shard_batch`. ``metrics``: ``loss`` and ``gradient_norm`` (of the mean
      gradient, :func:`global_norm`), ``residual_ratio`` (weighted norm of the worker
      errors over what was encoded; below 1), ``variance_staleness`` (mean square of the
      gradients over what the variance says, see docs/method.md; 1 when fresh),
      ``skipped_steps`` so far: arrays on the device; ``phase`` and ``bytes_sent`` (per
      device, by leg, read from the traced program): known on the host; ``aux``.

    Raises:
      ValueError: mesh without the axis, ``zero`` not that of ``tx``, ``accumulate``
        below 1 (here); a loss that is already reduced, or whose output does not fit,
        batches that do not divide (at the first step).

    Example:
      >>> from onebit_zero_jax import init, onebit_adam
      >>> mesh, zero = jax.make_mesh((1,), ("data",)), ZeroConfig()
      >>> tx = onebit_adam(0.1, zero=zero, warmup_steps=1)
      >>> def loss_fn(params, batch):
      ...     return jnp.mean(jnp.square(batch @ params["w"] - 1.0))
      >>> step = train_step(loss_fn, tx, mesh, zero)
      >>> state = init({"w": jnp.zeros((8, 8))}, tx, mesh, zero)
      >>> for _ in range(3):
      ...     state, metrics = step(state, np.ones((4, 8), np.float32))
      >>> int(state.step), metrics["phase"], float(metrics["loss"]) < 1.0
      (3, 'compressed', True)
    """
    check_mesh(mesh, zero)
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise ValueError(f"accumulate must be an integer of at least 1, got {accumulate!r}.")
    loss = Loss(loss_fn, has_aux, with_rng, has_model_state, compute_dtype)
    return TrainStep(loss, tx, mesh, zero, accumulate)


def eval_step(
    loss_fn: Callable[..., Any],
    mesh: Mesh,
    zero: ZeroConfig,
    has_aux: bool = False,
    *,
    has_model_state: bool = False,
    compute_dtype: Any = None,
) -> Callable[[TrainState, Tree], dict[str, Any]]:
    """Evaluation of a loss on the mesh, without gradients; the state is not donated.

    Args:
      loss_fn, mesh, zero, has_aux, has_model_state, compute_dtype: as in
        :func:`train_step`; model state that ``loss_fn`` returns is dropped. A loss that
        takes a key needs wrapping: ``lambda params, batch: loss_fn(params, batch, key)``.

    Returns:
      ``evaluate(state, batch) -> {"loss": ..., "aux": ...}``, averaged over devices.

    Raises:
      ValueError: mesh without the axis; batches that do not divide over the devices.

    Example:
      >>> from onebit_zero_jax import init, onebit_adam
      >>> mesh, zero = jax.make_mesh((1,), ("data",)), ZeroConfig()
      >>> state = init({"w": jnp.ones((8, 8))}, onebit_adam(0.1, zero=zero), mesh, zero)
      >>> evaluate = eval_step(lambda p, x: jnp.mean(x @ p["w"]), mesh, zero)
      >>> float(evaluate(state, np.ones((2, 8), np.float32))["loss"])
      8.0
    """
    check_mesh(mesh, zero)
    loss = Loss(loss_fn, has_aux, False, has_model_state, compute_dtype)
    axes = zero.axes

    @jax.jit
    def run(params: Tree, model_state: Tree, batch: Tree) -> dict[str, Any]:
        loss.find_layers(mesh, zero, params, model_state, batch, None)

        def body(params: Tree, model_state: Tree, batch: Tree) -> dict[str, Any]:
            params = layers.wrap(params, zero, loss.compute_dtype)
            value, (_, aux) = loss(params, model_state, batch, None)
            out = {"loss": lax.pmean(value, axes)}
            return {**out, "aux": _mean_over(aux, axes)} if has_aux else out

        specs = (shard_specs(params), P(), P(axes))
        return over_data_axes(body, mesh, zero, specs, P())(params, model_state, batch)

    def evaluate(state: TrainState, batch: Tree) -> dict[str, Any]:
        return run(state.params, state.model_state, shard_batch(batch, mesh, zero))

    return evaluate
