"""What a run of ZeRO with 1-bit communication is: :class:`ZeroConfig`."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

GatherBits = Literal[1, 2, 3, 4, 8, "dense"]

_DEFAULT_GATHER = {0: "momentum", 1: "momentum", 2: "params", 3: "params"}
_DEFAULT_BITS = {"momentum": 1, "params": 4}
_ALLOWED_BITS = {"momentum": (1, 2), "params": (1, 2, 3, 4, 8, "dense")}
_ERROR_DTYPES = ("float32", "bfloat16", "int8")
_MOMENTUM_DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class ZeroConfig:
    """Which state is sharded, and what travels over the data-parallel axis.

    The reduce leg always sends momentum at 1 bit per value. The gather leg sends
    what ``gather`` and ``gather_bits`` say. ``None`` means the stage's default:

    =====  ==============================================  =================
    stage  sharded over the data-parallel axis             gather leg
    =====  ==============================================  =================
    0      nothing (1-bit Adam as published)               momentum, 1 bit
    1      variance, server error                          momentum, 1 bit
    2      master parameters, momentum, variance           params, 4 bits
    3      these, and the parameters                       params, 4 bits
    =====  ==============================================  =================

    Args:
      axis_name: name of the data-parallel mesh axis, or ``(slow, fast)`` of a two-speed
        mesh: gradients are reduced in full over the fast axis and compressed over the
        slow one, and worker state shrinks by the size of the fast axis.
      stage: 0, 1, 2 or 3. Stages 1 and 2 differ in the default gather leg alone: the master
        parameters and the momentum are sharded exactly with ``gather="params"``.
      gather: ``"params"`` (owners send what changed since the replicas were last
        updated) or ``"momentum"`` (owners send the reduced momentum and every
        device applies the update itself).
      gather_bits: bits per value of the gather leg: 1, 2, 3, 4, 8 or ``"dense"``
        (the values themselves, in the parameters' dtype; 32 means the same) for
        ``"params"``, 1 or 2 for ``"momentum"``.
      shard_params_over: stage 3 only, the mesh axes that parameters are sharded over:
        the fast axis (default of a two-speed mesh: layers are gathered over fast links,
        codes of what changed cross the slow one) or every data-parallel axis ("flat",
        default of a single axis: no gather leg, but layers are gathered over the slow
        axis too, and each device keeps worker state of the whole model).
      layer_bits: stage 3 only, bits of a value when layers are gathered: 16 (bfloat16), 8
        (codes with block scales), or None for the dtype that the loss computes in.
      error_dtype: storage of the worker and server errors: ``"float32"`` (loses
        nothing), ``"bfloat16"`` or ``"int8"``; bounds in :func:`storage.store`.
      momentum_dtype: storage of the local momentum of ``gather="params"``:
        ``"float32"`` or ``"bfloat16"``.
      tiles: whether blocks are tiles of 8 rows and 128 columns of a matrix that divides into
        such, not 1,024 consecutive values. TPUs lay out memory in these tiles: set it there,
        it saves copies and up to nine tenths of the temporaries. Elsewhere it costs copies.

    Raises:
      ValueError: a value is not one of those above.

    Example:
      >>> ZeroConfig(stage=2).gather_mode, ZeroConfig(stage=2).bits
      ('params', 4)
      >>> ZeroConfig(stage=1).gather_mode, ZeroConfig(stage=1).bits
      ('momentum', 1)
      >>> ZeroConfig(axis_name=("slow", "fast")).owner_axes
      ('fast', 'slow')
      >>> ZeroConfig(axis_name=("slow", "fast"), stage=3).over, ZeroConfig(stage=3).over
      (('fast',), ('data',))
    """

    axis_name: str | tuple[str, str] = "data"
    stage: int = 2
    gather: Literal["params", "momentum"] | None = None
    gather_bits: GatherBits | Literal[32] | None = None
    shard_params_over: str | tuple[str, ...] | None = None
    layer_bits: Literal[8, 16] | None = None
    error_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    momentum_dtype: Literal["float32", "bfloat16"] = "float32"
    tiles: bool = False

    def __post_init__(self) -> None:
        if type(self.stage) is not int or self.stage not in _DEFAULT_GATHER:
            raise ValueError(f"stage must be 0, 1, 2 or 3, got {self.stage!r}.")
        if isinstance(self.axis_name, tuple) and len(self.axis_name) == 1:
            object.__setattr__(self, "axis_name", self.axis_name[0])
        names = self.axis_name if isinstance(self.axis_name, tuple) else (self.axis_name,)
        if not 1 <= len(names) <= 2 or not all(isinstance(n, str) and n for n in names):
            raise ValueError(
                "axis_name must be the name of a mesh axis or a pair (slow, fast) of them, "
                f"got {self.axis_name!r}."
            )
        if len(set(names)) < len(names):
            raise ValueError(f"axis_name={self.axis_name!r} names the same axis twice.")
        if not _is_one_of(self.gather, (None, "params", "momentum")):
            raise ValueError(f"gather must be 'params' or 'momentum', got {self.gather!r}.")
        if type(self.gather_bits) is int and self.gather_bits == 32:
            object.__setattr__(self, "gather_bits", "dense")
        allowed = _ALLOWED_BITS[self.gather_mode]
        if not _is_one_of(self.gather_bits, (None, *allowed)):
            raise ValueError(
                f"gather_bits must be one of {allowed} for gather={self.gather_mode!r}, "
                f"got {self.gather_bits!r}."
            )
        self._check_stage_3()
        if not isinstance(self.tiles, bool):
            raise ValueError(f"tiles must be True or False, got {self.tiles!r}.")
        if not _is_one_of(self.error_dtype, _ERROR_DTYPES):
            raise ValueError(
                f"error_dtype must be one of {_ERROR_DTYPES}, got {self.error_dtype!r}."
            )
        if not _is_one_of(self.momentum_dtype, _MOMENTUM_DTYPES):
            raise ValueError(
                f"momentum_dtype must be one of {_MOMENTUM_DTYPES}, got {self.momentum_dtype!r}."
            )

    def _check_stage_3(self) -> None:
        over, bits = self.shard_params_over, self.layer_bits
        if self.stage != 3:
            for name, value in (("shard_params_over", over), ("layer_bits", bits)):
                if value is not None:
                    raise ValueError(
                        f"{name}={value!r} needs stage=3; stage {self.stage} replicates "
                        "parameters, leave it None."
                    )
            return
        if self.gather == "momentum":
            raise ValueError(
                "gather='momentum' needs replicated parameters, to which every device applies "
                "the update; stage=3 shards them: use gather='params'."
            )
        if not _is_one_of(bits, (None, 8, 16)):
            raise ValueError(f"layer_bits must be 8, 16 or None, got {bits!r}.")
        names = (over,) if isinstance(over, str) else over
        allowed = [sorted(self.axes), [self.axes[-1]]]
        strings = type(names) is tuple and all(isinstance(n, str) for n in names)
        if names is not None and (not strings or sorted(names) not in allowed):
            raise ValueError(
                f"shard_params_over must be {self.axes[-1]!r} or every data-parallel axis "
                f"{self.axes}, got {over!r}."
            )

    @property
    def axes(self) -> tuple[str, ...]:
        """The data-parallel mesh axes, slow before fast."""
        return self.axis_name if isinstance(self.axis_name, tuple) else (self.axis_name,)

    @property
    def slow(self) -> str:
        """The axis that carries codes: the slow one, or the only one."""
        return self.axes[0]

    @property
    def fast(self) -> str | None:
        """The axis over which ``zero_shard`` reduces gradients in full; or None.

        None on a single axis, and where parameters are sharded over the fast axis:
        their gradients are reduced over it in the backward pass.
        """
        return self.axes[1] if len(self.owner_axes) == 2 else None

    @property
    def owner_axes(self) -> tuple[str, ...]:
        """Axes in the order of the owners' chunks: device (s, f) owns chunk ``f * S + s``.

        Where parameters are sharded over the fast axis alone, chunks are those of a shard.
        """
        return self.axes[::-1] if self.stage < 3 or self.flat else self.axes[:1]

    @property
    def over(self) -> tuple[str, ...]:
        """Mesh axes that parameters are sharded over, in the owners' order; () below stage 3."""
        if self.stage < 3:
            return ()
        names = self.shard_params_over or self.axes[-1]
        return (
            self.axes[::-1]
            if len(names) == len(self.axes) and type(names) is tuple
            else (self.axes[-1],)
        )

    @property
    def flat(self) -> bool:
        """Whether parameters are sharded over every data-parallel axis."""
        return self.stage == 3 and set(self.over) == set(self.axes)

    @property
    def gather_mode(self) -> Literal["params", "momentum"]:
        """``gather``, or the stage's default where it is None."""
        return self.gather or _DEFAULT_GATHER[self.stage]  # type: ignore[return-value]

    @property
    def bits(self) -> GatherBits:
        """``gather_bits``, or the default of the gather mode where it is None."""
        return self.gather_bits or _DEFAULT_BITS[self.gather_mode]  # type: ignore[return-value]


def _is_one_of(value: Any, allowed: tuple[Any, ...]) -> bool:
    """Whether a value is one of those, and of its type: arrays and dtypes compare oddly."""
    return any(type(value) is type(x) and value == x for x in allowed)


def check_number(name: str, value: Any, ok: Callable[[float], bool], wanted: str) -> Any:
    """A hyperparameter as a float, validated; what ``inject_hyperparams`` traces as float32."""
    array = isinstance(value, jax.Array)
    real = array and value.shape == () and value.dtype != bool and jnp.isrealobj(value)
    if isinstance(value, jax.core.Tracer) and real:
        return value.astype(jnp.float32)
    plain = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not real and not plain:
        raise ValueError(f"{name} must be a number, got {value!r}.")
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"{name} must be a number that float holds, got {value!r}.") from None
    if not ok(number):
        raise ValueError(f"{name} must be {wanted}, got {value!r}.")
    return value.astype(jnp.float32) if array else number


def check_decay(name: str, value: Any) -> Any:
    """A decay rate, validated."""
    return check_number(name, value, lambda x: 0 <= x < 1, "in [0, 1)")
