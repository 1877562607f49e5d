"""Checkpoints over Orbax: save, restore, and a manager of many of them.

A checkpoint is a directory in Orbax's own format (arrays in TensorStore, descriptions
in JSON; nothing in it is code). The state is saved as a flat dict from the path of an
array in the :class:`TrainState` to the array; beside it stands what restoring must
know, and a digest of each array, because TensorStore notices damage to its indices but
not to the values.
"""

import dataclasses
import os
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from onebit_zero_jax.checkpoint_content import (
    CorruptCheckpointError,
    Metadata,
    check_parameters,
    describe,
    differences_from,
    digests,
    flat,
    rebuild,
)
from onebit_zero_jax.config import ZeroConfig
from onebit_zero_jax.resize import convert, refuse_model_axes, spread
from onebit_zero_jax.resize_side import Parts
from onebit_zero_jax.shards import shard_shapes, whole_shapes
from onebit_zero_jax.state import zero_states
from onebit_zero_jax.train_state import TrainState, abstract_state

Tree = Any

_METADATA_FILE = "_CHECKPOINT_METADATA"
_UNFINISHED = ".orbax-checkpoint-tmp"


def _orbax() -> Any:
    try:
        from orbax.checkpoint import v1  # type: ignore[import-untyped]
    except ImportError as e:
        raise ImportError(
            "checkpoints need Orbax: pip install 'onebit-zero-jax[checkpoint]'."
        ) from e
    return v1


def _path(path: Any) -> Any:
    """An absolute path; also of buckets (``gs://``), which Orbax knows."""
    _orbax()
    from etils import epath  # type: ignore[import-untyped]

    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path) or "\0" in os.fspath(path):
        raise ValueError(f"path must name a directory, got {path!r}.")
    text = os.fspath(path)
    return epath.Path(text if "://" in text else os.path.abspath(text))


def _read_metadata(path: Any) -> Metadata:
    if _UNFINISHED in path.name:
        raise ValueError(f"{path} is a checkpoint that was never finished; it cannot be restored.")
    if not path.is_dir():
        raise FileNotFoundError(f"there is no checkpoint at {path}.")
    try:
        found = _orbax().metadata(path).custom_metadata
    except Exception as e:  # Whatever the layers below raise, the files are at fault.
        raise _corrupt(path, e) from e
    return Metadata.from_json(found, str(path / _METADATA_FILE))


def _corrupt(path: Any, what: str | BaseException) -> CorruptCheckpointError:
    """Names the array or file, and where values are: the layers below name one or the other."""
    if isinstance(what, BaseException):
        inner = what
        while inner.__cause__ or inner.__context__:
            inner = inner.__cause__ or inner.__context__ or inner
        what = f"it cannot be read: {str(inner).splitlines()[0][:400]}"
    # Each process writes values to files of its own; the rest is index.
    files = sorted(str(f) for f in path.glob("state/ocdbt.process_*/d/*"))
    return CorruptCheckpointError(
        f"{path} is damaged: {what}. Its values are in {', '.join(files[:8]) or 'no file at all'}"
        f"{' and others' if len(files) > 8 else ''}; restore an older checkpoint."
    )


def _read_arrays(
    path: Any, metadata: Metadata, shardings: dict[str, NamedSharding]
) -> dict[str, jax.Array]:
    """All arrays, each compared with its digest."""
    targets = {
        name: jax.ShapeDtypeStruct(a.shape, jnp.dtype(a.dtype), sharding=shardings[name])
        for name, a in metadata.arrays.items()
    }
    stored = {name: t for name, t in targets.items() if np.prod(t.shape)}
    try:
        arrays = _orbax().load(path, stored)
    except Exception as e:  # As above.
        raise _corrupt(path, e) from e
    for name, t in targets.items():
        if name not in stored:
            arrays[name] = jax.device_put(np.zeros(t.shape, t.dtype), t.sharding)
    wrong = [n for n, d in digests(arrays).items() if d != metadata.arrays[n].digest]
    if wrong:
        names = ", ".join(wrong[:4]) + (" and others" if len(wrong) > 4 else "")
        raise _corrupt(path, f"{names} came back with other values than were saved")
    return arrays


