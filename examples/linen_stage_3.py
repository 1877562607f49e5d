"""Flax Linen at stage 3: parameters sharded over the fast axis, gathered layer by layer.

python examples/linen_stage_3.py --steps 200
"""

import argparse
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import onebit_zero_jax as ob

WIDTH, LAYERS = 64, 4


class Block(nn.Module):
    """A residual block of a multi-layer perceptron."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = nn.relu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x)))
        return x + nn.Dense(WIDTH)(h)


first, block, last = nn.Dense(WIDTH), Block(), nn.Dense(10)


def init(key: jax.Array, images: jax.Array) -> Any:
    """Parameters of all layers; the blocks' are stacked, for a scan."""
    keys = jax.random.split(key, LAYERS + 2)
    hidden = jnp.zeros((1, WIDTH))
    return {
        "first": first.init(keys[0], images),
        "blocks": jax.vmap(lambda key: block.init(key, hidden))(keys[2:]),
        "last": last.init(keys[1], hidden),
    }


def logits_of(params: Any, images: jax.Array) -> jax.Array:
    """Each ``ob.layer`` gathers its own shards, runs, and drops them."""
    x = ob.layer(first.apply)(params["first"], images)
    x, _ = jax.lax.scan(lambda x, p: (ob.layer(block.apply)(p, x), None), x, params["blocks"])
    return ob.layer(last.apply)(params["last"], x)


def loss_fn(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    """Mean loss and accuracy of a device's own examples."""
    logits = logits_of(params, batch["images"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()
    return loss, jnp.mean(jnp.argmax(logits, -1) == batch["labels"], dtype=jnp.float32)


def main(argv: list[str] | None = None) -> float:
    """Trains and returns the accuracy on held-out digits."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--devices", type=int, default=8, help="emulated CPU devices; 0: real ones")
    parser.add_argument("--fast", type=int, default=2, help="devices on the fast axis")
    args = parser.parse_args(argv)
    if args.devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.devices)
    mesh = jax.make_mesh((jax.device_count() // args.fast, args.fast), ("slow", "fast"))

    digits = load_digits()
    images = (digits.images / 16).astype(np.float32).reshape(-1, 64)
    order = np.random.default_rng(0).permutation(len(images))
    data = {"images": images[order], "labels": digits.target[order].astype(np.int32)}
    held_out = {k: x[1440:1792] for k, x in data.items()}

    zero = ob.ZeroConfig(axis_name=("slow", "fast"), stage=3)
    rate = optax.cosine_decay_schedule(2e-3, args.steps)
    tx = ob.onebit_adamw(rate, zero=zero, warmup_steps=max(1, args.steps // 5))
    state = ob.init(init(jax.random.key(0), images[:1]), tx, mesh, zero)
    step = ob.train_step(loss_fn, tx, mesh, zero, has_aux=True)
    rng = np.random.default_rng(1)
    for i in range(args.steps):
        rows = rng.choice(1440, 16 * mesh.size, replace=False)
        state, metrics = step(state, {k: x[rows] for k, x in data.items()})
        if i % 50 == 49:
            print(f"step {i + 1}: loss {float(metrics['loss']):.4f}, {metrics['bytes_sent']}")
    accuracy = float(ob.eval_step(loss_fn, mesh, zero, has_aux=True)(state, held_out)["aux"])
    print(f"test accuracy {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    main()
