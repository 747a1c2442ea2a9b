"""``make setup`` on machines that lack what it needs."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_without_a_fitting_python_setup_says_so_in_one_line(tmp_path: Path) -> None:
    """No 3.11 or 3.12: one line that says what was tried and what to do, exit status 1, and nothing made."""
    venv = tmp_path / "venv"
    command = ["sh", str(ROOT / "tools" / "setup.sh"), str(venv)]
    done = subprocess.run(
        command, env={"PATH": "/usr/bin:/bin", "PYTHON": "no-such-python"}, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n"), venv.exists()) == (1, "", 1, False)
    assert "no Python 3.11 or 3.12 with venv found (tried: no-such-python)" in done.stderr
    assert "make PYTHON=" in done.stderr
