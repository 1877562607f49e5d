"""One process of benchmarks/cluster.py: trains the demo model on its host, and measures.

``time``: every phase over every link: seconds a step, share of them in collectives (from
the profiler, by the names of the compiled program), what the interface sent, what
``wire_report`` predicted. ``loss``: the curve of the held-out loss by step, links unlimited.
"""

import argparse
import functools
import itertools
import json
import os
import pathlib
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import hosts
import jax
import numpy as np
import optax
from cluster_cases import CASES, Case
from jax._src import cache_key, distributed
from jax.sharding import Mesh, NamedSharding

import onebit_zero_jax as ob

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "examples"))

REFRESH, WARM = 32, 2
P = jax.P


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("measure", choices=("time", "loss"))
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--links", type=lambda s: s.split(","), default=["unlimited"])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--coordinator", required=True)
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("--process-id", type=int, required=True)
    return parser.parse_args()


# ---------------------------------------------------------------- methods


class Method:
    """``state, loss, phase = step(state, batch)``, and the program of a phase."""

    def __init__(
        self,
        case: Case,
        mesh: Mesh,
        params: Any,
        loss_fn: Any,
        demo: Any,
        steps: int,
        refresh: int | None,
    ) -> None:
        rate = optax.warmup_cosine_decay_schedule(
            0.0, demo.PEAK_RATE, max(1, steps // 8), steps, demo.PEAK_RATE / 20
        )
        decay = demo.DECAY
        inner = optax.adamw(rate, b2=demo.B2, weight_decay=decay)
        self.case, self.mesh = case, mesh
        self.zero = ob.ZeroConfig(**{"axis_name": case.axes, **dict(case.zero)})
        self.params_of: Callable[[Any], Any]
        self.lower: Callable[..., Any]
        if case.method == "onebit":
            tx = ob.onebit_adamw(
                rate,
                b2=demo.B2,
                weight_decay=decay,
                zero=self.zero,
                warmup_steps=steps // 4,
                refresh=refresh,
            )
            onebit = ob.train_step(loss_fn, tx, mesh, self.zero)
            self.state = ob.init(params, tx, mesh, self.zero)
            self.params_of, self.lower = ob.full_params, onebit.lower

            def step(state: Any, batch: Any) -> tuple[Any, Any, str]:
                state, metrics = onebit(state, batch)
                return state, metrics["loss"], metrics["phase"]

            self.step = step
            return
        if case.method == "jit":
            self.state, run = plain_jit(loss_fn, inner, mesh, params)
            self.params_of = lambda state: state[0]
        else:
            from dense_zero import DenseZero

            dense = DenseZero(loss_fn, inner, mesh, params, half=case.method == "half")
            self.state, run = dense.init(params), dense.step
            self.params_of = jax.jit(dense.params)
        self.lower = lambda state, batch, phase: run.lower(state, batch)
        self.step = lambda state, batch: (*run(state, batch), "dense")

    def batch(self, tokens: np.ndarray) -> Any:
        return ob.shard_batch(tokens, self.mesh, self.zero)


def plain_jit(loss_fn: Any, tx: Any, mesh: Mesh, params: Any) -> tuple[Any, Any]:
    """ZeRO-1 as XLA makes it of shardings alone: replicated parameters, sharded AdamW state."""

    def spec(x: Any) -> P:
        axes = [k for k, n in enumerate(x.shape) if n % mesh.size == 0]
        largest = max(axes, key=lambda k: x.shape[k], default=None)
        names = [mesh.axis_names if k == largest else None for k in range(x.ndim)]
        return P(*names)

    params = jax.tree.map(np.asarray, params)
    shapes = jax.eval_shape(tx.init, params)
    of = functools.partial(NamedSharding, mesh)
    opt = jax.tree.map(lambda x: of(spec(x)), shapes)
    replicated = jax.tree.map(lambda _: of(P()), params)
    state = jax.jit(lambda p: (p, tx.init(p)), out_shardings=(replicated, opt))(params)

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=((replicated, opt), of(P())))
    def run(state: Any, batch: Any) -> Any:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return state, run


# ---------------------------------------------------------------- measurements

