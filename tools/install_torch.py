"""Installs torch into the running environment: a CPU build where pip finds one, else what there is, its size said first.

``RLLM_TORCH_INDEX`` names a package index to take it from.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
from pathlib import Path
from typing import Any

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
TIMEOUT = 20.0
"""Seconds for one question about a size."""


def main() -> int:
    """Exit status: 0, or pip's own."""
    extras = tomllib.loads(Path(sys.argv[1]).read_text())["project"]["optional-dependencies"]["trainer"]
    wanted = next(requirement for requirement in extras if re.match(r"torch\W", requirement))
    index = os.environ.get("RLLM_TORCH_INDEX")
    source = ["--index-url", index] if index else []
    wanted = cpu_build(wanted, source) or wanted
    say_size(wanted, source)
    return subprocess.run([*PIP, "install", "--quiet", *source, wanted], check=False).returncode


def cpu_build(wanted: str, source: list[str]) -> str | None:
    """The newest fitting version that is marked ``+cpu``, as a requirement; None where pip lists none."""
    from pip._vendor.packaging.requirements import Requirement
    from pip._vendor.packaging.version import Version

    listed = subprocess.run([*PIP, "index", "versions", *source, "torch"], capture_output=True, text=True, check=False).stdout
    marked = [Version(text) for text in re.findall(r"[0-9][\w.]*\+cpu\b", listed)]
    fitting = [version for version in marked if Requirement(wanted).specifier.contains(version)]
    return f"torch=={max(fitting)}" if fitting else None


def say_size(wanted: str, source: list[str]) -> None:
    """One line where what pip would fetch is a CUDA build."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        subprocess.run([*PIP, "install", "--quiet", "--dry-run", "--report", str(report), *source, wanted], check=False)
        packages: list[dict[str, Any]] = json.loads(report.read_text())["install"] if report.exists() else []
    if any(package["metadata"]["name"].startswith(("nvidia-", "cuda-")) for package in packages):
        size = sum(size_of(package["download_info"]["url"]) for package in packages)
        print(f"pip finds only a CUDA build of torch: {size / 1e9:.1f} GB to fetch; RLLM_TORCH_INDEX may name an index with a CPU build")


def size_of(url: str) -> int:
    """Bytes of a file to download; 0 where its server does not say."""
    with (
        contextlib.suppress(OSError, ValueError),
        urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=TIMEOUT) as head,
    ):
        return int(head.headers.get("content-length", 0))
    return 0


if __name__ == "__main__":
    sys.exit(main())
