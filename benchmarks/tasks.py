"""Training tasks that need no download, small enough to repeat over many seeds on a CPU.

A task's numbers (steps, rate, decay) are tuned for dense AdamW and for nothing else:
``python benchmarks/convergence.py sweep TASK`` shows the sweep behind ``rate``.
"""

import dataclasses
import functools
import pathlib
import sysconfig
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Tree = Any


@dataclasses.dataclass(frozen=True)
class Task:
    """What is trained, and how dense AdamW trains it best.

    Attributes:
      init: seed -> parameters.
      loss: (parameters, batch) -> scalar; axis 0 of the batch holds examples.
      batches: seed -> endless batches of ``examples`` examples.
      evaluate: parameters -> held-out loss (for the quadratic: excess over the optimum).
      examples: examples of a step, over all workers.
      rate: peak learning rate; linear warm-up over a tenth of the steps, cosine to 1/20.
    """

    name: str
    init: Callable[[int], Tree]
    loss: Callable[[Tree, Any], jax.Array]
    batches: Callable[[int], Iterator[Any]]
    evaluate: Callable[[Tree], jax.Array]
    examples: int
    steps: int
    rate: float
    decay: float
    b2: float = 0.99

    def schedule(self, peak: Any) -> Callable[[Any], Any]:
        shape = optax.warmup_cosine_decay_schedule(0.0, 1.0, self.steps // 10, self.steps, 0.05)
        return lambda count: peak * shape(count)


# ---------------------------------------------------------------- transformer


def _normal(rng: np.random.Generator, *shape: int, scale: float) -> np.ndarray:
    return (rng.standard_normal(shape) * scale).astype(np.float32)


def _blocks(rng: np.random.Generator, layers: int, width: int) -> Tree:
    """Pre-norm blocks, stacked; matrices have two axes beside the layers."""
    into, out = width**-0.5, width**-0.5 / (2 * layers) ** 0.5
    return {
        "norm1": np.ones((layers, width), np.float32),
        "norm2": np.ones((layers, width), np.float32),
        "qkv": _normal(rng, layers, width, 3 * width, scale=into),
        "out": _normal(rng, layers, width, width, scale=out),
        "up": _normal(rng, layers, width, 4 * width, scale=into),
        "down": _normal(rng, layers, 4 * width, width, scale=out / 2),
    }


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6) * scale