_barriers = itertools.count()


def barrier() -> None:
    """Waits for all processes, minutes if need be: a gloo collective gives up after 30 seconds."""
    client = distributed.global_state.client
    assert client is not None
    client.wait_at_barrier(f"barrier {next(_barriers)}", 600_000)


def compile_once(method: Method, batch: Any, phases: tuple[str, ...]) -> dict[str, Any]:
    """The programs of all phases; process 0 compiles, the others read its compilation cache."""
    if jax.process_index():
        barrier()
    programs = {p: method.lower(method.state, batch, phase=p).compile() for p in phases}
    if jax.process_index() == 0:
        barrier()
    barrier()
    return programs


def seconds_in(names: set[str], directory: str) -> float:
    """Seconds covered by events of these names in a profile, overlaps once."""
    (path,) = pathlib.Path(directory).rglob("*.xplane.pb")
    found = []
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        for line in plane.lines:
            for event in line.events:
                if event.name in names:
                    found.append((event.start_ns, event.start_ns + event.duration_ns))
    total, end = 0.0, 0.0
    for start, stop in sorted(found):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total / 1e9


def per_host(report: ob.WireReport, case: Case) -> tuple[float, float]:
    """Bytes a host sends to others: as ``wire_report`` counts them, and as gloo sends them.

    ``wire_report`` takes every collective as ring algorithms, axis by axis. gloo differs in two
    places. Its reduce-scatter halves and doubles, which leaves chunks in bit-reversed order: ranks
    that are not their own reversal (2 of 4) then swap their chunk. And a collective over both
    axes is one ring through all processes: one link of it leaves each host.
    """
    counted = report.sent("hosts") * case.per_host
    gloo = 0.0
    for c in report.collectives:
        if "hosts" not in c.across:
            continue
        gloo += c.total if len(c.across) > 1 else c.crossing("hosts") * case.per_host
        if c.op == "reduce-scatter":
            if len(c.across) > 1:
                raise NotImplementedError("what gloo's reduce-scatter over both axes sends")
            width = (c.group - 1).bit_length()
            moved = [i for i in range(c.group) if int(f"{i:0{width}b}"[::-1], 2) != i]
            gloo += len(moved) / c.group * c.total / (c.group - 1) * case.per_host
    return counted, gloo


def measure_time(args: argparse.Namespace, case: Case, build: "Build") -> dict[str, Any]:
    roughly = {"dense": 64 * build.count, "compressed": 6 * build.count}
    plan = {
        phase: [(link, hosts.steps_for(link, roughly[phase], args.seconds)) for link in args.links]
        for phase in case.phases
    }
    method, data = build(refresh=None)
    warmup = args.steps // 4
    taken = WARM + sum(WARM + n for _, n in plan["dense"])
    assert taken <= warmup, f"{taken} dense steps to time, {warmup} in the run: raise --steps"
    batch = method.batch(next(data))
    programs = compile_once(method, batch, case.phases)
    reports = {p: ob.wire_report(program, method.mesh) for p, program in programs.items()}
    state, rows = method.state, []
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0

    def run(count: int, wanted: str) -> None:
        nonlocal state
        for _ in range(count):
            state, loss, phase = method.step(state, method.batch(next(data)))
            jax.block_until_ready((state, loss))
            assert phase == wanted, f"{phase} step where a {wanted} one was due"

    def link_to(link: str) -> None:
        barrier()
        if jax.process_index() == 0:
            hosts.set_links(case.hosts, link)
        barrier()

    for phase in case.phases:
        if phase == "compressed":
            # The dense steps that are left: the programs are those of a loss run, cached.
            run(warmup - taken, "dense")
        names = {c.instruction for c in reports[phase].collectives}
        predicted = per_host(reports[phase], case)
        link_to("unlimited")
        run(WARM, phase)
        for link, count in plan[phase]:
            link_to(link)
            run(WARM, phase)
            with tempfile.TemporaryDirectory() as directory:
                barrier()
                before = hosts.counters()
                jax.profiler.start_trace(directory, profiler_options=options)
                began = time.perf_counter()
                run(count, phase)
                elapsed = time.perf_counter() - began
                jax.profiler.stop_trace()
                barrier()
                sent = hosts.difference(hosts.counters(), before)
                inside = seconds_in(names, directory)
            rows.append(
                {
                    "link": link,
                    "phase": phase,
                    "steps": count,
                    "seconds": elapsed / count,
                    "communicating": inside / elapsed,
                    "interface": {k: v / count for k, v in sent.items()},
                    "payload": hosts.payload(sent) / count,
                    "predicted": predicted[0],
                    "predicted_gloo": predicted[1],
                }
            )
    return {"rows": rows}


