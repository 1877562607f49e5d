"""The whole algorithm once more, in NumPy float64 and for all P workers at once.

Written from the design alone: it imports neither JAX nor the package. Blocks are rows
of an array ``(blocks, 8 * lanes)``; block b of P * k belongs to worker b // k.

``step`` also returns, for every number it computes, a *size*: the sum of the magnitudes
that were added up to make it. Float32 may be wrong by a few 2^-24 of that, no more.

Rounding to a code is discontinuous. Where a value is closer to the threshold between two
codes than float32 can tell (a *tie*), ``step`` takes the one that the package took, as seen
from what it decoded, and counts the tie.
"""

import dataclasses
import math
from collections.abc import Callable

import numpy as np

EPS = 2.0**-24
# Float32 cannot tell a value from a threshold within this share of its size.
TIE = 2 * EPS


@dataclasses.dataclass(frozen=True)
class Settings:
    parts: int
    stage: int
    gather: str
    bits: int | str
    learning_rate: Callable[[int], float]
    b1: float
    b2: float
    eps: float
    decay: float
    warmup: int
    refresh: int | None
    # Of other optimizers: (rate, x, M / bc1, its size with that of v, root) -> change, size.
    inner: Callable[..., tuple[np.ndarray, np.ndarray]] | None = None
    momentum_decay: float | None = None
    bias_correction: bool = True
    error_feedback: bool = True


def dense_steps(warmup: int, refresh: int | None, total: int) -> set[int]:
    """The dense steps below ``total``: warm-up, 16 refreshes, 16 at twice the interval, ..."""
    steps = set(range(min(warmup, total)))
    at, interval = warmup - 1, refresh
    while interval is not None and at < total:
        for _ in range(16):
            at += interval
            steps.add(at)
        interval *= 2
    return {t for t in steps if t < total}


# ---------------------------------------------------------------- blocks


class Leaf:
    """Shape of a leaf and its cut into blocks, 8 x 128 or narrower if that pads > 1/16."""

    def __init__(self, shape: tuple[int, ...], parts: int, tiles: bool = False):
        self.shape, self.size, self.parts, self.tiles = shape, math.prod(shape), parts, tiles
        self.compressed = len(shape) >= 2 and self.size >= 64 * parts
        if not self.compressed:
            return
        chunk = math.ceil(self.size / parts)
        self.chunk_blocks = math.ceil(chunk / 1024)
        self.lanes = 128
        if parts * self.chunk_blocks * 1024 > self.size + self.size / 16:
            self.lanes = math.ceil(chunk / (8 * self.chunk_blocks))
        self.blocks = parts * self.chunk_blocks

    def cut(self, x: np.ndarray) -> np.ndarray:
        out = np.zeros(self.blocks * 8 * self.lanes)
        out[: self.size] = np.asarray(x, np.float64).ravel()[self.places()]
        return out.reshape(self.blocks, -1)

    def join(self, blocks: np.ndarray) -> np.ndarray:
        out = np.zeros(self.size)
        out[self.places()] = blocks.ravel()[: self.size]
        return out.reshape(self.shape)

    def places(self) -> np.ndarray:
        """Where in the flattened leaf each value of the blocks stands: by tiles, or in order."""
        index = np.arange(self.size).reshape(self.shape)
        *_, rows, cols = self.shape
        if not self.tiles or self.lanes < 128 or rows % 8 or cols % 128:
            return index.ravel()
        matrices = index.reshape(-1, rows, cols)
        tiles = [
            m[r : r + 8, c : c + 128].ravel()
            for m in matrices
            for r in range(0, rows, 8)
            for c in range(0, cols, 128)
        ]
        return np.concatenate(tiles)

    def axes(self) -> tuple[int, int]:
        """The two largest axes, later ones first among equals."""
        dims = list(self.shape)
        last = max(range(len(dims)), key=lambda a: (dims[a], a))
        rest = [a for a in range(len(dims)) if a != last]
        other = max(rest, key=lambda a: (dims[a], a))
        return min(last, other), max(last, other)


# ---------------------------------------------------------------- codes


