"""Bytes that a traced program sends, read from the program itself."""

import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from jax.extend import core

# Named scopes of the legs; collectives outside of them count as "other".
LEGS = (
    "layer_gather",
    "fast_leg",
    "reduce_leg",
    "gather_leg",
    "dense_leaves",
    "weights",
    "metrics",
)


def _sent(eqn: Any, sizes: dict[str, int]) -> float | None:
    """Bytes a device sends in a collective (ring algorithms); None for other equations."""
    name = eqn.primitive.name
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    axes = axes if isinstance(axes, tuple) else (axes,)
    p = math.prod(sizes[a] for a in axes if a in sizes)
    if name in ("psum", "psum_invariant", "pmax", "pmin"):
        factor = 2 * (p - 1) / p
    elif name in ("all_gather", "all_gather_invariant"):
        factor = p - 1
    elif name in ("reduce_scatter", "all_to_all"):
        factor = (p - 1) / p
    elif name == "ppermute":
        factor = 1
    else:
        return None
    values = [v.aval for v in eqn.invars]
    payload = sum(math.prod(a.shape) * a.dtype.itemsize for a in values)
    return payload * factor


def _inner(value: Any) -> Iterator[Any]:
    if isinstance(value, core.ClosedJaxpr):
        yield value.jaxpr
    elif isinstance(value, core.Jaxpr):
        yield value
    elif isinstance(value, (tuple, list)):
        for v in value:
            yield from _inner(v)


def _walk(jaxpr: Any, sizes: dict[str, int], scope: str, totals: dict[str, float]) -> None:
    for eqn in jaxpr.eqns:
        stack = f"{scope}/{eqn.source_info.name_stack}"
        sent = _sent(eqn, sizes)
        if sent is not None:
            # The backward pass wraps scopes: "transpose(jvp(fast_leg))".
            scopes = re.findall(r"\w+", stack)
            leg = next((leg for leg in LEGS if leg in scopes), "other")
            totals[leg] = totals.get(leg, 0.0) + sent
            continue
        bodies = [b for v in eqn.params.values() for b in _inner(v)]
        if eqn.primitive.name == "cond":
            # The branch that sends most: an upper bound.
            options: list[dict[str, float]] = [{} for _ in bodies]
            for body, branch in zip(bodies, options, strict=True):
                _walk(body, sizes, stack, branch)
            bodies, most = [], max(options, key=lambda t: sum(t.values()))
            for leg, n in most.items():
                totals[leg] = totals.get(leg, 0.0) + n
        repeat = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for body in bodies:
            inside: dict[str, float] = {}
            _walk(body, sizes, stack, inside)
            for leg, n in inside.items():
                totals[leg] = totals.get(leg, 0.0) + repeat * n


def traced_bytes(jaxpr: Any, sizes: dict[str, int]) -> dict[str, int]:
    """Bytes each device sends in one run of a traced program, by leg.

    Counts the program's collectives with ring algorithms on P devices: an all-gather
    sends ``P - 1`` times its input, reduce-scatter and all-to-all ``(P - 1) / P``, an
    all-reduce twice that. Of a ``cond`` the branch that sends most counts, of a
    ``while`` loop one iteration.

    Args:
      jaxpr: ClosedJaxpr, e.g. ``jax.jit(f).trace(x).jaxpr``.
      sizes: sizes of the mesh axes.

    Returns:
      Bytes by leg: ``"reduce"``, ``"gather"``, ``"dense_leaves"``, ``"weights"``,
      ``"metrics"``, ``"other"`` (the user's own collectives).

    Example:
      >>> import jax
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> f = jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh,
      ...     in_specs=jax.P(), out_specs=jax.P())
      >>> traced_bytes(jax.jit(f).trace(jax.numpy.ones(4)).jaxpr, {"data": 4})["other"]
      24
    """
    totals: dict[str, float] = {leg: 0.0 for leg in (*LEGS, "other")}
    _walk(jaxpr.jaxpr, sizes, "", totals)
    return {leg.removesuffix("_leg"): round(n) for leg, n in totals.items()}


# What leaves zeros zero.
_KEEP_ZERO = frozenset(
    {
        *("broadcast_in_dim", "convert_element_type", "mul", "neg", "pvary", "reshape"),
        *("squeeze", "transpose"),
    }
)


def known_zeros(jaxpr: Any) -> list[bool]:
    """Whether each output of a jaxpr is seen to be 0 whatever its inputs.

    Example:
      >>> import jax
      >>> program = jax.make_jaxpr(lambda x: (x + 1.0, 2.0 * jax.numpy.zeros_like(x)))(1.0)
      >>> known_zeros(program.jaxpr)
      [False, True]
    """
    zeros = set[Any]()

    def is_zero(v: Any) -> bool:
        return v in zeros if isinstance(v, core.Var) else not np.any(v.val)

    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _KEEP_ZERO and any(map(is_zero, eqn.invars)):
            zeros.update(eqn.outvars)
    return [is_zero(v) for v in jaxpr.outvars]
