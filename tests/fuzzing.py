"""Random runs for test_fuzz.py: what is drawn, and every step of a run against reference.py.

A device's gradient is what its examples say (the loss is linear in the parameters): small
integers times a power of 2 for each row, so that sums of them are exact. The reference
starts every step from the package's state, see test_reference.py.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import reference as ref
from hypothesis import strategies as st
from test_reference import close

import onebit_zero_jax as ob
from onebit_zero_jax import lion, sgdm
from onebit_zero_jax.layout import Shard, is_shard

RATE, DECAY = 0.0625, 0.0625
MAX_RATIO = 10.0  # of LAMB
# Exact in binary, like all decays below: float32 and float64 read 1 - b2 alike.
B2 = 0.96875
TOLERANCE = {"float32": 2.0**-23, "bfloat16": 2.0**-8, "float16": 2.0**-11}


@dataclasses.dataclass(frozen=True)
class Case:
    """One run."""

    mesh: tuple[int, ...]  # sizes of the data axes
    model: int  # size of the model axis, 0 for none
    kind: Any
    zero: dict[str, Any]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    nest: int
    optimizer: str
    b1: float
    warmup: Any
    refresh: int | None
    schedule: bool
    clip: float | None
    accumulate: int
    compute: str | None
    aux: bool
    rng: bool
    poison: tuple[int, int, float] | None  # step, leaf, value
    steps: int
    seed: int


AXES = {1: ("data",), 2: ("slow", "fast")}
SHAPES: list[tuple[int, ...]] = [
    *((), (1,), (7,), (0,), (0, 3), (5, 0, 4), (1, 1), (16, 16), (37, 41), (2, 20, 33)),
    *((1, 700), (700, 1), (64, 128), (8, 8, 8, 8), (1500,), (3, 1000), (1025, 8)),
]
HUGE = (512, 300)


def shapes() -> st.SearchStrategy[tuple[int, ...]]:
    free = st.lists(st.integers(1, 40), min_size=2, max_size=3).map(tuple)
    return st.one_of(st.sampled_from(SHAPES), free)


@st.composite
def configs(draw: Any, axes: int, gather: list[str | None]) -> dict[str, Any]:
    """Valid keyword arguments of ZeroConfig."""
    stage = draw(st.sampled_from([0, 1, 2, 3, 3]))
    gathers = [g for g in gather if stage < 3 or g != "momentum"]
    how = draw(st.sampled_from(gathers))
    mode = how or ("momentum" if stage < 2 else "params")
    bits: Any = [None, 1, 2] if mode == "momentum" else [None, 1, 2, 3, 4, 8, 32, "dense"]
    zero = {
        "axis_name": "data" if axes == 1 else AXES[2],
        "stage": stage,
        "gather": how,
        "gather_bits": draw(st.sampled_from(bits)),
        "error_dtype": draw(st.sampled_from(["float32", "float32", "bfloat16", "int8"])),
        "momentum_dtype": draw(st.sampled_from(["float32", "float32", "bfloat16"])),
    }
    if stage == 3:
        over = [None, "data"] if axes == 1 else [None, "fast", AXES[2], AXES[2][::-1]]
        zero["shard_params_over"] = draw(st.sampled_from(over))
        zero["layer_bits"] = draw(st.sampled_from([None, None, 16, 8]))
    return zero


@st.composite
def cases(draw: Any) -> Case:
    axes = draw(st.sampled_from([1, 2, 2]))
    model = draw(st.sampled_from([0, 0, 0, 1, 2]))
    most = 8 // max(model, 1)
    slow = draw(st.integers(1, most))
    mesh = (slow,) if axes == 1 else (slow, draw(st.integers(1, most // slow)))
    optimizer = draw(st.sampled_from(["adamw", "adamw", "adamw", "lamb", "lion", "sgdm"]))
    zero = draw(
        configs(axes, ["params"] if optimizer == "lion" else [None, None, "params", "momentum"])
    )
    leaves = draw(st.lists(shapes(), min_size=1, max_size=4))
    if draw(st.integers(0, 7)) == 0 or not any(map(math.prod, leaves)):
        leaves.append(HUGE)
    # Clipped gradients are no small integers, so none of their sums must be exact.
    clip = draw(st.sampled_from([None] * 4 + [1e6, 1e-3, 1.0] * (mesh[1:] in ((), (1,)))))
    one = "float32" if clip is not None else None
    dtypes = ["float32", "float32", "bfloat16", "float16"]
    accumulate = draw(st.sampled_from([1, 1, 2, 4] if clip is None else [1]))
    steps = draw(st.integers(4, 8))
    poison = None
    if draw(st.booleans()):
        value = draw(st.sampled_from([math.nan, math.inf, -math.inf, 1e30]))
        poison = draw(st.integers(0, steps - 1)), draw(st.integers(0, len(leaves) - 1)), value
    if model > 1 and zero.get("layer_bits") == 8:
        zero["layer_bits"] = 16
    return Case(
        mesh=mesh,
        model=model,
        kind=draw(st.sampled_from([jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit]))
        if not model
        else jax.sharding.AxisType.Auto,
        zero=zero,
        shapes=tuple(leaves),
        dtypes=tuple(one or draw(st.sampled_from(dtypes)) for _ in leaves),
        nest=draw(st.integers(0, 3)),
        optimizer=optimizer,
        b1=draw(st.sampled_from([0.0, 0.5, 0.875, 0.9375])),
        warmup=draw(st.sampled_from([1, 1, 2, 3, "auto"])),
        refresh=draw(st.sampled_from([None, 1, 2, 3])),
        schedule=draw(st.booleans()),
        clip=clip,
        accumulate=accumulate,
        compute=draw(st.sampled_from([None, None, "bfloat16", "float16"]))
        if clip is None
        else None,
        aux=draw(st.booleans()),
        rng=draw(st.booleans()),
        poison=poison,
        steps=steps,
        seed=draw(st.integers(0, 2**16)),
    )


# ---------------------------------------------------------------- the run


def nested(values: list[Any], how: int) -> Any:
    """A tree whose leaves come in the order of ``values``."""
    if how == 0:
        return values
    if how == 1:
        return {f"p{i:02}": x for i, x in enumerate(values)}
    if how == 2:
        return {"a": [values[0], None, {}], "b": ({"c": tuple(values[1:])}, ())}
    return (values[0],) if len(values) == 1 else (nested(values[:-1], 3), values[-1])


def rate_of(case: Case) -> Callable[[Any], Any]:
    return (lambda t: RATE / (1 + t)) if case.schedule else (lambda t: RATE)


def transformation(case: Case, zero: ob.ZeroConfig) -> Any:
    options: dict[str, Any] = {"zero": zero, "warmup_steps": case.warmup, "refresh": case.refresh}
    rate: Any = rate_of(case) if case.schedule else RATE
    options["weight_decay"] = DECAY
    exact = functools.partial(ob.zero_shard, b2=B2)
    if case.optimizer == "lion":
        with mock.patch.object(lion, "zero_shard", exact):
            tx = ob.onebit_lion(rate, case.b1, B2, **options)
    elif case.optimizer == "sgdm":
        with mock.patch.object(sgdm, "zero_shard", exact):
            tx = ob.onebit_sgdm(rate, case.b1, **options)
    else:
        factory = ob.onebit_adamw
        if case.optimizer == "lamb":
            factory = functools.partial(ob.onebit_lamb, max_ratio=MAX_RATIO)
        tx = factory(rate, case.b1, B2, 1e-6, **options)
    if case.clip is None:
        return tx
    return optax.chain(ob.clip_by_global_norm(case.clip, zero=zero), tx)


def change_of(case: Case) -> Any:
    """The rule of an optimizer that is not AdamW, for the reference: its change and size."""

    def lamb(rate: float, x: Any, M: Any, size_M: Any, root: Any) -> Any:
        bottom = root + 1e-6
        largest = max(10.0, (1 - case.b1) / math.sqrt(1 - B2))
        u = np.clip(ref.over(M, bottom), -largest, largest) + DECAY * x
        size = ref.over(size_M, bottom) + DECAY * np.abs(x)
        norm, length = np.linalg.norm(x), np.linalg.norm(u)
        ratio = min(float(norm / length), MAX_RATIO) if norm and length else 1.0
        slack = 1 + np.linalg.norm(size) / length if length else 1.0
        return -rate * ratio * u, rate * ratio * (size + slack * np.abs(u))

    def sign(rate: float, x: Any, M: Any, size_M: Any, root: Any) -> Any:
        # Where M cancels to nothing its sign is anyone's: 2 apart, in a coarse code up to 4.
        open_sign = np.abs(M) <= ref.TIE * 8 * size_M
        size = 1 + DECAY * np.abs(x) + open_sign * 4 / (32 * ref.EPS)
        return -rate * (np.sign(M) + DECAY * x), rate * size

    def sgdm(rate: float, x: Any, M: Any, size_M: Any, root: Any) -> Any:
        change = M / (1 - case.b1) + DECAY * x
        return -rate * change, rate * (size_M / (1 - case.b1) + DECAY * np.abs(x))

    return {"lamb": lamb, "lion": sign, "sgdm": sgdm}.get(case.optimizer)


class Piece(ref.Leaf):
    """A leaf of the reference, of a shape known to be compressed, perhaps cut along an axis."""

    def __init__(self, shape: tuple[int, ...], parts: int, axis: int | None, compressed: bool):
        super().__init__(shape, parts)
        if not compressed:
            self.compressed = False
        self.axis = axis
        if axis is not None and compressed:
            part = (*shape[:axis], shape[axis] // parts, *shape[axis + 1 :])
            self.part = ref.Leaf(part, 1)
            if (
                not self.part.compressed
            ):  # the reference cuts from 64 values on, a shard may be less
                size = math.prod(part)
                self.part.lanes, self.part.chunk_blocks = -(-size // 8), 1
                self.part.blocks = 1
            self.compressed, self.lanes = True, self.part.lanes
            self.chunk_blocks, self.blocks = self.part.blocks, parts * self.part.blocks

    def cut(self, x: np.ndarray) -> np.ndarray:
        if self.axis is None:
            return super().cut(x)
        return np.concatenate([self.part.cut(p) for p in np.split(x, self.parts, self.axis)])

    def join(self, blocks: np.ndarray) -> np.ndarray:
        if self.axis is None:
            return super().join(blocks)
        return np.concatenate(
            [self.part.join(b) for b in np.split(blocks, self.parts)], axis=self.axis
        )


@dataclasses.dataclass
class View:
    """A leaf of the reference: a piece of a leaf of the package, on some of the devices.

    Attributes:
      index: of the leaf.
      take: the piece of a whole array, padding included.
      leaf: as the reference has it.
      devices: flat indices ``(S, L)`` into the mesh of those that work on it, L = 1 where
        parameters are sharded over the fast axis.
      copies: further devices that hold the same.
    """

    index: int
    take: Callable[[np.ndarray], np.ndarray]
    leaf: Piece
    devices: np.ndarray


class Run:
    """A case on its mesh."""

    def __init__(self, case: Case):
        self.case = case
        names = AXES[len(case.mesh)]
        sizes = (*case.mesh, case.model) if case.model else case.mesh
        names = (*names, "model") if case.model else names
        kinds = (case.kind,) * len(sizes)
        count = math.prod(sizes)
        self.mesh = jax.make_mesh(sizes, names, kinds, devices=jax.devices()[:count])
        self.zero = ob.ZeroConfig(**case.zero)
        self.tx = transformation(case, self.zero)
        self.workers, self.parts = case.mesh[0], math.prod(case.mesh)
        self.random = np.random.default_rng(case.seed)
        params = []
        self.cut: list[int | None] = []
        for shape, dtype in zip(case.shapes, case.dtypes, strict=True):
            x = jnp.asarray(0.25 * self.random.normal(size=shape), dtype)
            even = [a for a, n in enumerate(shape) if case.model > 1 and n % case.model == 0]
            fits = even if math.prod(shape) else []
            # Stage 3 needs an axis that is not cut.
            axis = fits[-1] if fits and len(shape) > 1 and self.random.random() < 0.7 else None
            self.cut.append(axis)
            if axis is not None:
                spec = jax.P(*[None] * axis, "model")
                x = jax.device_put(x, jax.NamedSharding(self.mesh, spec))
            params.append(x)
        self.params = nested(params, case.nest)
        assert len(jax.tree.leaves(self.params)) == len(params)
        # Magnitudes of rows; some rows never move.
        self.scales = []
        for shape in case.shapes:
            e = self.random.integers(-6, 1, size=shape[:1] + (1,) * (len(shape) - 1))
            self.scales.append(2.0**e * (self.random.random(e.shape) > 0.1))

    def loss(self, params: Any, batch: Any, *rng: Any) -> Any:
        leaves = [x.astype(jnp.float32) for x in jax.tree.leaves(params)]
        total = sum(jnp.sum(x * jnp.mean(g, axis=0)) for x, g in zip(leaves, batch, strict=True))
        if rng:
            total = total + 0.0 * jax.random.uniform(rng[0])
        aux = {"examples": jnp.int32(batch[0].shape[0]), "loss": total}
        return (total, aux) if self.case.aux else total

    def batch(self, t: int) -> list[np.ndarray]:
        out = []
        for shape, scale in zip(self.case.shapes, self.scales, strict=True):
            size = (self.parts * self.case.accumulate, *shape)
            if self.case.clip is not None:
                out.append((self.random.normal(size=size) * scale).astype(np.float32))
                continue
            # Odd, lest momenta cancel to exactly 0, whose sign a rounded error cannot tell.
            out.append(((2 * self.random.integers(-32, 32, size) + 1) * scale).astype(np.float32))
        if self.case.poison and self.case.poison[0] == t and out[self.case.poison[1]].size:
            g = out[self.case.poison[1]].reshape(len(out[0]), -1)
            g[self.random.integers(g.shape[0]), self.random.integers(g.shape[1])] = (
                self.case.poison[2]
            )
        return out

    @property
    def options(self) -> dict[str, Any]:
        """Of train_step."""
        options: dict[str, Any] = {"has_aux": self.case.aux, "with_rng": self.case.rng}
        return options | {"accumulate": self.case.accumulate, "compute_dtype": self.case.compute}

    # ------------------------------------------------------------ the package's state

    def local(self, x: Any) -> list[np.ndarray]:
        """What every device of the mesh holds."""
        data = {s.device: np.asarray(s.data) for s in x.addressable_shards}
        return [data[d] for d in self.mesh.devices.flat]

    def views(self, state: Any) -> list[View]:
        out = []
        fast_shards = self.zero.stage == 3 and not self.zero.flat
        models = max(self.case.model, 1)
        L = self.parts // self.workers
        grid = np.arange(self.mesh.devices.size).reshape(self.workers, L, models)
        leaves = jax.tree.leaves(state.params, is_leaf=is_shard)
        for i, (p, cut, shape) in enumerate(zip(leaves, self.cut, self.case.shapes, strict=True)):
            pieces = models if cut is not None else 1
            for m in range(pieces):
                piece = lambda x, m=m, cut=cut, n=pieces: (
                    x if cut is None else np.split(x, n, cut)[m]
                )
                size = tuple(n // pieces if a == cut else n for a, n in enumerate(shape))
                if not isinstance(p, Shard):
                    compressed = len(size) > 1 and math.prod(size) >= 64 * self.parts
                    leaf = Piece(size, self.parts, None, compressed)
                    out.append(View(i, piece, leaf, grid[:, :, m]))
                    continue
                axis = p.axis + len(shape)
                assert axis != cut
                padded = p.value.shape[axis]
                pad = [(0, padded - n if a == axis else 0) for a, n in enumerate(size)]
                whole = lambda x, piece=piece, pad=pad: np.pad(piece(x), pad)
                size = (*size[:axis], padded, *size[axis + 1 :])
                if not fast_shards:
                    leaf = Piece(size, self.parts, axis, True)
                    out.append(View(i, whole, leaf, grid[:, :, m]))
                    continue
                size = (*size[:axis], padded // L, *size[axis + 1 :])
                for f in range(L):
                    take = lambda x, f=f, axis=axis, whole=whole: np.split(whole(x), L, axis)[f]
                    leaf = Piece(size, self.workers, None, True)
                    out.append(View(i, take, leaf, grid[:, f : f + 1, m]))
        return out

    def read(self, views: list[View], state: Any) -> dict[str, Any]:
        """The state as the reference keeps it."""
        opt = ob_zero_state(state.opt_state)
        out: dict[str, Any] = {
            k: int(getattr(opt, k)) for k in ("step", "applied", "variance_updates")
        }
        out["nonfinite"] = np.asarray(opt.nonfinite)
        L, models = self.parts // self.workers, max(self.case.model, 1)
        for k in ("residual", "staleness"):
            rows = np.concatenate(self.local(getattr(opt, k)), 0, dtype=np.float64)
            rows = rows.reshape(self.workers, L * models, -1)
            out[k] = rows.sum(1)
            if k == "staleness":
                assert (rows[..., 2] == rows[:1, :1, 2]).all()
                out[k][:, 2] = rows[:, 0, 2]
        states = jax.tree.leaves(opt.leaves, is_leaf=lambda x: hasattr(x, "momentum"))
        locals_of = functools.cache(lambda i: jax.tree.map(self.local, states[i]))
        out["leaves"] = [self.read_leaf(v, states[v.index], locals_of(v.index)) for v in views]
        return out

    def read_leaf(self, view: View, s: Any, local: Any) -> dict[str, Any]:
        leaf, where = view.leaf, view.devices
        assert hasattr(s, "factors") == leaf.compressed, (leaf.shape, s)

        def same(x: list[np.ndarray]) -> np.ndarray:
            copies = [x[d] for d in where.flat]
            assert all(copies[0].tobytes() == y.tobytes() for y in copies)
            return copies[0]

        r: dict[str, Any] = {}
        params = self.zero.gather_mode == "params"
        if not leaf.compressed:
            r["M"], r["v"] = same(local.momentum), same(local.variance)
            if params:
                r["master"] = same(local.master)
            return r
        whole = (leaf.blocks, 8 * leaf.lanes)

        def owned(x: list[np.ndarray]) -> np.ndarray:
            # Device (s, f) owns chunk f * S + s.
            return np.concatenate([x[d] for d in where.T.flat]).reshape(whole).astype(np.float64)

        def load(x: Any) -> list[np.ndarray]:
            if not hasattr(x, "values"):
                return x
            return [
                np.repeat(q.scale, 2, axis=-2) * q.values.astype(np.float32)
                for q in (type(x)(v, s) for v, s in zip(x.values, x.scale, strict=True))
            ]

        def workers(x: Any) -> np.ndarray:
            arrays = load(x)
            rows = [np.concatenate([arrays[d] for d in row]).reshape(whole) for row in where]
            return np.stack(rows).astype(np.float64)

        r["row"], r["col"] = same(local.factors.row), same(local.factors.col)
        v = same(local.shared).reshape(whole) if self.zero.stage == 0 else owned(local.variance)
        r["v"] = v.astype(np.float64)
        if local.worker_error is None:
            r["e"] = np.zeros((self.workers, *whole))
        else:
            r["e"] = workers(local.worker_error)
        if params:
            r["m"] = workers(local.worker_momentum)
            r["M"], r["master"] = owned(local.momentum), owned(local.master)
            if self.zero.stage:
                np.testing.assert_array_equal(ref.unpack(same(local.shared)[:, None]), r["v"] > 0)
            return r
        r["E"] = owned(load(local.server_error))
        planes, scale = same(local.momentum.planes), same(local.momentum.scale)
        r["M"] = ref.decode(planes, scale, ref.weight(leaf, r))
        if self.zero.stage:
            level, top = same(local.shared.levels), same(local.shared.top)
            r["level"], r["top"] = level.reshape(whole).astype(int), top.reshape(-1, 1)
            np.testing.assert_array_equal(r["level"] > 0, r["v"] > 0)
        return r

    def slack(self, k: str, want: np.ndarray) -> Any:
        """What storing a number in fewer bits may lose, each time."""
        if k == "m" and self.zero.momentum_dtype == "bfloat16":
            return 2.0**-8 * np.abs(want)
        if k in ("e", "E") and self.zero.error_dtype == "bfloat16":
            return 2.0**-8 * np.abs(want)
        if k in ("e", "E") and self.zero.error_dtype == "int8":
            return np.abs(want).max(-1, keepdims=True) / 250 + 1e-35
        return 0.0


def ob_zero_state(opt_state: Any) -> Any:
    from onebit_zero_jax.state import zero_states

    (state,) = zero_states(opt_state)
    return state


def compare(case: Case, what: Any, got: Any, want: Any, size: Any, slack: Any) -> None:
    """``close``; a few values may differ whose tie an error stored in few bits cannot decide."""
    if case.zero["error_dtype"] == "float32":
        close(what, got, want, size, slack)
        return
    assert np.shape(got) == np.shape(want), what
    bad = np.abs(np.asarray(got, np.float64) - want) > 32 * ref.EPS * size + slack
    assert bad.sum() <= 3 + bad.size / 200, (what, bad.sum(), bad.size)


def check(case: Case) -> None:
    """Trains a case; every step must be the reference's, replicas equal, counts right."""
    run = Run(case)
    zero, parts = run.zero, run.parts
    state = ob.init(run.params, run.tx, run.mesh, zero)
    views = run.views(state)
    step = ob.train_step(run.loss, run.tx, run.mesh, zero, **run.options)
    inner = change_of(case)
    settings = ref.Settings(
        run.workers, zero.stage, zero.gather_mode,
        "dense" if zero.flat else zero.bits, rate_of(case), case.b1, B2, 1e-6, DECAY,
        10**6 if case.warmup == "auto" else case.warmup, case.refresh, inner=inner,
    )  # fmt: skip
    if case.optimizer == "lion":
        settings = dataclasses.replace(settings, momentum_decay=B2, error_feedback=False)
    if case.optimizer in ("lion", "sgdm"):
        settings = dataclasses.replace(settings, bias_correction=False)
    # Trust ratios of leaves that the reference sees in pieces are not the reference's.
    whole = case.optimizer != "lamb" or len(views) == len(case.shapes)
    got, skipped, L = run.read(views, state), 0, parts // run.workers
    wide = [np.asarray(x, np.float64) for x in jax.tree.leaves(ob.full_params(state))]
    for t in range(case.steps):
        before, batch = got, run.batch(t)
        old = wide
        key = (jax.random.key(case.seed),) if case.rng else ()
        state, metrics = step(state, batch, *key)
        got = run.read(views, state)
        wide = [np.asarray(x, np.float64) for x in jax.tree.leaves(ob.full_params(state))]
        dense = t in ref.dense_steps(settings.warmup, case.refresh, t + 1)
        dense |= before["variance_updates"] == 0
        assert metrics["phase"] == ("dense" if dense else "compressed"), t
        # The gradient as the package takes it.
        with np.errstate(all="ignore"):
            means = [g.reshape(parts, case.accumulate, *g.shape[1:]).mean(1) for g in batch]
            means = [
                g.astype(case.compute or np.float32).astype(d).astype(np.float64)
                if case.accumulate == 1
                else g.astype(np.float64)
                for g, d in zip(means, case.dtypes, strict=True)
            ]
        finite = all(np.isfinite(g).all() for g in means)
        norm = float(metrics["gradient_norm"])
        if finite:
            true = math.sqrt(sum((g.mean(0) ** 2).sum() for g in means))
            assert abs(norm - true) <= 0.16 * true + 1e-30, (norm, true)
            if case.clip is not None and norm > case.clip:
                factor = np.float32(case.clip) / np.float32(norm)
                means = [g * np.float64(factor) for g in means]
        means = [np.where(np.abs(g) < 2.0**62, g, np.nan) for g in means]
        bad = [not np.isfinite(g).all() for g in means]
        skipped += any(bad)
        assert int(metrics["skipped_steps"]) == skipped
        np.testing.assert_array_equal(got["nonfinite"], before["nonfinite"] + np.array(bad))
        if case.aux:
            assert int(metrics["aux"]["examples"]) == parts * case.accumulate
        if finite and not case.compute and not zero.layer_bits:
            whole_batch = [np.asarray(g, np.float64) for g in batch]
            products = [
                (g.mean(0) * y, np.abs(g).mean(0) * np.abs(y))
                for g, y in zip(whole_batch, old, strict=True)
            ]
            want, size = (sum(p[k].sum() for p in products) for k in (0, 1))
            assert abs(float(metrics["loss"]) - want) <= 1e-5 * size + 1e-30
        grads = []
        for v in views:
            g = np.stack([v.take(x) for x in means[v.index]])
            grads.append(g.reshape(run.workers, L, *v.leaf.shape).mean(1))
        if any(bad):  # a reduction over the fast axis may have met a leaf in one piece only
            grads = [g * np.nan for g in grads]
        takes = [v.take(old[v.index]) for v in views]
        updates = [v.take(wide[v.index]) - y for v, y in zip(views, takes, strict=True)]
        # A variance that no step has updated yet is never frozen.
        warmup = settings.warmup if before["variance_updates"] else max(settings.warmup, t + 1)
        want, sizes, changes, change_sizes, _ = ref.step(
            dataclasses.replace(settings, warmup=warmup), [v.leaf for v in views],
            {**before, "nonfinite": np.zeros(len(views), int)}, grads, takes,
            {**got, "updates": updates},
        )  # fmt: skip
        for k in ("step", "applied", "variance_updates"):
            assert got[k] == want[k], (t, k)
        for k in ("residual", "staleness"):
            close((t, k), got[k], want[k], want[k])
        for v, g, w, size in zip(views, got["leaves"], want["leaves"], sizes, strict=True):
            assert g.keys() == w.keys()
            for k in g if whole else set(g) - {"master"}:
                slack = run.slack(k, np.asarray(w[k])) if not any(bad) else 0.0
                if k in ("row", "col") and case.clip is not None and "v" in size:
                    # A sum of v that is not exact, of few values.
                    slack = np.abs(w[k]) * 32 * ref.EPS * ref.over(size["v"], w["v"]).max()
                compare(case, (t, v.index, k), g[k], w[k], size.get(k, 0.0), slack)
        for v, u, y, change, size in zip(views, updates, takes, changes, change_sizes, strict=True):
            unit = TOLERANCE[case.dtypes[v.index]]
            slack = 2 * unit * (np.abs(change) + np.abs(y) + np.abs(u)) + 2.0**-24 * (unit > 1e-6)
            if whole:
                compare(case, (t, v.index, "update"), u, change, size, 0.0 if any(bad) else slack)
            assert np.isfinite(u).all()
    ob.assert_in_sync(state)
