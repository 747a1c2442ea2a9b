"""The CPU time of ``import rllm_trace``, on the built wheel: ``python benchmarks/import_time.py``. Exit status 1 above 150 ms.

``--json`` prints the median alone as one last line, ``--quick`` measures twice.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT_MS = 150.0
RUNS = 15

PROGRAM = """
import sys, time
sys.path.insert(0, sys.argv[1])
start = time.process_time()
import rllm_trace
print((time.process_time() - start) * 1000)
assert rllm_trace.__file__.startswith(sys.argv[1]), rllm_trace.__file__
"""


def main(options: list[str]) -> int:
    """Measure, print the median and the best, and compare with the limit."""
    runs = 2 if "--quick" in options else RUNS
    with tempfile.TemporaryDirectory() as folder:
        build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, str(ROOT)]
        subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
        (wheel,) = Path(folder).glob("*.whl")
        installed = Path(folder, "site")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(installed)
        # As an installed package is used: compiled once, imported from the compiled files afterwards.
        compiled = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
        command = [sys.executable, "-c", PROGRAM, str(installed)]
        times = [
            float(subprocess.run(command, check=True, capture_output=True, text=True, cwd=folder, env=compiled).stdout)
            for _ in range(runs + 1)
        ][1:]
    print(f"import rllm_trace: {statistics.median(times):.0f} ms of CPU (median of {runs}; best {min(times):.0f}), limit {LIMIT_MS:.0f}")
    if "--json" in options:
        print(json.dumps(round(statistics.median(times), 1)))
        return 0
    return int(statistics.median(times) > LIMIT_MS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