def measure_loss(args: argparse.Namespace, case: Case, build: "Build") -> dict[str, Any]:
    method, data = build(REFRESH)
    compile_once(method, method.batch(next(data)), case.phases)
    data = build.data()
    state, phases, curve = method.state, [], []
    for i in range(args.steps):
        state, loss, phase = method.step(state, method.batch(next(data)))
        jax.block_until_ready((state, loss))
        phases.append(phase)
        if (i + 1) % 20 == 0 or i + 1 == args.steps:
            params = method.params_of(state)
            local = jax.tree.map(lambda x: x.addressable_data(0), params)
            if jax.process_index() == 0:
                curve.append((i + 1, build.evaluate(local)))
                print(f"step {i + 1}: held-out loss {curve[-1][1]:.4f}", flush=True)
            barrier()
    rows = [
        {"step": s, "loss": round(loss, 5), "dense_steps": phases[:s].count("dense")}
        for s, loss in curve
    ]
    return {"curve": rows}


# ---------------------------------------------------------------- one process


class Build:
    """The demo model and data, and a method to train it with a given warm-up."""

    def __init__(self, args: argparse.Namespace, case: Case) -> None:
        import train_gpt as demo
        from flax import nnx

        demo.WIDTH = args.width
        self.args, self.case, self.demo = args, case, demo
        devices = np.asarray(jax.devices()).reshape(case.hosts, case.per_host)
        self.mesh = Mesh(devices if case.per_host > 1 else devices[:, 0], case.axes)
        model = demo.GPT(nnx.Rngs(args.seed))
        _, self.params = nnx.split(model, nnx.Param)
        self.loss_fn = demo.make_loss(model)
        self.count = sum(x.size for x in jax.tree.leaves(self.params))
        text = demo.read_text()
        self.cut = len(text) * 9 // 10
        self.text = text
        held_out = demo.batches(text[self.cut :], 128, 1)
        self.held_out = [next(held_out) for _ in range(2)]
        self.loss_of = jax.jit(self.loss_fn)

    def evaluate(self, params: Any) -> float:
        return float(np.mean([self.loss_of(params, b) for b in self.held_out]))

    def data(self) -> Iterator[np.ndarray]:
        """This process's rows of the batches that all processes draw alike."""
        args = self.args
        n = args.sequences
        batches = self.demo.batches(self.text[: self.cut], n * args.processes, args.seed + 2)
        for batch in batches:
            yield batch[args.process_id * n : (args.process_id + 1) * n]

    def __call__(self, refresh: int | None) -> tuple[Method, Iterator[np.ndarray]]:
        demo, steps = self.demo, self.args.steps
        barrier()
        method = Method(self.case, self.mesh, self.params, self.loss_fn, demo, steps, refresh)
        return method, self.data()


def main() -> None:
    args = parse()
    case = CASES[args.case]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # On CPU each process hashes a topology of its own, and would find nothing of process 0's.
    cache_key._hash_accelerator_config = cache_key._hash_devices  # type: ignore[assignment]
    jax.distributed.initialize(args.coordinator, args.processes, args.process_id)
    build = Build(args, case)
    measure = {"time": measure_time, "loss": measure_loss}[args.measure]
    result = measure(args, case, build)
    result.update(parameters=build.count, host=args.process_id // case.per_host)
    args.out.joinpath(f"{args.process_id}.json").write_text(json.dumps(result))
    # All write before any leaves: a lost peer would end the others.
    barrier()


if __name__ == "__main__":
    try:
        main()
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # The usual way out waits for peers that may be gone.
