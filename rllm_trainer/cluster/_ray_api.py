"""Ray, each object that is used under its own name and without a type; nothing else of this package imports it."""

from __future__ import annotations

from typing import Any

import ray as _ray
import ray._private.services as _services
import ray.cloudpickle as _cloudpickle
import ray.exceptions as _exceptions
import ray.util.scheduling_strategies as _strategies

ray: Any = _ray
cloudpickle: Any = _cloudpickle
NodeAffinity: Any = _strategies.NodeAffinitySchedulingStrategy
ActorDiedError: Any = _exceptions.ActorDiedError
RayActorError: Any = _exceptions.RayActorError
RayError: Any = _exceptions.RayError
RayTaskError: Any = _exceptions.RayTaskError
GetTimeoutError: Any = _exceptions.GetTimeoutError
canonical_address: Any = getattr(_services, "canonicalize_bootstrap_address", None)  # Ray's own reading of "auto" has no public name
