"""Eight emulated devices, for all tests; set before JAX starts its backend."""

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture(scope="module")
def few_optimizations():
    """XLA with few optimizations: half the time to compile."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def strict_types():
    """No dtype or rank is promoted in silence."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield
