"""Runs the SDK's tests with every release of what it stands on that it is said to work with: `python tools/versions.py [NAME ...]`

Each row of the table is an environment of its own under `.venv-versions/`, installed as a user would install it and kept for the next time
(`--again` makes it anew). A Python that is not on this machine is named; Python 3.11 must be. A row that cannot be installed has failed.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".venv-versions"
ALWAYS = "3.11"
"""The Python that must be there."""
TOOLS = ("pytest>=8.3", "pytest-timeout>=2.3", "pytest-xdist>=3.6", "hypothesis>=6.100", "numpy>=2.0")
TESTS = ("tests/trace/core", "tests/trace/test_routing.py", "tests/trace/test_testing.py")
"""And every `tests/trace/test_client_*.py`."""
LIMIT = 900
"""Seconds for the tests of one row."""


class Row(NamedTuple):
    """One environment."""

    name: str
    python: str
    wanted: tuple[str, ...]
    """Requirements besides this project; what they leave open is the newest there is."""


ROWS = (
    Row(
        "oldest",
        "3.11",
        (
            "openai==1.40.0",
            "httpx==0.27.0",  # openai 1.40 hands httpx an option that 0.28 has dropped
            "opentelemetry-sdk==1.30.0",
            "opentelemetry-exporter-otlp-proto-http==1.30.0",
            "opentelemetry-exporter-otlp-proto-grpc==1.30.0",
            "msgspec==0.19.0",
        ),
    ),
    Row("openai-1", "3.11", ("openai==1.109.1",)),
    Row("openai-2", "3.12", ("openai[aiohttp]>=2,<3",)),
    Row("openai-3", "3.13", ("openai[aiohttp]>=3,<4",)),
    Row("newest-on-3.11", "3.11", ("openai[aiohttp]",)),
)


def main() -> int:
    """Exit status: 1 if a row has failed."""
    parser = argparse.ArgumentParser(description="Runs the SDK's tests with every release that it is said to work with.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"rows to run, of {', '.join(row.name for row in ROWS)}; none: all")
    parser.add_argument("--again", action="store_true", help="make the environments anew")
    parser.add_argument("--workers", default="2", help="processes that run the tests of a row")
    asked = parser.parse_args()
    if unknown := sorted(set(asked.names) - {row.name for row in ROWS}):
        parser.error(f"got {', '.join(unknown)}; the rows are {', '.join(row.name for row in ROWS)}")
    told = [(row, *run(row, asked)) for row in ROWS if not asked.names or row.name in asked.names]
    print()
    for row, outcome, found in told:
        print(f"{row.name:16} Python {row.python:5} {outcome:34} {found}")
    return int(any(outcome.startswith("FAILED") for _, outcome, _ in told))


def run(row: Row, asked: argparse.Namespace) -> tuple[str, str]:
    """What became of a row, and the releases that it was run with."""
    interpreter = python_of(row.python)
    if interpreter is None:
        missing = f"Python {row.python} is not on this machine"
        return (f"FAILED: {missing}" if row.python == ALWAYS else f"left out: {missing}"), ""
    print(f"== {row.name}: Python {row.python}, {', '.join(row.wanted)}", flush=True)
    python = FOLDER / row.name / "bin" / "python"
    if not installed(row, python, interpreter, again=asked.again):
        return "FAILED: cannot be installed", ""
    started = time.monotonic()
    tests = [*TESTS, *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests/trace").glob("test_client_*.py"))]
    command = [str(python), "-m", "pytest", "-q", "-n", asked.workers, "--dist", "loadfile", *tests]
    try:
        ended = subprocess.run(command, cwd=ROOT, check=False, timeout=LIMIT).returncode
    except subprocess.TimeoutExpired:
        return f"FAILED: longer than {LIMIT} s", releases(python)
    return ("passed" if ended == 0 else "FAILED") + f" in {time.monotonic() - started:.0f} s", releases(python)


def python_of(version: str) -> str | None:
    """An interpreter of this version, if there is one that can make environments."""
    places = [*os.environ.get("PATH", "").split(os.pathsep)]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    places += [str(found / "bin") for found in sorted(pyenv.glob(f"{version}.*"))]
    candidates = [sys.executable, *(found for place in places if (found := shutil.which(f"python{version}", path=place)))]
    check = f"import sys, ssl, venv, ensurepip; sys.exit(sys.version_info[:2] != ({version.replace('.', ', ')}))"
    return next(
        (found for found in candidates if subprocess.run([found, "-c", check], capture_output=True, check=False).returncode == 0), None
    )


def installed(row: Row, python: Path, interpreter: str, *, again: bool) -> bool:
    """Whether the environment is there, made now if it was not, or is of another table."""
    mark = FOLDER / row.name / ".done"
    content = "\n".join((row.python, *row.wanted, *TOOLS, (ROOT / "pyproject.toml").read_text()))
    if not again and mark.is_file() and mark.read_text() == content:
        return True
    shutil.rmtree(FOLDER / row.name, ignore_errors=True)
    made = subprocess.run([interpreter, "-m", "venv", str(FOLDER / row.name)], check=False).returncode == 0
    install = [str(python), str(ROOT / "tools/install_all.py"), f"{ROOT}[otlp,store]", *row.wanted, *TOOLS]
    if not made or subprocess.run(install, check=False).returncode != 0:
        return False
    mark.write_text(content)
    return True


def releases(python: Path) -> str:
    """Of what matters here."""
    names = ("openai", "httpx", "httpx2", "opentelemetry-sdk", "msgspec")
    code = f"import importlib.metadata as m; print(*(d.name + ' ' + d.version for d in m.distributions() if d.name in {names!r}), sep=', ')"
    return subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
