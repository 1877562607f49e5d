"""Non-finite gradients in a row: :class:`SkipLimit` raises, naming the leaf."""

import jax
import numpy as np

from onebit_zero_jax.state import ChunkState, DenseState, ZeroState, zero_states
from onebit_zero_jax.train_state import TrainState


class SkipLimit:
    """Raises when too many steps in a row were skipped for a non-finite gradient.

    A single skipped step is nothing: the next one goes on. A run whose every gradient is
    NaN would go on for ever. Call it every few steps (it waits for the device): if no
    update was applied between two calls, all steps between them were skipped.

    Args:
      limit: steps in a row, at least 1.

    Raises:
      ValueError: ``limit`` is not an integer of at least 1.
      FloatingPointError: from a call; names the leaves, and how often each was the cause.

    Example:
      >>> import jax.numpy as jnp
      >>> from onebit_zero_jax import ZeroConfig, init, onebit_adam, train_step
      >>> mesh, zero = jax.make_mesh((1,), ("data",)), ZeroConfig()
      >>> tx = onebit_adam(0.1, zero=zero)
      >>> step = train_step(lambda p, x: jnp.sum(p["w"] * x), tx, mesh, zero)
      >>> state, limit = init({"w": jnp.ones(3)}, tx, mesh, zero), SkipLimit(2)
      >>> for x in (1.0, np.nan, np.nan):
      ...     limit(state)
      ...     state, metrics = step(state, np.full((1, 3), x, np.float32))
      >>> limit(state)
      Traceback (most recent call last):
      FloatingPointError: the last 2 steps were skipped: gradients that are not finite in ['w'] (2).
    """

    def __init__(self, limit: int) -> None:
        """Remembers nothing yet."""
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise ValueError(f"limit must be an integer of at least 1, got {limit!r}.")
        self._limit = limit
        # Of each zero_shard: updates applied, and step and causes when that was first seen.
        self._seen: list[tuple[int, int, np.ndarray]] = []

    def __call__(self, state: TrainState) -> None:
        """Looks at the counters of ``state``."""
        states = zero_states(state.opt_state)
        if len(self._seen) != len(states):
            self._seen = [(-1, 0, np.zeros(0))] * len(states)
        for k, s in enumerate(states):
            applied, step, causes = (np.asarray(x) for x in (s.applied, s.step, s.nonfinite))
            before, since, then = self._seen[k]
            if applied != before or step < since:
                self._seen[k] = int(applied), int(step), causes
            elif step - since >= self._limit:
                raise FloatingPointError(
                    f"the last {step - since} steps were skipped: gradients that are not finite in "
                    f"{_names(s, causes - then)}."
                )


def _names(state: ZeroState, counts: np.ndarray) -> str:
    leaves = jax.tree.leaves_with_path(
        state.leaves, is_leaf=lambda x: isinstance(x, (ChunkState, DenseState))
    )
    names = [jax.tree_util.keystr(path) or "params" for path, _ in leaves]
    bad = [f"{name} ({n})" for name, n in zip(names, counts, strict=True) if n]
    return ", ".join(bad[:8]) + (" and others" if len(bad) > 8 else "")
