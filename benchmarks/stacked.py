"""Many data-parallel workers on one device: a stacked axis stands in for the mesh.

``jax.vmap(axis_name="data")`` runs the package's own step, collectives included. What a mesh
holds once per device is stacked along axis 0; replicated state is held once.
"""

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh
from tasks import Task

import onebit_zero_jax as ob
from onebit_zero_jax import codec, legs, shard, weighting
from onebit_zero_jax.phases import Phases
from onebit_zero_jax.state import zero_states
from onebit_zero_jax.train_state import state_specs
from onebit_zero_jax.wire import traced_bytes

Tree = Any
AXIS = "data"


@dataclasses.dataclass(frozen=True)
class Config:
    """One configuration; everything else is the task's.

    Attributes:
      zero: fields of ``ZeroConfig``; None is dense AdamW.
      warmup: dense steps at the start, as a share of the run.
      refresh: as in ``onebit_adamw``.
      workers: devices; the examples of a step are divided among them.
      b2, replica: decay of the variance (None: the task's), dtype of the parameters.
      rate: multiplies the task's rate, for the dense runs it is compared with, too.
      inner: chain under ``zero_shard``, of INNER; None is ``onebit_adamw``.
      patch: ablation of ABLATIONS, which replaces a function of the package.
    """

    zero: tuple[tuple[str, Any], ...] | None = ()
    warmup: float = 0.25
    refresh: int | None = 32
    workers: int = 8
    b2: float | None = None
    replica: str = "float32"
    rate: float = 1.0
    inner: str | None = None
    patch: str | None = None

    def base(self) -> str:
        """Name of the dense runs to compare with."""
        parts = ["dense"]
        parts += [f"rate x {self.rate:g}"] if self.rate != 1 else []
        parts += [f"b2 {self.b2:g}"] if self.b2 is not None else []
        return ", ".join(parts)


# ---------------------------------------------------------------- ablations and inner chains


def _exact_reduce(step: Any, leaves: Any, states: Any, local: Any, weights: Any) -> Any:
    """The compressed step without its code: M is the exact mean of the local momenta."""
    owned = []
    for s, m, w in zip(states, local, weights, strict=True):
        mean = step.own(jax.lax.pmean(m, step.zero.slow))
        owned.append(legs.Owned(mean, s.variance, step.own(w), ()))
    return (states, owned), jnp.zeros((1, 3), jnp.float32)


def _restart(step: Any, dense: Any, coded: Any) -> Any:
    """A refresh whose M is b1 M + (1 - b1) g, not that of the code."""
    return dense


def _unweighted(row: jax.Array, col: jax.Array, shape: tuple[int, ...]) -> weighting.Factors:
    factors = WEIGHT_FACTORS(row, col, shape)
    return weighting.Factors(*(jnp.ones_like(f) for f in factors))


