"""Flax Linen with its own ``TrainState`` and a hand-written ``shard_map`` loop.

The transformation is used alone: local gradients in, the same updates on every device out.

    python examples/linen_digits.py --steps 200
"""

import argparse
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from sklearn.datasets import load_digits

import onebit_zero_jax as ob

P = jax.P


class ConvNet(nn.Module):
    """8 x 8 images to 10 logits."""

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.relu(nn.Conv(32, (3, 3))(images[..., None]))
        x = nn.max_pool(nn.relu(nn.Conv(64, (3, 3))(x)), (2, 2), (2, 2))
        return nn.Dense(10)(nn.relu(nn.Dense(128)(x.reshape(x.shape[0], -1))))


def main(argv: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--devices", type=int, default=8, help="emulated CPU devices; 0: real ones")
    args = parser.parse_args(argv)
    if args.devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.devices)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), (jax.sharding.AxisType.Auto,))

    digits = load_digits()
    images, labels = (digits.images / 16).astype(np.float32), digits.target.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(images))
    train, test = order[:1440], order[1440:]

    model = ConvNet()
    params = model.init(jax.random.key(0), images[:1])["params"]
    zero = ob.ZeroConfig(axis_name="data", stage=2)
    tx = ob.onebit_adamw(
        optax.cosine_decay_schedule(2e-3, args.steps),
        zero=zero,
        warmup_steps=max(1, args.steps // 5),
    )

    # How each array of the state lies on the mesh, before any is allocated.
    specs: Any = jax.tree.map(lambda s: s.spec, ob.state_shardings(params, tx, mesh, zero))
    state_specs = TrainState(
        step=specs.step,
        apply_fn=model.apply,
        params=specs.params,
        tx=tx,
        opt_state=specs.opt_state,
    )

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=P(), out_specs=state_specs, check_vma=False)
    def create(params):
        state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
        return state.replace(step=jnp.zeros((), jnp.int32))

    @jax.jit
    @jax.shard_map(
        mesh=mesh,
        in_specs=(state_specs, P("data"), P("data")),
        out_specs=(state_specs, P()),
        check_vma=False,
    )
    def train_step(state, images, labels):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, images)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)  # of this device's examples alone
        return state.apply_gradients(grads=grads), jax.lax.pmean(loss, "data")

    state = create(params)
    rng = np.random.default_rng(1)
    for i in range(args.steps):
        batch = rng.choice(train, 16 * mesh.shape["data"], replace=False)
        state, loss = train_step(state, images[batch], labels[batch])
        if i % 50 == 49:
            print(f"step {i + 1}: loss {float(loss):.4f}")
    logits = model.apply({"params": jax.device_get(state.params)}, images[test])
    accuracy = float(np.mean(np.argmax(np.asarray(logits), -1) == labels[test]))
    print(f"test accuracy {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    main()