# ---------------------------------------------------------------- public


def save(path: Any, state: TrainState, *, data_position: Any = None) -> None:
    """Saves a state, and returns when it is complete.

    Everything is in it: parameters, master parameters, moments, worker and server errors,
    local momenta, counters, the schedule of refreshes, and where the data stood. In a
    multi-process run every process calls it with the same path on a file system that
    all share; each writes its own part.

    Args:
      path: directory to make. It appears under this name only when it is complete.
      state: from :func:`init`, a train step, :func:`resize` or :func:`restore`.
      data_position: anything JSON holds, such as ``{"epoch": 3, "example": 4096}``.

    Raises:
      ValueError: the path exists; not a state; ``data_position`` is not JSON.
      ImportError: the extra ``checkpoint`` is not installed.

    Example:
      >>> import tempfile
      >>> from onebit_zero_jax import init, onebit_adam
      >>> mesh, zero = jax.make_mesh((1,), ("data",)), ZeroConfig()
      >>> tx, params = onebit_adam(0.1, zero=zero), {"w": jnp.ones((16, 16))}
      >>> with tempfile.TemporaryDirectory() as d:
      ...     save(d + "/first", init(params, tx, mesh, zero), data_position={"epoch": 2})
      ...     state, position = restore(d + "/first", params, tx, mesh, zero)
      >>> position, state.params["w"].shape
      ({'epoch': 2}, (16, 16))
    """
    where = _path(path)
    arrays, metadata = describe(state, data_position)
    if where.exists():
        raise ValueError(f"{where} exists: choose another path, a checkpoint is never overwritten.")
    _orbax().save(where, arrays, custom_metadata=metadata)


def restore(
    path: Any,
    params: Tree,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    zero: ZeroConfig,
    model_state: Tree = None,
    *,
    resize: bool = False,
) -> tuple[TrainState, Any]:
    """Reads a state; on the same mesh the run goes on bit for bit as if it had not stopped.

    Every array is compared with the digest that was saved with it. Nothing in a checkpoint
    is executed.

    Args:
      path: directory that :func:`save` or :class:`CheckpointManager` wrote.
      params: the parameters' tree; shapes (``jax.eval_shape``) are enough.
      tx: the optimizer, built as for the run that was saved.
      mesh: where the state is to live.
      zero: the configuration ``tx`` was built with.
      model_state: shapes of it, if the run had one.
      resize: convert what was saved on another mesh, with another ``zero`` or another
        schedule of dense steps, see :func:`resize`; without it, that raises.

    Returns:
      ``(state, data_position)``.

    Raises:
      FileNotFoundError: nothing there.
      CorruptCheckpointError: a file is damaged or gone; it is named.
      ValueError: parameters, optimizer, mesh, ``zero`` or schedule differ from those
        that were saved; the message names both values.
      ImportError: the extra ``checkpoint`` is not installed.

    Example: see :func:`save`.
    """
    where = _path(path)
    params, model_state = jax.tree.map(
        lambda x: x if hasattr(x, "dtype") else np.asarray(x), (params, model_state)
    )
    target = abstract_state(params, tx, mesh, zero, model_state)
    metadata = _read_metadata(where)
    before = Parts.of(metadata.axes, metadata.zero)
    phases = [s.run.phases for s in zero_states(target.opt_state)]
    differences = differences_from(metadata, mesh, zero, phases)
    if differences and not resize:
        raise ValueError(
            f"{where} does not fit: {'; '.join(differences)}. Use what it was saved with, or pass "
            "resize=True to convert it."
        )
    moved = before != Parts.of(mesh.shape, zero) or metadata.zero != zero
    check_parameters(metadata, target.params, zero, before, where)
    if moved:
        refuse_model_axes(target.params, zero)
    wanted = flat(target)
    if not moved:
        for name, x in wanted.items():
            saved = metadata.arrays.get(name)
            if saved is not None and (saved.shape, saved.dtype) != (x.shape, x.dtype.name):
                raise ValueError(
                    f"{name} was saved as {saved.dtype} of shape {saved.shape}, tx asks for "
                    f"{x.dtype.name} of shape {x.shape}: pass the optimizer of the saved run."
                )
    saved_params = shard_shapes(
        whole_shapes(target.params), before.mesh(metadata.zero), metadata.zero
    )
    saved_form = dataclasses.replace(target, params=saved_params)
    # Structure first: what does not fit is named before anything is read.
    rebuild(dict(metadata.arrays), metadata, saved_form)
    shardings = {
        name: spread(a.shape, mesh) if moved else wanted[name].sharding
        for name, a in metadata.arrays.items()
    }
    state = rebuild(_read_arrays(where, metadata, shardings), metadata, saved_form)
    if moved:
        state = convert(state, metadata.zero, before, tx, mesh, zero)
    # With the schedule of tx, which resize=True may have changed.
    state = jax.tree.unflatten(jax.tree.structure(target), jax.tree.leaves(state))
    return state, metadata.data_position


