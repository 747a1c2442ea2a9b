"""What is in the wheel, built as a release is: through the source distribution, from a copy of the tracked files."""

import email
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The built wheel."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    build = [sys.executable, "-W", "ignore", "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(build, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = out.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_holds_the_two_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    """The top level is the two packages and the wheel's own metadata: no tests, examples or tools."""
    assert {name.partition("/")[0] for name in wheel.namelist()} == {"rllm_trace", "rllm_trainer", "rllm_trace-0.1.0.dist-info"}


def test_the_wheel_holds_every_module(wheel: zipfile.ZipFile) -> None:
    """Each Python file of the two packages is in the wheel, and so are their typing marks."""
    expected = {str(path.relative_to(ROOT)) for package in ("rllm_trace", "rllm_trainer") for path in (ROOT / package).rglob("*.py")}
    assert (expected | {"rllm_trace/py.typed", "rllm_trainer/py.typed"}) - set(wheel.namelist()) == set()


def test_the_wheel_says_what_it_is(wheel: zipfile.ZipFile) -> None:
    """Name, licence and Python versions stand in the metadata; the command and the licence's text come along."""
    metadata = email.message_from_bytes(wheel.read("rllm_trace-0.1.0.dist-info/METADATA"))
    assert (metadata["Name"], metadata["License-Expression"], metadata["Requires-Python"]) == ("rllm-trace", "Apache-2.0", "<3.14,>=3.11")
    assert wheel.read("rllm_trace-0.1.0.dist-info/entry_points.txt").decode().split() == [
        "[console_scripts]",
        "rllm",
        "=",
        "rllm_trainer.cli:main",
    ]
    assert b"Apache License" in wheel.read("rllm_trace-0.1.0.dist-info/licenses/LICENSE")


def test_the_sdk_alone_needs_no_trainer_package(wheel: zipfile.ZipFile) -> None:
    """Without extras only the client, HTTP, spans and records are required."""
    metadata = email.message_from_bytes(wheel.read("rllm_trace-0.1.0.dist-info/METADATA"))
    plain = sorted(line.split(">")[0].split("<")[0] for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line)
    assert plain == ["httpx", "msgspec", "openai", "opentelemetry-sdk"]
