"""Installs this checkout with all that its tests and examples use, around the torch that is there.

    install_all.py [--copied] FOLDER[EXTRAS] [REQUIREMENT ...]

``--copied``: as a user has it, in site-packages, and anew each time; else editable. uv settles the set in seconds, where pip gives up on it
after minutes of trying older releases. It reads none of pip's settings, so the package index, further indexes, folders of wheels and
certificates that pip is set up with are handed on. What it installs is compiled at once: engine, server and workers are processes of their
own, and where no bytecode may be written later, each would compile torch, transformers and verl anew.
"""

import contextlib
import importlib.metadata
import os
import subprocess
import sys

DISTRIBUTION = "rllm-trace"
COPIED = "--copied"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


def main() -> int:
    """Exit status: 0, or that of the step that failed."""
    if bootstrap := subprocess.run([*PIP, "install", "--quiet", "uv>=0.8"], check=False).returncode:
        return bootstrap
    command, environment = uv_install()
    given = sys.argv[1:]
    wanted = ["--reinstall-package", DISTRIBUTION, *given[1:]] if given[0] == COPIED else ["--editable", *given]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        wanted.append(f"torch=={importlib.metadata.version('torch')}")
    return subprocess.run([*command, *wanted], env=environment, check=False).returncode


def uv_install() -> tuple[list[str], dict[str, str]]:
    """The command that installs into the running environment, with what pip is set up with; and the environment to run it in."""
    settings = pip_settings()
    command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--compile-bytecode", "--python", sys.executable]
    if index := settings.get("index-url"):
        command += ["--default-index", index]
    if further := [url for url in settings.get("extra-index-url", "").split() if url.startswith("http")]:
        command += [part for url in further for part in ("--index", url)] + ["--index-strategy", "unsafe-best-match"]
    for place in settings.get("find-links", "").split():
        command += ["--find-links", place]
    environment = dict(os.environ)
    if cert := settings.get("cert"):
        environment.setdefault("SSL_CERT_FILE", cert)
    return command, environment


def pip_settings() -> dict[str, str]:
    """pip's own settings by option name, its environment variables last, so that they win as they do with pip."""
    listed = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=True).stdout
    pairs = [line.split("=", 1) for line in listed.splitlines() if "=" in line]
    pairs.sort(key=lambda pair: pair[0].startswith(":env:"))
    return {name.rpartition(".")[2]: value.strip("'\"") for name, value in pairs}


if __name__ == "__main__":
    sys.exit(main())
