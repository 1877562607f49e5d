"""Where ``warmup_steps="auto"`` ends warm-up, by threshold, in runs of dense AdamW.

    python benchmarks/warmup.py gpt-tiny quadratic digits --steps 1200

For each threshold: the first check at which the L1 norm of the variance (of matrices, bias
corrected) has kept that ratio over the window while the learning rate no longer rises, and
the range of that norm in the rest of the run over its value there.
"""

import argparse
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tasks import TASKS, Task

from onebit_zero_jax.phases import CHECKS_PER_WINDOW, check_interval

THRESHOLDS = (0.8, 0.9, 0.93, 0.96, 0.98)


def norms(task: Task, seed: int, steps: int, b2: float) -> np.ndarray:
    """L1 norm of v / (1 - b2^t) after every step."""
    tx = optax.adamw(task.schedule(task.rate), b2=b2, weight_decay=task.decay)

    @jax.jit
    def step(params, opt, batch):
        grads = jax.grad(task.loss)(params, batch)
        updates, opt = tx.update(grads, opt, params)
        adam = opt[0]
        total = sum(jnp.sum(v) for v in jax.tree.leaves(adam.nu) if v.ndim > 1)
        return optax.apply_updates(params, updates), opt, total / (1 - b2**adam.count)

    params = jax.tree.map(jnp.asarray, task.init(seed))
    opt, out = tx.init(params), []
    for _, batch in zip(range(steps), task.batches(seed), strict=False):
        params, opt, total = step(params, opt, batch)
        out.append(total)
    return np.asarray(jax.device_get(out))


def end_of_warmup(v: np.ndarray, rates: np.ndarray, b2: float, threshold: float) -> int | None:
    """Steps before the check that ends warm-up."""
    every = int(check_interval(b2))
    for step in range(every * (CHECKS_PER_WINDOW + 1), len(v) + 1, every):
        new, old = v[step - 1], v[step - 1 - every * CHECKS_PER_WINDOW]
        after = rates[step - 1 : step + 16]
        if min(new, old) >= threshold * max(new, old) and np.all(np.diff(after) <= 0):
            return step
    return None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__ or "", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", nargs="+", choices=TASKS)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, help="of the run, with its schedule; default: task's")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    print("| task | b2 | seed | threshold | warm-up ends at | of | v later, over v there |")
    print("|---|---|---|---|---|---|---|")
    for name in args.tasks:
        task = TASKS[name]()
        task = dataclasses.replace(task, steps=args.steps or task.steps)
        rates = np.asarray(jax.vmap(task.schedule(task.rate))(jnp.arange(task.steps)))
        for seed in range(args.seeds):
            v = norms(task, seed, task.steps, task.b2)
            for threshold in THRESHOLDS:
                end = end_of_warmup(v, rates, task.b2, threshold)
                later = v[end:] / v[end - 1] if end is not None and end < len(v) else None
                span = "-" if later is None else f"{later.min():.2f} to {later.max():.2f}"
                print(
                    f"| {name} | {task.b2:g} | {seed} | {threshold:g} | {end or 'never'} "
                    f"| {task.steps} | {span} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
