"""Dense ZeRO-1 in bare JAX, the baseline: ``psum_scatter``, owner's update, ``all_gather``."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding

P = jax.P


class DenseZero:
    """``state = init(params)``; ``state, loss = step(state, batch)``, jitted and donating.

    ``state`` is ``(flat parameters, optimizer state of this device's 1/N of them)``.
    ``tx`` is any elementwise optax chain, ``mesh`` has the one axis "data".
    """

    def __init__(
        self,
        loss_fn: Callable[[Any, Any], jax.Array],
        tx: optax.GradientTransformation,
        mesh: Mesh,
        params: Any,
    ) -> None:
        flat, unravel = ravel_pytree(params)
        self.size, parts = flat.size, mesh.shape["data"]
        self.params = lambda state: unravel(state[0][: self.size])
        padded = math.ceil(flat.size / parts) * parts
        # One device's reduce-scatter and all-gather, float32, ring algorithm.
        leg = (parts - 1) * padded // parts * 4
        self.bytes_sent = {"reduce": leg, "gather": leg}
        shapes = jax.eval_shape(tx.init, jax.ShapeDtypeStruct((padded // parts,), jnp.float32))
        specs = jax.tree.map(lambda x: P("data") if x.ndim else P(), shapes)

        def own(flat: jax.Array) -> jax.Array:
            return flat.reshape(parts, -1)[jax.lax.axis_index("data")]

        def body(state: Any, batch: Any) -> Any:
            flat, opt_state = state
            loss, grads = jax.value_and_grad(lambda f: loss_fn(unravel(f[: self.size]), batch))(
                flat
            )
            mean = jax.lax.psum_scatter(grads, "data", tiled=True) / parts
            updates, opt_state = tx.update(mean, opt_state, own(flat))
            chunk = optax.apply_updates(own(flat), updates)
            flat = jax.lax.all_gather(chunk, "data", tiled=True)
            return (flat, opt_state), jax.lax.pmean(loss, "data")

        mapped = jax.shard_map(
            body,
            mesh=mesh,
            in_specs=((P(), specs), P("data")),
            out_specs=((P(), specs), P()),
            check_vma=False,
        )
        self.step = jax.jit(mapped, donate_argnums=0)

        def init(params: Any) -> Any:
            flat = jnp.pad(ravel_pytree(params)[0], (0, padded - self.size))
            flat = jax.device_put(flat, NamedSharding(mesh, P()))
            start = jax.shard_map(
                lambda flat: (flat, tx.init(own(flat))),
                mesh=mesh,
                in_specs=P(),
                out_specs=(P(), specs),
                check_vma=False,
            )
            return jax.jit(start)(flat)

        self.init = init
