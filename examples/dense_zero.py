"""Dense ZeRO-1 in bare JAX, the baseline: ``psum_scatter``, owner's update, ``all_gather``."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding

P = jax.P


class DenseZero:
    """``state = init(params)``; ``state, loss = step(state, batch)``, jitted and donating.

    ``state`` is ``(flat parameters, optimizer state of this device's 1/N of them, master)``.
    ``tx`` is any elementwise optax chain. Axes of ``mesh`` go from slow to fast: gradients
    are reduced over the fast one first. ``half`` sends bfloat16 in both legs, as its bits
    (a CPU would widen it): an ``all_to_all`` and a float32 sum stand in for the reduction,
    and owners keep a float32 master of their part.
    """

    def __init__(
        self,
        loss_fn: Callable[[Any, Any], jax.Array],
        tx: optax.GradientTransformation,
        mesh: Mesh,
        params: Any,
        half: bool = False,
    ) -> None:
        flat, unravel = ravel_pytree(params)
        axes, parts = mesh.axis_names, mesh.size
        self.size = flat.size
        self.params = lambda state: unravel(state[0][: self.size])
        padded = math.ceil(flat.size / parts) * parts
        # One device's reduce-scatter and all-gather, ring algorithm.
        leg = (parts - 1) * padded // parts * (2 if half else 4)
        self.bytes_sent = {"reduce": leg, "gather": leg}
        owner = P(axes[::-1])
        shapes = jax.eval_shape(tx.init, jax.ShapeDtypeStruct((padded // parts,), jnp.float32))
        sharded = jax.tree.map(lambda x: owner if x.ndim else P(), shapes)
        specs = (P(), sharded, owner if half else None)

        def own(flat: jax.Array) -> jax.Array:
            return flat.reshape(parts, -1)[jax.lax.axis_index(axes[::-1])]

        def bits(x: jax.Array) -> jax.Array:
            return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)

        def values(x: jax.Array) -> jax.Array:
            return jax.lax.bitcast_convert_type(x, jnp.bfloat16).astype(jnp.float32)

        def scatter(x: jax.Array, axis: str) -> jax.Array:
            if not half:
                return jax.lax.psum_scatter(x, axis, tiled=True)
            x = bits(x).reshape(jax.lax.axis_size(axis), -1)
            return values(jax.lax.all_to_all(x, axis, 0, 0)).sum(0)

        def gather(x: jax.Array) -> jax.Array:
            x = bits(x) if half else x
            for axis in axes:
                x = jax.lax.all_gather(x, axis, tiled=True)
            return values(x) if half else x

        def body(state: Any, batch: Any) -> Any:
            flat, opt_state, master = state
            loss, mean = jax.value_and_grad(lambda f: loss_fn(unravel(f[: self.size]), batch))(flat)
            for axis in axes[::-1]:
                mean = scatter(mean, axis)
            chunk = master if half else own(flat)
            updates, opt_state = tx.update(mean / parts, opt_state, chunk)
            chunk = optax.apply_updates(chunk, updates)
            master = chunk if half else None
            return (gather(chunk), opt_state, master), jax.lax.pmean(loss, axes)

        mapped = jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(specs, P(axes)),
            out_specs=(specs, P()),
            check_vma=False,
        )
        self.step = jax.jit(mapped, donate_argnums=0)

        def init(params: Any) -> Any:
            flat = np.pad(np.asarray(ravel_pytree(params)[0]), (0, padded - self.size))
            flat = jax.device_put(flat, NamedSharding(mesh, P()))
            start = jax.shard_map(
                lambda flat: (flat, tx.init(own(flat)), own(flat) if half else None),
                mesh=mesh,
                in_specs=P(),
                out_specs=specs,
                check_vma=False,
            )
            return jax.jit(start)(flat)

        self.init = init
