"""The boundary of the engine's process: each object of torch and verl that it uses, under its own name and without a type.

Both are untyped in the places that matter here; what crosses from here into the rest of the package is arrays and plain values.
"""

from __future__ import annotations

from typing import Any, cast

import torch as _torch
import torch.distributed.tensor as _dtensor
import verl.trainer.config as _trainer_config
import verl.trainer.config.algorithm as _algorithm
import verl.trainer.ppo.rollout_corr_helper as _correction
import verl.utils.device as _device
import verl.utils.model as _model
import verl.utils.torch_dtypes as _dtypes
import verl.utils.torch_functional as _functional
import verl.workers.config as _config
import verl.workers.config.actor as _actor
import verl.workers.engine.base as _engine_base
import verl.workers.engine.fsdp.transformer_impl as _fsdp
import verl.workers.engine_workers_tinker as _tinker
from verl.trainer.ppo import core_algos as _core_algos
from verl.utils import tensordict_utils as _tensordict_utils
from verl.workers.utils import losses as _losses

torch: Any = _torch
DTensor: Any = _dtensor.DTensor
distribute_tensor: Any = _dtensor.distribute_tensor

core_algos: Any = _core_algos
rollout_corr_helper: Any = _correction
sft_loss: Any = cast("Any", _losses).sft_loss
tensordict_utils: Any = _tensordict_utils
torch_functional: Any = _functional
convert_weight_keys: Any = _model.convert_weight_keys
get_device_id: Any = _device.get_device_id
get_device_name: Any = _device.get_device_name

AlgoConfig: Any = _algorithm.AlgoConfig
CheckpointConfig: Any = _trainer_config.CheckpointConfig
EngineRegistry: Any = _engine_base.EngineRegistry
FSDPActorConfig: Any = _config.FSDPActorConfig
FSDPEngineConfig: Any = _config.FSDPEngineConfig
FSDPEngineWithLMHead: Any = _fsdp.FSDPEngineWithLMHead
FSDPOptimizerConfig: Any = _config.FSDPOptimizerConfig
HFModelConfig: Any = _config.HFModelConfig
PolicyLossConfig: Any = _actor.PolicyLossConfig
PrecisionType: Any = _dtypes.PrecisionType
RolloutCorrectionConfig: Any = _algorithm.RolloutCorrectionConfig
TinkerTrainingWorker: Any = _tinker.TinkerTrainingWorker
TrainingWorkerConfig: Any = _config.TrainingWorkerConfig
