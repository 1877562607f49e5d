"""Which steps are dense: warm-up, refreshes, and what the run itself decides about them.

Two things are not known before the run: when ``warmup_steps="auto"`` ends, and where the
learning rate rises again. The program looks every ``CHECK_EVERY`` steps and writes what it
finds into the optimizer's state (``starts``, the same on all devices), ``NOTICE`` steps
before it counts. A host that picks programs reads it meanwhile, without waiting for the
step under way; all processes read the same number and change phase in the same step.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

# Refresh intervals double after this many refreshes (0/1 Adam, Lu et al. 2022).
REFRESHES_PER_INTERVAL = 16

# Steps from one check to the next, and from a decision to the first step it changes.
CHECK_EVERY = 16
NOTICE = 8

# The norm of v is compared over this many norms, a window of 1 / (1 - b2) steps but at
# least MIN_WINDOW; of 1-bit Adam (Tang et al. 2021), who compare the two in every step.
CHECKS_PER_WINDOW = 8
MIN_WINDOW = 100
SETTLED = 0.96

# A learning rate rises if it grows by more than what rounding in float32 can do.
_RISE = 1e-6


def check_interval(b2: Any) -> Any:
    """Steps between two norms of v: a multiple of CHECK_EVERY, an eighth of the window.

    Example:
      >>> [check_interval(b2) for b2 in (0.9, 0.99, 0.999)]
      [16, 16, 128]
    """
    unit = CHECK_EVERY * CHECKS_PER_WINDOW
    if isinstance(b2, jax.Array):
        window = jnp.maximum(MIN_WINDOW, jnp.round(1 / (1 - b2)))
        return CHECK_EVERY * jnp.ceil(window / unit).astype(jnp.int32)
    return CHECK_EVERY * math.ceil(max(MIN_WINDOW, round(1 / (1 - b2))) / unit)


@dataclasses.dataclass(frozen=True)
class Phases:
    """When steps are dense: all of warm-up, then variance refreshes at doubling intervals.

    ``starts``, of the optimizer's state, are the last three steps from which refreshes count
    as from the end of warm-up, in order; 0 for none. The step before each is dense. Two may
    lie ahead: one of the check before, one of the check just made.

    Args:
      warmup_steps: dense steps at the start, at least 1; ``"auto"``: until there is a start.
      refresh: steps from one variance refresh to the next; doubles after every 16
        refreshes. None: never refresh.
    """

    warmup_steps: int | Literal["auto"]
    refresh: int | None

    @property
    def decides(self) -> bool:
        """Whether the run may set starts at all."""
        return self.warmup_steps == "auto" or self.refresh is not None

    def is_dense(self, step: int, starts: Sequence[int] = ()) -> bool:
        """Whether step ``step`` (from 0) is dense.

        Example:
          >>> [t for t in range(20) if Phases(2, 4).is_dense(t)]
          [0, 1, 5, 9, 13, 17]
          >>> [t for t in range(20) if Phases("auto", 8).is_dense(t, (4, 13))]
          [0, 1, 2, 3, 11, 12]
        """
        begun = [s for s in starts if 0 < s <= step + 1]
        if not begun and self.warmup_steps == "auto":
            return True
        since = step - (max(begun) if begun else int(self.warmup_steps))
        if since < 0 or self.refresh is None:
            return since < 0
        # The interval is refresh * 2^j from step 16 * refresh * (2^j - 1) after warm-up on.
        span = REFRESHES_PER_INTERVAL * self.refresh
        growth = 1 << ((since // span + 1).bit_length() - 1)
        interval = self.refresh * growth
        return (since - span * (growth - 1)) % interval == interval - 1

    def is_dense_traced(self, step: jax.Array, starts: jax.Array) -> jax.Array:
        """The same for int32 arrays; ``warmup_steps`` and ``refresh`` may be arrays too."""
        last = jnp.max(jnp.where(starts <= step + 1, starts, 0))
        first = step + 1 if self.warmup_steps == "auto" else self.warmup_steps
        since = step - jnp.where(last > 0, last, first)
        if self.refresh is None:
            return since < 0
        past = jnp.maximum(since, 0)
        span = REFRESHES_PER_INTERVAL * self.refresh
        growth = jnp.int32(1) << (31 - lax.clz(past // span + 1))
        interval = self.refresh * growth
        return (since < 0) | ((past - span * (growth - 1)) % interval == interval - 1)

    def in_warmup_traced(self, step: jax.Array, starts: jax.Array) -> jax.Array:
        """Whether no step up to ``step`` was after warm-up."""
        begun = jnp.any((starts > 0) & (starts <= step))
        return ~begun if self.warmup_steps == "auto" else (step < self.warmup_steps) & ~begun

    def advance(
        self,
        step: jax.Array,
        starts: jax.Array,
        norms: jax.Array,
        norm: Callable[[], jax.Array],
        b2: Any,
        learning_rate: Callable[[Any], Any] | None,
    ) -> tuple[jax.Array, jax.Array]:
        """``starts`` and ``norms`` after step ``step``; all of it equal on all devices.

        Args:
          step: int32.
          starts: int32 ``(3,)``.
          norms: float32 ``(CHECKS_PER_WINDOW,)``, L1 norms of v at the last checks.
          norm: that of now; called for ``warmup_steps="auto"`` alone.
          b2: decay of v.
          learning_rate: schedule of the number of steps, or None if it never rises.
        """
        after = step + 1
        # Decided here is what happens from this step on.
        first = after + NOTICE
        if learning_rate is None:
            rises = jnp.zeros(CHECK_EVERY + 1, jnp.bool_)
        else:
            times = first - 2 + jnp.arange(CHECK_EVERY + 2, dtype=jnp.int32)
            rates = jax.vmap(lambda t: jnp.asarray(learning_rate(t), jnp.float32))(times)
            rises = rates[1:] > rates[:-1] * jnp.float32(1 + _RISE)
        new = jnp.int32(0)
        if self.refresh is not None:
            begins = rises[1:] & ~rises[:-1]
            at = first + jnp.argmax(begins).astype(jnp.int32)
            begun = jnp.any(starts > 0)
            if self.warmup_steps != "auto":
                begun = begun | (at >= self.warmup_steps)
            new = jnp.where(jnp.any(begins) & begun & (after % CHECK_EVERY == 0), at + 1, new)
        if self.warmup_steps == "auto":
            now, old = norm(), norms[0]
            check = after % check_interval(b2) == 0
            low, high = jnp.minimum(now, old), jnp.maximum(now, old)
            settled = (low > 0) & (low >= SETTLED * high) & ~jnp.any(rises)
            new = jnp.where(check & settled & ~jnp.any(starts > 0), first, new)
            norms = jnp.where(check, jnp.concatenate([norms[1:], now[None]]), norms)
        starts = jnp.where(new > 0, jnp.concatenate([starts[1:], new[None]]), starts)
        return starts, norms