def unpack(planes: np.ndarray) -> np.ndarray:
    """Byte planes ``(blocks, bits, lanes)``, row k of a block in bit k -> integer codes."""
    bits = np.unpackbits(planes[:, :, None, :], axis=2, bitorder="little").astype(np.int64)
    code = np.asarray(sum(bits[:, j] << j for j in range(planes.shape[1])))
    return code.reshape(len(planes), -1)


def over(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """x / weight, and 0 where the weight is 0."""
    return np.divide(x, weight, out=np.zeros(np.broadcast(x, weight).shape), where=weight > 0)


def decode(planes: np.ndarray, scale: np.ndarray, weight: np.ndarray) -> np.ndarray:
    top = 2 ** planes.shape[1] - 1
    return over((unpack(planes) * (2 / top) - 1) * scale.reshape(-1, 1), weight)


def encode(
    c: np.ndarray,
    size: np.ndarray,
    weight: np.ndarray,
    bits: int,
    seen: np.ndarray,
    limit: float = np.inf,
) -> tuple[np.ndarray, np.ndarray, int]:
    """Decoded code of ``c``, the size of that, and the number of ties.

    Args:
      c, size: values and their sizes.
      weight: 0 where a value takes no part.
      bits: 1 (sign and mean) or more (uniform up to the maximum, no zero level).
      seen: what the package decoded; decides ties and nothing else.
    """
    u, alive = c * weight, weight > 0
    if bits == 1:
        scale = np.minimum(np.abs(u), limit).sum(1, keepdims=True) / np.maximum(
            alive.sum(1, keepdims=True), 1
        )
        level, top = (u >= 0).astype(float), 1
        lower, tie = 0 * level, np.abs(c) <= 2 * TIE * size
    else:
        scale, top = np.abs(u).max(1, keepdims=True), 2**bits - 1
        unit = (over(u, np.broadcast_to(scale, u.shape)) + 1) * top / 2
        level, lower = np.round(unit), np.clip(np.floor(unit), 0, top - 1)
        slack = TIE * top * (over(size * weight, np.broadcast_to(scale, u.shape)) + 1)
        tie = np.abs(unit - lower - 0.5) <= slack

    def value(level: np.ndarray) -> np.ndarray:
        return over((level * (2 / top) - 1) * scale, weight)

    tie &= alive & (scale > 0)
    # Where no error tells, ``seen`` is c itself, and 0 has the sign +.
    higher = np.abs(value(lower + 1) - seen) <= np.abs(value(lower) - seen)
    level = np.where(tie, lower + higher, level)
    largest = (
        np.max(size * weight, 1, keepdims=True)
        if bits > 1
        else np.mean(size * weight, 1, keepdims=True)
    )
    return value(level), over(scale + largest, weight), int(tie.sum())


def encode_log(x: np.ndarray, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Codes 255 + round(4 log2(x / max)) in [1, 255], 0 for 0; the maxima; ties."""
    top = x.max(1, keepdims=True)
    exact = 255 + 4 * np.log2(over(x, np.broadcast_to(top, x.shape)), where=x > 0, out=0 * x)
    # Beyond this float32 cannot tell: its log2 is a few units in the last place of 255 / 4.
    tie = (np.abs(exact - np.floor(exact) - 0.5) <= 255 * TIE) & (x > 0)
    near = np.clip(seen, np.floor(exact), np.floor(exact) + 1)
    level = np.clip(np.where(tie, near, np.round(exact)), 1, 255)
    return np.where(x > 0, level, 0).astype(np.int64), top, int(tie.sum())


def decode_log(level: np.ndarray, top: np.ndarray) -> np.ndarray:
    return np.where(level > 0, top.reshape(-1, 1) * 2.0 ** ((level - 255) / 4), 0)


# ---------------------------------------------------------------- weights


def factors(leaf: Leaf, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Row and column factor of w = (R_i C_j / mean R)^(-1/2); 0 where a mean is 0."""
    row, col = leaf.axes()
    v = leaf.join(v)
    rows, cols = v.mean(col, keepdims=True), v.mean(row, keepdims=True)
    mean = np.broadcast_to(rows.mean(row, keepdims=True), cols.shape)
    return over(np.ones(rows.shape), np.sqrt(rows)), over(np.sqrt(mean), np.sqrt(cols))


def weight(leaf: Leaf, s: dict) -> np.ndarray:
    return leaf.cut(np.minimum(s["row"] * s["col"], 1e18)) * (s["v"] > 0)


# ---------------------------------------------------------------- a step


def step(
    settings: Settings, leaves: list[Leaf], before: dict, grads: list, params: list, after: dict
) -> tuple[dict, list[dict], list, list, int]:
    """One step of all workers.

    Args:
      settings: of the run.
      leaves: one per parameter.
      before: ``step``, ``applied``, ``variance_updates``, ``nonfinite``, ``residual``,
        ``staleness`` and ``leaves``, one dict per leaf: M, v and (gather="params") master; and
        in compressed leaves e, row, col, and m ("params") or E and (stages 1, 2) level, top
        ("momentum").
      grads: per leaf ``(P, *shape)``.
      params: per leaf the replica.
      after: the package's state after this step and its ``updates``, for ties alone.

    Returns:
      The new state, its sizes, the updates, their sizes, and the number of ties.
    """
    z, t = settings, before["step"]
    new = {**before, "step": t + 1, "leaves": list(before["leaves"])}
    bad = [not np.isfinite(g).all() for g in grads]
    new["nonfinite"] = before["nonfinite"] + np.array(bad)
    sizes: list[dict] = [{} for _ in leaves]
    if any(bad):
        zeros = [np.zeros(leaf.shape) for leaf in leaves]
        return new, sizes, zeros, zeros, 0
    dense = t in dense_steps(z.warmup, z.refresh, t + 1)
    count = new["applied"] = before["applied"] + 1
    new["variance_updates"] = before["variance_updates"] + dense
    bc1 = 1 - z.b1**count if z.bias_correction else 1.0
    live = 1 - z.b2**count
    bc2 = 1 - z.b2 ** new["variance_updates"]
    exact = z.gather == "params" and (t < z.warmup or not before["variance_updates"])
    floor = 0.0 if exact else 0.1
    rate = z.learning_rate(before["applied"])
    ties = 0
    # A refresh with local momentum codes M as a compressed step does, with the old weights.
    coded = not dense or (z.gather == "params" and not exact)
    if coded and any(leaf.compressed for leaf in leaves):
        new["residual"] = np.zeros((z.parts, 2))
        _, total, codes = before["staleness"].T
        new["staleness"] = np.stack([np.zeros(z.parts), total, codes + (codes < 32)], 1)
    updates, update_sizes = [], []
    decay = z.b1 if z.momentum_decay is None else z.momentum_decay

    def average(decay, old, g, size_g):
        """decay old + (1 - decay) g, and its size."""
        return decay * old + (1 - decay) * g, decay * np.abs(old) + (1 - decay) * size_g

    def owner(x, M, size_M, v, size_v, root):
        """Change of x, and its size."""
        size = size_M / bc1 + over(np.abs(M) / bc1 * size_v, v)
        if z.inner is not None:
            return z.inner(rate, x, M / bc1, size, root)
        bottom = root + z.eps
        largest = max(10.0, (1 - z.b1) / np.sqrt(1 - z.b2))
        change = np.clip(over(M / bc1, bottom), -largest, largest) + z.decay * x
        size = over(size, bottom)
        return -rate * change, rate * (size + z.decay * np.abs(x))

    for i, leaf in enumerate(leaves):
        old, size, g = before["leaves"][i], sizes[i], np.asarray(grads[i], np.float64)
        seen, y = after["leaves"][i], np.asarray(params[i], np.float64)
        s = new["leaves"][i] = dict(old)
        if not leaf.compressed:
            mean, mean_size = g.mean(0), np.abs(g).mean(0)
            M, size_M = average(z.b1, old["M"], mean, mean_size)
            s["M"], size["M"] = average(decay, old["M"], mean, mean_size)
            s["v"] = z.b2 * old["v"] + (1 - z.b2) * mean**2
            size["v"] = s["v"] + 2 * (1 - z.b2) * np.abs(mean) * mean_size
            x = old["master"] if z.gather == "params" else y
            root = np.sqrt(s["v"] / live)
            change, change_size = owner(x, M, size_M, s["v"], size["v"], root)
            if z.gather == "params":
                s["master"], size["master"] = x + change, np.abs(x) + change_size
                change, change_size = s["master"] - y, size["master"] + np.abs(y)
            updates.append(change)
            update_sizes.append(change_size)
            continue

        # Local momentum, or a restart from the momentum that all share.
        g = np.stack([leaf.cut(x) for x in g])
        prev = old["m"] if z.gather == "params" else np.stack([old["M"]] * z.parts)
        m, size_m = average(z.b1, prev, g, np.abs(g))
        if z.gather == "params":
            s["m"], size["m"] = average(decay, prev, g, np.abs(g))

        # Reduce leg.
        if dense:
            mean, mean_size = g.mean(0), np.abs(g).mean(0)
            M, size_M = average(z.b1, old["M"], mean, mean_size)
            s["v"] = z.b2 * old["v"] + (1 - z.b2) * mean**2
            size["v"] = s["v"] + 2 * (1 - z.b2) * np.abs(mean) * mean_size
            s["row"], s["col"] = size["row"], size["col"] = factors(leaf, s["v"] / bc2)
        if coded:
            w = weight(leaf, old)
            size.setdefault("v", s["v"])
            s["e"], size["e"] = np.zeros_like(old["e"]), np.zeros_like(old["e"])
            M, size_M = np.zeros_like(w), np.zeros_like(w)
            for k in range(z.parts):
                c, size_c = m[k] + old["e"][k], size_m[k] + np.abs(old["e"][k])
                q, size_q, tied = encode(c, size_c, w, 1, c - seen["e"][k], 100.0)
                s["e"][k] = np.where(w > 0, c - q, 0)
                size["e"][k] = size_c + size_q
                M, size_M = M + q / z.parts, size_M + size_q / z.parts
                lost, had = ((s["e"][k] * w) ** 2).sum(), ((c * w) ** 2).sum()
                new["residual"][k] += lost, had
                s["e"][k] *= z.error_feedback
                size["e"][k] *= z.error_feedback
                ties += tied
                norm = np.abs(c * w).sum()
                new["staleness"][k, :2] += norm, norm * (codes[k] < 32)
        w = weight(leaf, s)

        # Gather leg.
        if z.gather == "momentum":
            c, size_c = M + old["E"], size_M + np.abs(old["E"])
            s["M"], size["M"], tied = encode(c, size_c, w, int(z.bits), c - seen["E"], 100.0)
            s["E"], size["E"] = np.where(w > 0, c - s["M"], 0), size_c + size["M"]
            ties += tied
            root = np.sqrt(s["v"] / bc2)
            if z.stage and dense:
                s["level"], s["top"], tied = encode_log(root, seen["level"])
                size["top"] = s["top"]
                ties += tied
            if z.stage:
                root = decode_log(s["level"], s["top"])
            root = np.maximum(root, over(np.full(w.shape, floor), w))
            full = [leaf.join(x) for x in (s["M"], size["M"], s["v"], s["v"], root)]
            change, change_size = owner(y, *full)
            updates.append(change)
            update_sizes.append(change_size)
        else:
            # What was sent tells the mean gradient: g = (M - b1 old) / (1 - b1).
            share = (1 - decay) / (1 - z.b1)
            s["M"], size["M"] = average(1 - share, old["M"], M, size_M)
            root = np.maximum(np.sqrt(s["v"] / bc2), over(np.full(w.shape, floor), w))
            x, replica = old["master"], leaf.cut(y)
            change, change_size = owner(x, M, size_M, s["v"], size["v"], root)
            x, size["master"] = x + change, np.abs(x) + change_size
            difference = size["master"] + np.abs(replica)
            if z.bits == "dense":
                update, update_size = x - replica, difference
            else:
                x = np.where(w > 0, x, replica)
                update, update_size, tied = encode(
                    x - replica,
                    difference,
                    (w > 0) * 1.0,
                    int(z.bits),
                    leaf.cut(after["updates"][i]),
                )
                ties += tied
            s["master"] = x
            updates.append(leaf.join(update))
            update_sizes.append(leaf.join(update_size))
    return new, sizes, updates, update_sizes, ties
