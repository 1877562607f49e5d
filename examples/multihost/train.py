"""One script for one machine or many: started by hand, mpirun, Slurm or Kubernetes.

Classifies handwritten digits. Every process reads its own shard of the data; the state is
saved as it goes, and a restart goes on where the last complete checkpoint left off.
README.md beside this file shows how to start it.
"""

import argparse
import itertools
import json
import os
import pathlib
import sys
import time
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from sklearn.datasets import load_digits

import onebit_zero_jax as ob
from onebit_zero_jax.sync import digest

SIZES = (64, 256, 10)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--coordinator", help="host:port of process 0; default: ask the cluster")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process-id", type=int)
    parser.add_argument("--alone", action="store_true", help="one process, no cluster")
    parser.add_argument("--local-devices", type=int, default=0, help="emulated CPU devices each")
    parser.add_argument("--peer-timeout", type=int, default=30, help="seconds until a peer is lost")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=64, help="examples a step, all devices")
    parser.add_argument("--checkpoints", type=pathlib.Path, help="directory that all hosts share")
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--check-every", type=int, default=100, help="steps between replica checks")
    parser.add_argument("--resize", action="store_true", help="the number of devices changed")
    parser.add_argument("--out", type=pathlib.Path, help="report, written by process 0")
    return parser.parse_args(argv)


def connect(args: argparse.Namespace) -> None:
    if args.local_devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.local_devices)
        if not args.alone:
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if not args.alone:
        jax.distributed.initialize(
            args.coordinator,
            args.processes,
            args.process_id,
            heartbeat_timeout_seconds=args.peer_timeout,
        )


def make_mesh() -> tuple[Mesh, ob.ZeroConfig]:
    """Hosts are the slow axis, the devices of a host the fast one."""
    devices = np.asarray(jax.devices()).reshape(jax.process_count(), -1)
    mesh = Mesh(devices, ("hosts", "local"))
    axis: Any = ("hosts", "local") if devices.shape[1] > 1 else "hosts"
    return mesh, ob.ZeroConfig(axis_name=axis, stage=2)


def loss_fn(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
    hidden = jax.nn.relu(batch["images"] @ params["w0"] + params["b0"])
    logits = hidden @ params["w1"] + params["b1"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


def init_params() -> dict[str, jax.Array]:
    rng, params = np.random.default_rng(0), {}
    for i, (rows, cols) in enumerate(itertools.pairwise(SIZES)):
        params[f"w{i}"] = jnp.asarray(
            rng.normal(size=(rows, cols)) * (2 / rows) ** 0.5, jnp.float32
        )
        params[f"b{i}"] = jnp.zeros(cols)
    return params


class Shard:
    """This process's part of the data: example k belongs to process k mod processes."""

    def __init__(self, batch: int):
        digits, own = load_digits(), slice(jax.process_index(), None, jax.process_count())
        self.images = (digits.data / 16).astype(np.float32)[own]
        self.labels = digits.target.astype(np.int32)[own]
        self.size = batch // jax.process_count()

    def batch(self, step: int) -> dict[str, np.ndarray]:
        """A function of the step alone: a restart reads what would have been read."""
        rng = np.random.default_rng((step, jax.process_index()))
        chosen = rng.choice(len(self.images), self.size, replace=False)
        return {"images": self.images[chosen], "labels": self.labels[chosen]}


def train(args: argparse.Namespace) -> None:
    mesh, zero = make_mesh()
    first = jax.process_index() == 0
    schedule = optax.cosine_decay_schedule(3e-3, args.steps)
    tx = ob.onebit_adamw(schedule, zero=zero, warmup_steps=max(1, args.steps // 5), refresh=16)
    step, shard = ob.train_step(loss_fn, tx, mesh, zero), Shard(args.batch)
    params = init_params()

    manager, state, start = None, None, 0
    if args.checkpoints:
        manager = ob.CheckpointManager(args.checkpoints, keep=2)
        if manager.latest_step() is not None:
            shapes = jax.eval_shape(lambda: params)
            state, start = manager.restore(shapes, tx, mesh, zero, resize=args.resize)
            if first:
                print(f"restored step {start}", flush=True)
    if state is None:
        state = ob.init(params, tx, mesh, zero)

    for i in range(start, args.steps):
        state, metrics = step(state, shard.batch(i))
        if first and (i + 1) % 10 == 0:
            print(
                f"step {i + 1}: loss {float(metrics['loss']):.4f}, {metrics['phase']}", flush=True
            )
        if (i + 1) % args.check_every == 0:
            ob.assert_in_sync(state)
        if manager and ((i + 1) % args.save_every == 0 or i + 1 == args.steps):
            manager.save(state, data_position=i + 1)
    if manager:
        manager.close()
    ob.assert_in_sync(state)
    if first and args.out:
        sums = {k: int(digest(x)) for k, x in ob.full_params(state).items()}
        args.out.write_text(json.dumps({"loss": float(metrics["loss"]), "digests": sums}))


def main() -> None:
    args = parse()
    began = time.monotonic()
    try:
        connect(args)
        train(args)
    except Exception:
        # A lost peer shows here as a failed collective. Leave at once: the usual way out waits
        # for peers that may be gone.
        traceback.print_exc()
        seconds = time.monotonic() - began
        print(f"stopped after {seconds:.0f} s; start all processes again to go on", flush=True)
        sys.stderr.flush()
        os._exit(1)
    if jax.process_index() == 0:
        print("done", flush=True)


if __name__ == "__main__":
    main()