def _run_blocks(blocks: Tree, x: jax.Array, heads: int, causal: bool) -> jax.Array:
    def block(x: jax.Array, p: Tree) -> tuple[jax.Array, None]:
        length, width = x.shape[-2:]
        split = lambda a: a.reshape(*a.shape[:-1], heads, width // heads)
        q, k, v = (split(a) for a in jnp.split(_norm(x, p["norm1"]) @ p["qkv"], 3, -1))
        scores = jnp.einsum("...qhd,...khd->...hqk", q, k) * (width // heads) ** -0.5
        if causal:
            scores = jnp.where(np.tril(np.ones((length, length), bool)), scores, -1e9)
        mixed = jnp.einsum("...hqk,...khd->...qhd", jax.nn.softmax(scores), v)
        x = x + mixed.reshape(x.shape) @ p["out"]
        return x + jax.nn.gelu(_norm(x, p["norm2"]) @ p["up"]) @ p["down"], None

    return jax.lax.scan(block, x, blocks)[0]


# ---------------------------------------------------------------- GPT


@functools.cache
def _text() -> tuple[np.ndarray, np.ndarray]:
    """The standard library's modules in alphabetical order: training bytes, held-out bytes."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in root.glob("*.py") if p.is_file())
    text = np.frombuffer(b"\n".join(p.read_bytes() for p in files), np.uint8)
    cut = len(text) * 9 // 10
    return text[:cut], text[cut:]


def gpt(
    name: str, width: int, layers: int, context: int, steps: int, rate: float, examples: int = 8
) -> Task:
    """A byte-level GPT on the standard library's source."""
    heads = width // 24

    def init(seed: int) -> Tree:
        rng = np.random.default_rng([seed, 1])
        return {
            "tokens": _normal(rng, 256, width, scale=0.5),
            "positions": _normal(rng, context, width, scale=0.1),
            "blocks": _blocks(rng, layers, width),
            "norm": np.ones(width, np.float32),
            "head": _normal(rng, width, 256, scale=width**-0.5 / 2),
        }

    def loss(params: Tree, tokens: jax.Array) -> jax.Array:
        x = params["tokens"][tokens[..., :-1]] + params["positions"]
        x = _norm(_run_blocks(params["blocks"], x, heads, causal=True), params["norm"])
        logits = (x @ params["head"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[..., 1:]).mean()

    def windows(text: np.ndarray, rng: np.random.Generator, count: int) -> np.ndarray:
        starts = rng.integers(0, len(text) - context - 1, count)
        return np.stack([text[s : s + context + 1] for s in starts]).astype(np.int32)

    def batches(seed: int) -> Iterator[np.ndarray]:
        rng = np.random.default_rng([seed, 2])
        while True:
            yield windows(_text()[0], rng, examples)

    def evaluate(params: Tree) -> jax.Array:
        held_out = windows(_text()[1], np.random.default_rng(0), 1024).reshape(32, 32, -1)
        return jnp.mean(jax.lax.map(lambda b: loss(params, b), held_out))

    return Task(name, init, loss, batches, evaluate, examples, steps, rate, decay=0.1)


# ---------------------------------------------------------------- digits


@functools.cache
def _digits() -> tuple[np.ndarray, np.ndarray]:
    """Images of 16 patches of 4 values in [0, 1], in a fixed random order, and labels."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    patches = (images / 16).reshape(-1, 4, 2, 4, 2).transpose(0, 1, 3, 2, 4).reshape(-1, 16, 4)
    return patches[order].astype(np.float32), labels[order].astype(np.int32)


def digits(name: str, width: int, layers: int, steps: int, rate: float) -> Task:
    """A small ViT on noisy 8 x 8 digits; the noise keeps the loss away from 0."""
    examples, train, noise, heads = 64, 1400, 0.4, 4

    def init(seed: int) -> Tree:
        rng = np.random.default_rng([seed, 1])
        return {
            "patches": _normal(rng, 4, width, scale=0.5),
            "positions": _normal(rng, 16, width, scale=0.1),
            "blocks": _blocks(rng, layers, width),
            "norm": np.ones(width, np.float32),
            "head": _normal(rng, width, 10, scale=width**-0.5 / 2),
        }

    def loss(params: Tree, batch: tuple[Any, Any]) -> jax.Array:
        x = batch[0] @ params["patches"] + params["positions"]
        x = _run_blocks(params["blocks"], x, heads, causal=False)
        logits = _norm(jnp.mean(x, -2), params["norm"]) @ params["head"]
        return optax.softmax_cross_entropy_with_integer_labels(
            logits.astype(jnp.float32), batch[1]
        ).mean()

    def noisy(rng: np.random.Generator, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        images, labels = _digits()
        return images[index] + _normal(rng, len(index), 16, 4, scale=noise), labels[index]

    def batches(seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        rng = np.random.default_rng([seed, 2])
        while True:
            yield noisy(rng, rng.integers(0, train, examples))

    def evaluate(params: Tree) -> jax.Array:
        held_out = np.tile(np.arange(train, len(_digits()[1])), 8)
        return loss(params, noisy(np.random.default_rng(0), held_out))

    return Task(name, init, loss, batches, evaluate, examples, steps, rate, decay=0.1)


# ---------------------------------------------------------------- quadratic


def quadratic(name: str, steps: int, rate: float) -> Task:
    r"""0.5 sum h (x - x*)^2 with h over four decades and gradient noise of its own scale.

    An example's gradient is ``h (x - x*) + sqrt(h) s n``, n normal, s log-normal; h and s
    differ by row, by column and by coordinate. Adam sees no scale of h, its noise does.
    """
    shape, examples = (2, 48, 64), 64
    rng = np.random.default_rng(0)
    spread = lambda scale: (
        (rng.normal(size=(2, 48, 1)) + rng.normal(size=(2, 1, 64)) + rng.normal(size=shape))
        * (scale / 3**0.5)
    )
    h = np.exp(spread(2.0)).astype(np.float32)
    h /= h.max()
    noise = np.sqrt(h) * np.exp(spread(0.7)).astype(np.float32)

    def init(seed: int) -> Tree:
        return {"x": _normal(np.random.default_rng([seed, 1]), *shape, scale=1.0)}

    def excess(params: Tree) -> jax.Array:
        return 0.5 * jnp.sum(h * jnp.square(params["x"].astype(jnp.float32)))

    def loss(params: Tree, keys: jax.Array) -> jax.Array:
        # Linear in x, so that its gradient is the mean of the examples' noise.
        draw = lambda key: jax.random.normal(jax.random.key(key), shape)
        n = jnp.mean(jax.vmap(draw)(keys), 0)
        return excess(params) + jnp.sum(params["x"].astype(jnp.float32) * noise * n)

    def batches(seed: int) -> Iterator[np.ndarray]:
        rng = np.random.default_rng([seed, 2])
        while True:
            yield rng.integers(0, 2**31, examples).astype(np.uint32)

    return Task(name, init, loss, batches, excess, examples, steps, rate, decay=0.0)


TASKS = {
    "gpt-tiny": lambda: gpt("gpt-tiny", width=48, layers=2, context=64, steps=300, rate=1.6e-2),
    "gpt-small": lambda: gpt("gpt-small", width=96, layers=3, context=64, steps=300, rate=8e-3),
    "gpt-3m": lambda: gpt("gpt-3m", width=240, layers=4, context=128, steps=400, rate=2e-3),
    "digits": lambda: digits("digits", width=48, layers=2, steps=300, rate=5e-3),
    "quadratic": lambda: quadratic("quadratic", steps=300, rate=5e-2),
}
