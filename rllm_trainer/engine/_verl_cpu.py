"""verl's platform plug-in for machines without an accelerator: loaded by verl itself where ``VERL_USE_EXTERNAL_MODULES`` names it.

verl 0.9.1 ships platforms for CUDA, ROCm and NPU. This one answers the same questions for the CPU. It is registered, never detected:
only ``VERL_PLATFORM=cpu`` selects it, which our worker sets in its own process, so it is inert everywhere else. The process group
(gloo) is made by the worker before verl looks for one, and the engine class is registered in ``_verl_engine.py``; nothing is patched.
"""

from __future__ import annotations

import contextlib
import os
import resource
import types
from typing import Any

import torch as _torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

__all__ = ["CpuPlatform"]

torch: Any = _torch


class _DeviceModule(types.ModuleType):
    """``torch.cpu`` with the calls of ``torch.cuda`` that verl makes through ``get_torch_device()``."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(torch.cpu, name)

    def is_available(self) -> bool:
        """Callers ask it whether there is an accelerator."""
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> Any:
        return torch.device("cpu")

    def set_device(self, device: object) -> None: ...

    def synchronize(self, device: object = None) -> None: ...

    def empty_cache(self) -> None: ...

    def ipc_collect(self) -> None: ...

    def memory_allocated(self, device: object = None) -> int:
        """Peak resident memory of the process, bytes."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    memory_reserved = memory_allocated
    max_memory_allocated = memory_allocated
    max_memory_reserved = memory_allocated

    def mem_get_info(self, device: object = None) -> tuple[int, int]:
        """Free and total memory of the machine, bytes."""
        page = os.sysconf("SC_PAGE_SIZE")
        return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page

    def get_rng_state(self, device: object = None) -> Any:
        return torch.get_rng_state()

    def set_rng_state(self, state: Any, device: object = None) -> None:
        torch.set_rng_state(state)

    def get_device_name(self, device: object = None) -> str:
        return "cpu"


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """The CPU as a verl platform; one device, gloo, no profiler."""

    _module = _DeviceModule("rllm_cpu_device")

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> types.ModuleType:
        return self._module

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Never detected: on a GPU cluster a process without a GPU must not become a CPU trainer by itself."""
        return False

    def current_device(self) -> Any:
        """verl only uses it as a target of ``.to()``."""
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str) -> Any:
        return contextlib.nullcontext()

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None
