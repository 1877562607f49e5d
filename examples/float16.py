"""float16 with dynamic loss scaling, which the non-finite guard of the train step drives.

    python examples/float16.py --steps 200 --scale 1e9

float16 ends at 65504 and 6e-8: the loss is scaled up so that gradients do not vanish. Too
large a scale overflows, all devices skip the step, and the scale is halved.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from bare_jax import init_params, predict
from sklearn.datasets import load_digits

import onebit_zero_jax as ob


class LossScale(NamedTuple):
    """The scale, on every device; steps since it last changed; steps skipped so far."""

    scale: jax.Array
    good: jax.Array
    skipped: jax.Array

    @classmethod
    def of(cls, scale: float, mesh: Any) -> "LossScale":
        count = jax.device_put(jnp.int32(0), jax.NamedSharding(mesh, jax.P()))
        everywhere = jax.NamedSharding(mesh, jax.P(mesh.axis_names))
        scales = np.full(mesh.size, scale, np.float32)
        return cls(jax.device_put(scales, everywhere), count, count)


@functools.partial(jax.jit, static_argnames="period")
def adjust(s: LossScale, skipped_steps: jax.Array, period: int = 50) -> LossScale:
    """Half of it (at least 1) after a skipped step, twice after ``period`` good ones.

    ``metrics["skipped_steps"]`` is equal on all devices, and stays on them: no step waits.
    """
    ok = skipped_steps == s.skipped
    grow = ok & (s.good + 1 >= period)
    kept = jnp.where(grow, jnp.minimum(2 * s.scale, 2.0**100), s.scale)
    scale = jnp.where(ok, kept, jnp.maximum(s.scale / 2, 1))
    good = jnp.where(ok & ~grow, s.good + 1, 0)
    return LossScale(scale, good, skipped_steps)


@jax.custom_vjp
def times_in_backward(x: jax.Array, factor: jax.Array) -> jax.Array:
    """``x``; its gradient is multiplied by ``factor``."""
    return x


times_in_backward.defvjp(
    lambda x, factor: (x, factor), lambda factor, g: (g * factor, jnp.zeros_like(factor))
)


def in_float16(loss_fn: Callable[[Any, Any], jax.Array]) -> Callable[[Any, Any], jax.Array]:
    """The loss of float16 parameters; gradients of float32 ones, scaled on the way only."""

    def scaled(params: Any, batch: Any) -> jax.Array:
        scale = batch["scale"][0]
        half = lambda p: times_in_backward(p, 1 / scale).astype(jnp.float16)
        return times_in_backward(loss_fn(jax.tree.map(half, params), batch), scale)

    return scaled


def cross_entropy(params: Any, batch: Any) -> jax.Array:
    logits = predict(params, batch["images"].astype(jnp.float16)).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


def main(argv: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--scale", type=float, default=2.0**15, help="of the first step")
    parser.add_argument("--devices", type=int, default=8, help="emulated CPU devices; 0: real ones")
    args = parser.parse_args(argv)
    if args.devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.devices)
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    digits = load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(images))
    train, test = order[:1440], order[1440:]

    zero = ob.ZeroConfig(axis_name="data", stage=2)
    tx = ob.onebit_adamw(3e-3, zero=zero, warmup_steps=max(1, args.steps // 5))
    state = ob.init(init_params(jax.random.key(0)), tx, mesh, zero)
    step = ob.train_step(in_float16(cross_entropy), tx, mesh, zero)
    scale, limit = LossScale.of(args.scale, mesh), ob.SkipLimit(40)
    rng = np.random.default_rng(1)
    for i in range(args.steps):
        chosen = rng.choice(train, 16 * mesh.size, replace=False)
        batch = {"images": images[chosen], "labels": labels[chosen], "scale": scale.scale}
        state, metrics = step(state, batch)
        scale = adjust(scale, metrics["skipped_steps"])
        if i % 20 == 19:
            limit(state)  # Raises if no scale helps: every step of the last 40 was skipped.
            print(
                f"step {i + 1}: loss {float(metrics['loss']):.4f}, "
                f"scale {np.asarray(scale.scale)[0]:g}, {int(scale.skipped)} steps skipped"
            )
    logits = predict(jax.device_get(ob.full_params(state)), images[test])
    accuracy = float(np.mean(np.argmax(logits, -1) == labels[test]))
    print(f"test accuracy {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    main()