def _narrow(size: int, parts: int = 1) -> tuple[int, int]:
    return -(-size // (parts * 128)), 16


def _one_block(size: int, parts: int = 1) -> tuple[int, int]:
    """One block for each chunk: the scale per buffer of the published method."""
    return 1, -(-size // (parts * codec.ROWS))


WEIGHT_FACTORS = weighting.weight_factors
# Without weights nothing bounds a step from below but eps, as in the published method.
_NO_WEIGHT = ((weighting, "weight_factors", _unweighted), (legs, "RMS_FLOOR", 0.0))
ABLATIONS: dict[str | None, tuple[tuple[Any, str, Any], ...]] = {
    None: (),
    "refresh restarts M": ((shard, "reduce_refresh", _restart),),
    "exact reduce": ((shard, "reduce_compressed", _exact_reduce),),
    "no weight": _NO_WEIGHT,
    "blocks of 128": ((codec, "block_shape", _narrow),),
    "published": (*_NO_WEIGHT, (codec, "block_shape", _one_block)),
}


@contextlib.contextmanager
def ablated(name: str | None) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for module, attribute, value in ABLATIONS[name]:
            stack.enter_context(mock.patch.object(module, attribute, value))
        yield


# Chains with second moments of their own, of what the reduce leg decoded.
INNER: dict[str, Callable[[float], Any]] = {
    "scale_by_rms": lambda b2: optax.scale_by_rms(b2, 1e-8),
    "scale_by_adam": lambda b2: optax.scale_by_adam(0.0, b2),
    "scale_by_factored_rms": lambda b2: optax.scale_by_factored_rms(min_dim_size_to_factor=8),
    "scale_by_sign": lambda b2: optax.scale_by_sign(),
}


# ---------------------------------------------------------------- many workers on one device


class Stacked:
    """A configuration's programs on one device; workers are axis 0 of their own state.

    ``peak`` and ``warmup`` are inputs of the programs, so runs that differ in them, in
    seeds or in the schedule of refreshes share a compiled program.
    """

    def __init__(self, task: Task, config: Config) -> None:
        self.task, self.config = task, config
        self.zero = ob.ZeroConfig(**dict(config.zero)) if config.zero is not None else None
        self.shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, config.replica), task.init(0)
        )
        if self.zero is None:
            self.init = lambda params, peak, warmup: self._tx(peak, warmup).init(params)
            return
        mesh: Any = AbstractMesh((config.workers,), (AXIS,))
        # jnp.int32: a traced warm-up is no static part of the state.
        tx = self._tx(jnp.float32(1), jnp.int32(1))
        with ablated(config.patch):
            self.specs = state_specs(self.shapes, tx, mesh, self.zero, None).opt_state
        self.axes = jax.tree.map(lambda spec: 0 if spec == jax.P(AXIS) else None, self.specs)
        init = lambda _, params, peak, warmup: self._tx(peak, warmup).init(params)
        stacked = jax.vmap(
            init, (0, None, None, None), self.axes, axis_name=AXIS, axis_size=config.workers
        )
        self.init = jax.jit(lambda *args: stacked(jnp.zeros(config.workers), *args))

    def _tx(self, peak: Any, warmup: Any) -> Any:
        task, config = self.task, self.config
        rate, b2 = task.schedule(peak), task.b2 if config.b2 is None else config.b2
        if self.zero is None:
            return optax.adamw(rate, b2=b2, weight_decay=task.decay)
        common = {"zero": self.zero, "b2": b2, "warmup_steps": warmup, "refresh": config.refresh}
        if config.inner is None:
            return ob.onebit_adamw(rate, weight_decay=task.decay, **common)
        chain = optax.chain(
            INNER[config.inner](b2),
            optax.add_decayed_weights(task.decay),
            optax.scale_by_learning_rate(rate),
        )
        return ob.zero_shard(chain, **common)

    def _update(self, phase: Any) -> Callable[..., Any]:
        def update(opt: Any, params: Tree, grads: Tree, peak: Any, warmup: Any) -> Any:
            extra = {} if self.zero is None else {"phase": phase}
            updates, opt = self._tx(peak, warmup).update(grads, opt, params, **extra)
            return opt, optax.apply_updates(params, updates)

        return update

    @functools.cache  # noqa: B019
    def step(self, phase: str | None) -> Callable[..., Any]:
        """(optimizer state, parameters, batch, peak, warmup) -> the same and the loss."""
        update, workers = self._update(phase), self.config.workers

        def body(opt: Any, params: Tree, batch: Any, peak: Any, warmup: Any) -> Any:
            loss, grads = jax.value_and_grad(self.task.loss)(params, batch)
            return *update(opt, params, grads, peak, warmup), loss

        if self.zero is None:
            return jax.jit(body, donate_argnums=(0, 1))
        stacked = jax.vmap(
            body, (self.axes, None, 0, None, None), (self.axes, None, 0), axis_name=AXIS
        )

        def step(opt: Any, params: Tree, batch: Any, *args: Any) -> Any:
            batch = jax.tree.map(lambda x: x.reshape(workers, -1, *x.shape[1:]), batch)
            opt, params, losses = stacked(opt, params, batch, *args)
            return opt, params, jnp.mean(losses)

        jitted = jax.jit(step, donate_argnums=(0, 1))

        def call(*args: Any) -> Any:
            with ablated(self.config.patch):  # While tracing, at the first call.
                return jitted(*args)

        return call

    @functools.cache  # noqa: B019
    def bits(self, phase: str) -> float:
        """Bits per parameter that a device sends in a step, read from the traced program."""
        count = sum(math.prod(x.shape) for x in jax.tree.leaves(self.shapes))
        if self.zero is None:  # ZeRO-1 in float32: reduce-scatter and all-gather.
            return 64 * (self.config.workers - 1) / self.config.workers
        mesh = AbstractMesh((self.config.workers,), (AXIS,))
        scalar = jax.ShapeDtypeStruct((), jnp.float32)
        with ablated(self.config.patch):
            opt = jax.eval_shape(lambda p: self.init(p, jnp.float32(1), jnp.int32(1)), self.shapes)
            opt = jax.tree.map(  # shard_map has the devices' pieces one after the other.
                lambda x, spec: jax.ShapeDtypeStruct(
                    x.shape if spec == jax.P() else (math.prod(x.shape[:2]), *x.shape[2:]), x.dtype
                ),
                opt,
                self.specs,
            )
            mapped = jax.shard_map(
                lambda opt, params, peak: self._update(phase)(
                    opt, params, params, peak, jnp.int32(1)
                ),
                mesh=mesh,
                in_specs=(self.specs, jax.P(), jax.P()),
                out_specs=(self.specs, jax.P()),
                check_vma=False,
            )
            traced = jax.jit(mapped).trace(opt, self.shapes, scalar)
        sent = traced_bytes(traced.jaxpr, {AXIS: self.config.workers})
        return sum(sent.values()) * 8 / count

    def run(self, seed: int, peak: float, evaluate: Callable[[Tree], jax.Array]) -> dict[str, Any]:
        task, config = self.task, self.config
        start = time.perf_counter()
        warmup = max(task.steps // 10, round(config.warmup * task.steps))
        phases = Phases(warmup, config.refresh)
        args = jnp.float32(peak * config.rate), jnp.int32(warmup)
        params = jax.tree.map(lambda x: jnp.array(x, config.replica), task.init(seed))
        opt = self.init(params, *args)
        losses, dense = [], 0
        for t, batch in zip(range(task.steps), task.batches(seed), strict=False):
            phase = None
            if self.zero is not None:
                phase = "dense" if phases.is_dense(t) else "compressed"
                dense += phase == "dense"
            opt, params, loss = self.step(phase)(opt, params, batch, *args)
            losses.append(loss)
        if self.zero is None:
            steady = average = self.bits("")
        else:
            assert int(zero_states(opt)[0].applied) == task.steps, "steps were skipped"
            compressed = task.steps - dense
            steady = self.bits("compressed" if compressed else "dense")
            average = (self.bits("dense") * dense + steady * compressed) / task.steps
        return {
            "loss": float(evaluate(params)),
            "bits_steady": round(steady, 3),
            "bits_run": round(average, 3),
            "training_loss": [round(float(x), 5) for x in losses[9 :: max(1, task.steps // 20)]],
            "seconds": round(time.perf_counter() - start, 1),
        }
