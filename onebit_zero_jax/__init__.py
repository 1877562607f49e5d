"""ZeRO-sharded training in JAX with about one bit per parameter on the slow links."""

from onebit_zero_jax.adam import onebit_adam as onebit_adam
from onebit_zero_jax.adam import onebit_adamw as onebit_adamw
from onebit_zero_jax.checkpoint import CheckpointManager as CheckpointManager
from onebit_zero_jax.checkpoint import restore as restore
from onebit_zero_jax.checkpoint import save as save
from onebit_zero_jax.checkpoint_content import CorruptCheckpointError as CorruptCheckpointError
from onebit_zero_jax.clip import clip_by_global_norm as clip_by_global_norm
from onebit_zero_jax.clip import global_norm as global_norm
from onebit_zero_jax.collectives import compressed_all_gather as compressed_all_gather
from onebit_zero_jax.collectives import compressed_all_reduce as compressed_all_reduce
from onebit_zero_jax.collectives import compressed_reduce_scatter as compressed_reduce_scatter
from onebit_zero_jax.config import ZeroConfig as ZeroConfig
from onebit_zero_jax.from_adam import from_adam_state as from_adam_state
from onebit_zero_jax.lamb import onebit_lamb as onebit_lamb
from onebit_zero_jax.layers import layer as layer
from onebit_zero_jax.lion import onebit_lion as onebit_lion
from onebit_zero_jax.plan import Plan as Plan
from onebit_zero_jax.plan import plan as plan
from onebit_zero_jax.report import WireReport as WireReport
from onebit_zero_jax.report import assert_compressed as assert_compressed
from onebit_zero_jax.report import wire_report as wire_report
from onebit_zero_jax.resize import resize as resize
from onebit_zero_jax.sgdm import onebit_sgdm as onebit_sgdm
from onebit_zero_jax.shard import zero_shard as zero_shard
from onebit_zero_jax.shards import shard_params as shard_params
from onebit_zero_jax.skips import SkipLimit as SkipLimit
from onebit_zero_jax.state import ZeroState as ZeroState
from onebit_zero_jax.sync import assert_in_sync as assert_in_sync
from onebit_zero_jax.train import eval_step as eval_step
from onebit_zero_jax.train import train_step as train_step
from onebit_zero_jax.train_state import TrainState as TrainState
from onebit_zero_jax.train_state import abstract_state as abstract_state
from onebit_zero_jax.train_state import full_params as full_params
from onebit_zero_jax.train_state import init as init
from onebit_zero_jax.train_state import shard_batch as shard_batch
from onebit_zero_jax.train_state import state_shardings as state_shardings

__version__ = "0.1.0"