class CheckpointManager:
    """Checkpoints of a run in one directory, each under its step; the newest are kept.

    Saving is asynchronous: the state is copied to host memory, then written in the
    background while training goes on. A checkpoint appears under its step only when it
    is complete; what a crash left half-written is never seen, and removed.

    Args:
      directory: made if it does not exist; shared by all processes.
      keep: how many of the newest checkpoints stay.

    Raises:
      ValueError: ``keep`` below 1.
      ImportError: the extra ``checkpoint`` is not installed.

    Example:
      >>> import tempfile
      >>> from onebit_zero_jax import init, onebit_adam
      >>> mesh, zero = jax.make_mesh((1,), ("data",)), ZeroConfig()
      >>> tx, params = onebit_adam(0.1, zero=zero), {"w": jnp.ones((16, 16))}
      >>> with tempfile.TemporaryDirectory() as d, CheckpointManager(d, keep=2) as manager:
      ...     manager.save(init(params, tx, mesh, zero), data_position=0)
      ...     manager.wait()
      ...     manager.latest_step(), manager.restore(params, tx, mesh, zero)[1]
      (0, 0)
    """

    def __init__(self, directory: Any, *, keep: int = 3) -> None:
        """Opens the directory."""
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise ValueError(f"keep must be an integer of at least 1, got {keep!r}.")
        training = _orbax().training
        self._directory = _path(directory)
        self._checkpointer = training.Checkpointer(
            self._directory,
            preservation_policy=training.preservation_policies.LatestN(keep),
            cleanup_tmp_directories=True,
        )
        self._saving: int | None = None

    def save(self, state: TrainState, *, data_position: Any = None) -> None:
        """Starts saving ``state`` under ``state.step``; waits for a save still under way.

        The state may be donated to the next step at once. A failure to write is raised by
        the next :meth:`save`, :meth:`wait` or :meth:`close`.
        """
        arrays, metadata = describe(state, data_position)
        step = int(state.step)
        self._checkpointer.save_async(step, arrays, custom_metadata=metadata, force=True)
        self._saving = step

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        # Orbax lists what it is still writing.
        writing = self._saving if self._checkpointer.is_saving_in_progress() else None
        return [c.step for c in self._checkpointer.checkpoints if c.step != writing]

    def latest_step(self) -> int | None:
        """Step of the newest complete checkpoint, or None."""
        return max(self.steps(), default=None)

    def restore(
        self,
        params: Tree,
        tx: optax.GradientTransformation,
        mesh: Mesh,
        zero: ZeroConfig,
        model_state: Tree = None,
        *,
        step: int | None = None,
        resize: bool = False,
    ) -> tuple[TrainState, Any]:
        """:func:`restore` of the newest complete checkpoint, or of that of ``step``."""
        known = self.steps()
        if not known or (step is not None and step not in known):
            raise FileNotFoundError(
                f"{self._directory} holds no complete checkpoint"
                f"{f' of step {step}; there are {known}' if step is not None else ''}."
            )
        where = self._directory / str(known[-1] if step is None else step)
        return restore(where, params, tx, mesh, zero, model_state, resize=resize)

    def wait(self) -> None:
        """Waits until everything is written; raises what went wrong meanwhile."""
        self._checkpointer.wait()

    def close(self) -> None:
        """Waits, then lets go of the directory."""
        self._checkpointer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()
