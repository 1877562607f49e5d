"""A byte-level GPT (Flax NNX) on the source of Python's standard library.

    python examples/train_gpt.py --compare            # dense AdamW beside ours
    python examples/train_gpt.py --stage 1 --gather-bits 2 --steps 300
    python examples/train_gpt.py --stage 3 --fast 4   # 2 x 4 devices, parameters sharded over 4

Runs on emulated CPU devices by default. Writes report.json, loss.png and sample.txt.
"""

import argparse
import dataclasses
import json
import pathlib
import sysconfig
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import optax
from dense_zero import DenseZero
from flax import nnx
from tqdm import tqdm

import onebit_zero_jax as ob

CONTEXT, WIDTH, HEADS, LAYERS = 64, 96, 4, 3
SEQUENCES_PER_DEVICE = 4
PEAK_RATE, DECAY, B2 = 1.5e-3, 0.1, 0.99
FREEZE, REFRESH = 125, 32


# ---------------------------------------------------------------- model


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm1, self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = jnp.split(self.qkv(self.norm1(x)), 3, axis=-1)
        heads = lambda a: a.reshape(*a.shape[:-1], HEADS, WIDTH // HEADS)
        mixed = jax.nn.dot_product_attention(heads(q), heads(k), heads(v), is_causal=True)
        x = x + self.out(mixed.reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class GPT(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.tokens = nnx.Embed(256, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(CONTEXT, WIDTH, rngs=rngs)
        # Layers are stacked in one set of arrays and scanned: one layer's compile time.
        stack = nnx.vmap(Block, in_axes=0, out_axes=0)
        self.blocks = stack(rngs.split(LAYERS))
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 256, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[-1]))
        run = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        x = run(x, self.blocks)
        return self.head(self.norm(x))


def make_loss(model: GPT) -> Callable[[Any, jax.Array], jax.Array]:
    """The loss by parameters, in layers that stage 3 gathers one at a time."""
    block = nnx.graphdef(Block(nnx.Rngs(0)))
    run = lambda graph: ob.layer(lambda p, *args: nnx.merge(graph, p)(*args))
    embed, place, normalize, logits_of = map(
        run, map(nnx.graphdef, (model.tokens, model.positions, model.norm, model.head))
    )

    def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
        x = embed(params["tokens"], tokens[:, :-1])
        x = x + place(params["positions"], jnp.arange(tokens.shape[-1] - 1))
        x, _ = jax.lax.scan(lambda x, p: (run(block)(p, x), None), x, params["blocks"])
        logits = logits_of(params["head"], normalize(params["norm"], x))
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return loss_fn


# ---------------------------------------------------------------- data


def read_text() -> np.ndarray:
    """The standard library's modules in alphabetical order, as bytes."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in root.glob("*.py") if p.is_file())
    return np.frombuffer(b"\n".join(p.read_bytes() for p in files), np.uint8)


def batches(text: np.ndarray, size: int, seed: int) -> Iterator[np.ndarray]:
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(text) - CONTEXT - 1, size)
        yield np.stack([text[s : s + CONTEXT + 1] for s in starts]).astype(np.int32)


# ---------------------------------------------------------------- runs


@dataclasses.dataclass
class Run:
    """One training run and what it measured."""

    name: str
    stage: int
    losses: list[float]
    bytes_sent: list[int]
    steady: dict[str, int]
    val_loss: float
    persistent: int
    params: Any

    def report(self, size: int) -> dict[str, Any]:
        bits = 8 / size
        return {
            "name": self.name,
            "stage": self.stage,
            "val_loss": round(self.val_loss, 4),
            "wire_bits_per_param": {
                "steady": round(sum(self.steady.values()) * bits, 3),
                "run": round(sum(self.bytes_sent) / len(self.bytes_sent) * bits, 3),
            },
            "bytes_per_step": self.steady,
            "persistent_bytes_per_device": self.persistent,
        }


def bytes_on_first_device(tree: Any) -> int:
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def train(
    name: str,
    stage: int,
    step: Callable[[Any, Any], tuple[Any, jax.Array, dict[str, int]]],
    state: Any,
    params_of: Callable[[Any], Any],
    evaluate: Callable[[Any], float],
    data: Iterator[np.ndarray],
    steps: int,
    check: Callable[[Any], None] = lambda state: None,
) -> Run:
    losses: list[jax.Array] = []
    sent: list[dict[str, int]] = []
    persistent = bytes_on_first_device(state)
    with tqdm(total=steps, desc=name, unit="step", mininterval=1.0) as bar:
        for i in range(steps):
            state, loss, bytes_sent = step(state, next(data))
            losses.append(loss)
            sent.append(bytes_sent)
            bar.update()
            if i % 20 == 19:
                check(state)
                total = sum(sum(s.values()) for s in sent) / 1e6
                bar.set_postfix_str(f"loss {float(losses[-5]):.3f}, sent {total:.1f} MB/device")
    steady = min(sent, key=lambda s: sum(s.values()))
    values = [float(x) for x in jax.device_get(losses)]
    params = jax.device_get(params_of(state))
    totals = [sum(s.values()) for s in sent]
    return Run(name, stage, values, totals, steady, evaluate(params), persistent, params)


def sample(graph: Any, params: Any, prompt: bytes, length: int, seed: int) -> str:
    tokens = np.zeros((1, CONTEXT), np.int32)
    text = list(prompt)
    logits_of = jax.jit(lambda params, tokens: nnx.merge(graph, params)(tokens))
    rng = np.random.default_rng(seed)
    for _ in range(length):
        window = text[-CONTEXT:]
        tokens[0, : len(window)] = window
        logits = np.asarray(logits_of(params, tokens))[0, len(window) - 1].astype(np.float64) / 0.8
        odds = np.exp(logits - logits.max())
        text.append(int(rng.choice(256, p=odds / odds.sum())))
    return bytes(text).decode("utf-8", errors="replace")


# ---------------------------------------------------------------- output


def print_table(rows: list[dict[str, Any]]) -> None:
    legs = list(dict.fromkeys(leg for r in rows for leg in r["bytes_per_step"]))
    head = ["run", "held-out loss", "bits/param steady", "bits/param run", "state B/device"]
    cells = [head + [f"{leg} B/step" for leg in legs]]
    for r in rows:
        bits = r["wire_bits_per_param"]
        cells.append(
            [r["name"], f"{r['val_loss']:.4f}", f"{bits['steady']:.2f}", f"{bits['run']:.2f}"]
            + [f"{r['persistent_bytes_per_device']:,}"]
            + [f"{r['bytes_per_step'].get(leg, 0):,}" for leg in legs]
        )
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    for row in cells:
        print("  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)))


def draw(runs: list[Run], path: pathlib.Path) -> None:
    matplotlib.use("Agg")
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    for run in runs:
        window = min(10, len(run.losses))
        smooth = np.convolve(run.losses, np.ones(window) / window, mode="valid")
        axes[0].plot(np.arange(len(smooth)) + window, smooth, label=run.name)
        axes[1].plot(np.cumsum(run.bytes_sent)[window - 1 :] / 1e6, smooth, label=run.name)
    axes[0].set(xlabel="step", ylabel="training loss, mean of 10 steps")
    axes[1].set(xlabel="MB sent per device", xscale="log")
    axes[1].legend()
    for ax in axes:
        ax.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--stage", type=int, default=2, choices=(0, 1, 2, 3))
    parser.add_argument("--gather", choices=("params", "momentum"))
    parser.add_argument("--gather-bits", type=lambda s: s if s == "dense" else int(s))
    parser.add_argument("--optimizer", choices=("adamw", "adam"), default="adamw")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--devices", type=int, default=8, help="emulated CPU devices; 0: real ones")
    parser.add_argument("--fast", type=int, default=1, help="devices on the fast axis")
    parser.add_argument("--rate", type=float, default=PEAK_RATE, help="peak learning rate")
    parser.add_argument("--refresh", type=int, default=REFRESH, help="steps between refreshes")
    parser.add_argument("--compare", action="store_true", help="train dense AdamW beside it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out"))
    args = parser.parse_args(argv)
    if args.steps < 2:
        parser.error(f"--steps must be at least 2, got {args.steps}")
    if args.devices < 0:
        parser.error(f"--devices must be at least 0, got {args.devices}")
    if args.fast < 1 or args.devices % args.fast:
        parser.error(f"--fast must divide --devices, got {args.fast}")
    try:
        args.zero = ob.ZeroConfig(
            axis_name=("slow", "fast") if args.fast > 1 else "data",
            stage=args.stage,
            gather=args.gather,
            gather_bits=args.gather_bits,
        )
    except ValueError as e:
        parser.error(str(e))
    return args


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    if args.devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.devices)
    zero, devices = args.zero, jax.device_count()
    sizes = (devices // args.fast, args.fast)[: len(zero.axes)]
    mesh = jax.make_mesh(sizes, zero.axes)
    text = read_text()
    cut = len(text) * 9 // 10
    size = SEQUENCES_PER_DEVICE * devices

    model = GPT(nnx.Rngs(args.seed))
    graph, params = nnx.split(model, nnx.Param)
    count = sum(x.size for x in jax.tree.leaves(params))
    print(f"{count:,} parameters, {len(text):,} bytes of text, {devices} devices")
    loss_fn = make_loss(model)
    held_out = [b for b, _ in zip(batches(text[cut:], 128, 1), range(8), strict=False)]
    loss_of = jax.jit(loss_fn)

    def evaluate(params: Any) -> float:
        return float(np.mean([loss_of(params, b) for b in held_out]))

    warmup = min(FREEZE, max(1, args.steps // 4))
    rate = optax.warmup_cosine_decay_schedule(
        0.0, args.rate, max(1, warmup // 2), args.steps, args.rate / 20
    )
    decay = DECAY if args.optimizer == "adamw" else 0.0
    tx = ob.onebit_adamw(
        rate, b2=B2, weight_decay=decay, zero=zero, warmup_steps=warmup, refresh=args.refresh
    )
    onebit = ob.train_step(loss_fn, tx, mesh, zero)

    def onebit_step(state: Any, batch: Any) -> Any:
        state, metrics = onebit(state, batch)
        return state, metrics["loss"], metrics["bytes_sent"]

    data = lambda: batches(text[:cut], size, args.seed + 2)
    name = f"1-bit ZeRO-{args.stage}, {zero.gather_mode} {zero.bits}"
    state = ob.init(params, tx, mesh, zero)
    limit = ob.SkipLimit(40)  # raises, naming the leaf, if 40 steps in a row are not finite
    runs = [
        train(
            name,
            args.stage,
            onebit_step,
            state,
            ob.full_params,
            evaluate,
            data(),
            args.steps,
            limit,
        )
    ]
    if args.compare:
        flat = jax.make_mesh((devices,), ("data",))
        dense = DenseZero(loss_fn, optax.adamw(rate, b2=B2, weight_decay=decay), flat, params)

        def dense_step(state: Any, batch: Any) -> Any:
            state, loss = dense.step(state, ob.shard_batch(batch, flat, ob.ZeroConfig()))
            return state, loss, dense.bytes_sent

        state = dense.init(params)
        runs.append(
            train(
                "dense AdamW, ZeRO-1",
                1,
                dense_step,
                state,
                dense.params,
                evaluate,
                data(),
                args.steps,
            )
        )

    report: dict[str, Any] = {"runs": [r.report(count) for r in runs]}
    report.update(parameters=count, devices=devices, steps=args.steps, seed=args.seed)
    if args.compare:
        ours, theirs = (r.val_loss for r in runs)
        report["loss_over_dense"] = round(ours / theirs, 5)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    draw(runs, args.out / "loss.png")
    words = sample(graph, runs[0].params, b"def ", 300, args.seed)
    (args.out / "sample.txt").write_text(words + "\n")
    print(f"\n{words}\n")
    print_table(report["runs"])
    if args.compare:
        print(f"\nheld-out loss over dense: {report['loss_over_dense']:.4f}")
    print(f"report.json, loss.png and sample.txt are in {args.out}/")
    return report


if __name__ == "__main__":
    main()
