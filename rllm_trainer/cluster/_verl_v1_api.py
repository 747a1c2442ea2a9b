"""The boundary of the cluster's processes: each object of verl's trainer that is used, under its own name and without a type."""

from __future__ import annotations

from typing import Any, cast

import tensordict as _tensordict
import torch as _torch
import transfer_queue as _transfer_queue
import verl.checkpoint_engine as _checkpoint_engine
import verl.experimental.separation.engine_workers as _detached
import verl.single_controller.base.decorator as _decorator
import verl.trainer.ppo.utils as _ppo_utils
import verl.trainer.ppo.v1 as _v1
import verl.trainer.ppo.v1.replay_buffer as _replay_buffer
import verl.utils.fsdp_utils as _fsdp
import verl.utils.metric as _metric
import verl.workers.engine.fsdp.transformer_impl as _fsdp_engine
import verl.workers.engine_workers as _workers
import verl.workers.rollout.base as _rollout
import verl.workers.rollout.replica as _replica
import verl.workers.rollout.utils as _rollout_utils
import verl.workers.utils.padding as _padding
from torch.distributed.fsdp import CPUOffloadPolicy as _CPUOffloadPolicy
from verl.utils import tensordict_utils as _tensordict_utils

torch: Any = _torch
dist: Any = _torch.distributed
tq: Any = _transfer_queue
tensordict_utils: Any = _tensordict_utils

ActorRolloutRefWorker: Any = _workers.ActorRolloutRefWorker
AggregationType: Any = _metric.AggregationType
BaseRollout: Any = _rollout.BaseRollout
CPUOffloadPolicy: Any = _CPUOffloadPolicy
CheckpointEngine: Any = _checkpoint_engine.CheckpointEngine
CheckpointEngineRegistry: Any = _checkpoint_engine.CheckpointEngineRegistry
Dataset: Any = _torch.utils.data.Dataset
DetachActorWorker: Any = _detached.DetachActorWorker
Dispatch: Any = _decorator.Dispatch
KVBatchMeta: Any = _transfer_queue.KVBatchMeta
Metric: Any = _metric.Metric
PPOTrainerColocateAsync: Any = _v1.PPOTrainerColocateAsync
PPOTrainerSeparateAsync: Any = _v1.PPOTrainerSeparateAsync
PPOTrainerSync: Any = _v1.PPOTrainerSync
ReplayBuffer: Any = _replay_buffer.ReplayBuffer
ReplayBufferAsync: Any = _replay_buffer.ReplayBufferAsync
Role: Any = _ppo_utils.Role
ROLLOUT_CLASSES: Any = _rollout._ROLLOUT_REGISTRY
RolloutReplica: Any = _replica.RolloutReplica
RolloutReplicaRegistry: Any = _replica.RolloutReplicaRegistry
TensorDict: Any = _tensordict.TensorDict
fsdp_engine: Any = _fsdp_engine
ensure_async_iterator: Any = cast("Any", _rollout_utils).ensure_async_iterator
list_of_dict_to_tensordict: Any = _tensordict_utils.list_of_dict_to_tensordict
merged_lora_context: Any = cast("Any", _fsdp).merged_lora_context
no_padding_2_padding: Any = _padding.no_padding_2_padding
normalize_peft_param_name: Any = cast("Any", _fsdp).normalize_peft_param_name
offload_fsdp_model_to_cpu: Any = cast("Any", _fsdp).offload_fsdp_model_to_cpu
on_ranks: Any = cast("Any", _decorator).make_nd_compute_dataproto_dispatch_fn
register: Any = cast("Any", _decorator).register
response_to_nested: Any = _padding.response_to_nested
