"""The README's claims that can be looked up in the files."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_make_target_that_is_named_exists() -> None:
    """No document names a make target that the Makefile lacks."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    documents = [ROOT / "README.md", ROOT / "CHANGELOG.md", *ROOT.glob("examples/*/README.md")]
    named = {
        target
        for path in documents
        for target in re.findall(r"\bmake ([a-z]+(?:-[a-z]+)*)\b(?=[`\s]*(?:$|[`#|;:,]|SEED| {2}))", path.read_text(), re.MULTILINE)
    }
    assert named - targets == set()
    assert {"demo", "test", "setup", "check"} <= named


def test_every_path_that_is_named_exists() -> None:
    """No document links to, or names in code, an example or tool that is not there."""
    for path in [ROOT / "README.md", *ROOT.glob("examples/*/README.md")]:
        for name in re.findall(r"(?<![\w/])(?:examples|tools)/[\w/.-]*\w", path.read_text()):
            assert (ROOT / name).exists(), f"{path.name} names {name}"


def test_the_file_tree_is_up_to_date() -> None:
    """The tree in the README has one line for each file, from the file's own first sentence."""
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "file_tree.py", "--check"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")
