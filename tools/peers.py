"""Runs tests/peers beside each library that also instruments the OpenAI client, and tests/frameworks with agent frameworks.

    peers.py FOLDER [NAME ...]

Environments are made in ``FOLDER``, one for each name of the tables, and kept; this checkout is installed into them as a user has it, not
as an editable one. What cannot be installed fails, and so does what fails its tests; the others are run all the same.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PEERS = {
    "logfire": ["logfire>=5,<6"],
    "openinference": ["openinference-instrumentation-openai>=0.1.66,<0.2"],
    # The instrumentation asks for any opentelemetry-util-genai from 0.4b0 on, and cannot be imported with 1.x.
    "opentelemetry": ["opentelemetry-instrumentation-openai-v2==2.4b0", "opentelemetry-util-genai==0.4b0"],
    "openllmetry": ["opentelemetry-instrumentation-openai>=0.62,<0.63"],
    "langfuse": ["langfuse>=5,<6"],
    "strands": ["strands-agents[openai]>=1.60,<2"],
}
FRAMEWORKS = {
    "langgraph": ["langgraph>=1.2,<2", "langchain-openai>=1.7,<2"],
    "openai-agents": ["openai-agents>=0.24,<0.25"],
}
"""Those that the main environment does not have: SmolAgents and Strands are tested there."""
ALL = PEERS | FRAMEWORKS
TOOLS = ["pytest", "pytest-timeout"]
WORKERS = 2
LIMIT = 580
"""Seconds for the tests of one of them."""


def main() -> int:
    """Exit status: 0 if every environment was made and passed."""
    folder, names = Path(sys.argv[1]).absolute(), sys.argv[2:] or list(ALL)
    if unknown := [name for name in names if name not in ALL]:
        print(f"no such peer: {', '.join(unknown)}; there are {', '.join(ALL)}", file=sys.stderr)
        return 2
    ready = [name for name in names if made(folder / name, name)]
    with ThreadPoolExecutor(WORKERS) as workers:
        passed = [name for name, well in zip(ready, workers.map(lambda name: passes(folder / name, name), ready), strict=True) if well]
    failed = [name for name in names if name not in passed]
    print(f"{', '.join(names)}: " + (f"failed: {', '.join(failed)}" if failed else "all passed"))
    return 1 if failed else 0


def made(environment: Path, name: str) -> bool:
    """Whether the environment is there, with what the table says and this checkout in it."""
    python = environment / "bin" / "python"
    if not python.exists():
        command = [sys.executable, "-m", "uv", "venv", "--quiet", "--clear", "--seed", "--python", sys.executable, str(environment)]
        if subprocess.run(command, check=False).returncode:
            return False
    install = [str(python), str(ROOT / "tools" / "install_all.py"), "--copied", str(ROOT), *ALL[name], *TOOLS]
    return subprocess.run(install, check=False).returncode == 0


def passes(environment: Path, name: str) -> bool:
    """Whether its tests pass. They run from outside the checkout, so that what is installed is what is tested."""
    files = Path("peers") if name in PEERS else Path("frameworks") / f"test_{name.replace('-', '_')}.py"
    tests = [str(environment / "bin" / "pytest"), "-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT), str(ROOT / "tests" / files)]
    variables = {**os.environ, "RLLM_TEST_PEER": name}
    try:
        done = subprocess.run(tests, env=variables, cwd=environment, timeout=LIMIT, check=False, capture_output=True, text=True)
    except subprocess.TimeoutExpired:
        print(f"== {name}: more than {LIMIT} s", flush=True)
        return False
    print(f"== {name}\n{done.stdout}{done.stderr}", flush=True)
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
