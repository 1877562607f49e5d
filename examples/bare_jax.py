"""Bare JAX: parameters in a dict, one loss function, ``init`` and ``train_step``.

python examples/bare_jax.py --steps 200 --stage 1
"""

import argparse
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import onebit_zero_jax as ob

SIZES = (64, 256, 128, 10)


def init_params(key: jax.Array) -> dict[str, dict[str, jax.Array]]:
    params = {}
    for i, (rows, cols) in enumerate(itertools.pairwise(SIZES)):
        kernel = jax.random.normal(jax.random.fold_in(key, i), (rows, cols)) * (2 / rows) ** 0.5
        params[f"layer{i}"] = {"kernel": kernel, "bias": jnp.zeros(cols)}
    return params


def predict(params: dict[str, Any], images: jax.Array, key: jax.Array | None = None) -> jax.Array:
    x = images
    for i in range(len(SIZES) - 1):
        layer = params[f"layer{i}"]
        x = x @ layer["kernel"] + layer["bias"]
        if i < len(SIZES) - 2:
            x = jax.nn.relu(x)
            if key is not None:  # dropout; train_step gives each device and step its own key
                kept = jax.random.bernoulli(jax.random.fold_in(key, i), 0.9, x.shape)
                x = jnp.where(kept, x / 0.9, 0.0)
    return x


def main(argv: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--stage", type=int, default=2, choices=(0, 1, 2))
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

    def loss_fn(params: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        logits = predict(params, batch["images"], key)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()
        return loss, {"accuracy": jnp.mean(jnp.argmax(logits, -1) == batch["labels"])}

    zero = ob.ZeroConfig(axis_name="data", stage=args.stage)
    tx = optax.chain(
        ob.clip_by_global_norm(1.0, zero=zero),
        ob.onebit_adamw(
            optax.cosine_decay_schedule(3e-3, args.steps),
            zero=zero,
            warmup_steps=max(1, args.steps // 5),
        ),
    )
    state = ob.init(init_params(jax.random.key(0)), tx, mesh, zero)
    step = ob.train_step(loss_fn, tx, mesh, zero, has_aux=True, with_rng=True)

    rng, key = np.random.default_rng(1), jax.random.key(1)
    for i in range(args.steps):
        chosen = rng.choice(train, 16 * mesh.shape["data"], replace=False)
        batch = {"images": images[chosen], "labels": labels[chosen]}
        state, metrics = step(state, batch, key)
        if i % 50 == 49:
            sent = sum(metrics["bytes_sent"].values())
            print(
                f"step {i + 1}: loss {float(metrics['loss']):.4f}, "
                f"accuracy {float(metrics['aux']['accuracy']):.3f}, "
                f"{metrics['phase']}, {sent:,} bytes sent per device"
            )
    logits = predict(jax.device_get(ob.full_params(state)), images[test])
    accuracy = float(np.mean(np.argmax(logits, -1) == labels[test]))
    print(f"test accuracy {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    main()
