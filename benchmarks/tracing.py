"""What recording costs an app, beside the bare client and beside other people's instrumentations.

    python benchmarks/tracing.py [--json] [--readme] [--quick] [--only KEY ...] [--peers [NAME ...]]

Each ratio is the median of interleaved blocks against the bare client on the same answers, both in one process and on one core, the
server in another process; ``A/A`` is the bare client against itself. The time is wall time of the app: what its user waits, a
recorder's own threads in the way included. Beside it stands the CPU of the whole process, ours until everything has left it.
Ours runs with ``collect()``, a store and OTLP in batches to a sink, content on; messages are prose whose ids they are.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from capture_cost.peers import python_of, versions_of
from capture_cost.prose import tokenizer_file
from capture_cost.server import serving
from capture_cost.subjects import PEERS
from capture_cost.table import filled
from capture_cost.volumes import VOLUMES

HERE: Final = Path(__file__).parent
GOALS: Final[dict[str, str]] = {
    "small_ratio": "< 1.06",
    "ids_2k256_ratio": "< 0.8",
    "ids_8k2k_ratio": "< 0.45",
    "ids_8k2k_over_plain": "",
    "stream_ratio": "< 1.05",
    "stream_ids_ratio": "< 1.0",
    "async_32_ratio": "> 1.25",
    "kept_bytes_2k256": "< 12000 / < 24000",
    "disk_bytes_2k256": "< 12000",
    "records_per_s": "> 1500",
    "idle_us": "< 2",
    "chat50_tokens": "1.0",
    "gateway_cpu_ms": "< 1.5",
    "gateway_stream_ratio": "< 1.3",
    "import_ms": "< 150",
}
"""Every key of the last line of ``--json``, and what it is to be."""
_ROW_OF: Final = {
    "small_ratio": "small",
    "ids_2k256_ratio": "ids_2k256",
    "ids_8k2k_ratio": "ids_8k2k",
    "ids_8k2k_over_plain": "ids_8k2k",
    "stream_ratio": "stream",
    "stream_ids_ratio": "stream_ids",
    "async_32_ratio": "async_32",
}
_BLOCKS: Final = 15
_WALL, _PROCESS = 0, 2

Blocks = dict[str, list[list[float]]]


def environ() -> dict[str, str]:
    """The parts and the package can be imported, also where neither is installed."""
    return {**os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parent}"}


def blocks(python: Path | str, subject: str, row: str, server: str, asked: argparse.Namespace) -> Blocks:
    """What ``capture_cost.blocks`` prints."""
    settings = {"subject": subject, "row": row, "server": server, "blocks": 1 if asked.quick else asked.blocks, "runs": int(asked.quick)}
    return _last_line([str(python), "-m", "capture_cost.blocks", json.dumps(settings)])


def _last_line(command: Sequence[str]) -> Any:
    done = subprocess.run(command, env=environ(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3_000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def middle(found: Blocks, variant: str, clock: int) -> float:
    """Milliseconds a call: the median block."""
    return statistics.median(times[clock] for times in found[variant]) * 1_000


def ratio(key: str, found: Blocks, variant: str = "recorded", clock: int = _WALL) -> float:
    """As the key has it: time ÷ time of the bare client, or the throughput ÷ its throughput."""
    base = middle(found, "plain" if key == "ids_8k2k_over_plain" else "bare", clock)
    return base / middle(found, variant, clock) if key == "async_32_ratio" else middle(found, variant, clock) / base


def told(key: str, found: Blocks) -> str:
    """One line of the table of ratios."""
    bare, recorded = middle(found, "bare", _WALL), middle(found, "recorded", _WALL)
    return (
        f"{ratio(key, found):7.3f}   A/A {ratio(key, found, 'again'):6.3f}   CPU {ratio(key, found, clock=_PROCESS):6.3f}   "
        f"bare {bare * 1e3:8.0f} us, recorded {recorded * 1e3:8.0f} us a call"
    )


def measured_rows(keys: Sequence[str], server: str, asked: argparse.Namespace) -> dict[str, float]:
    """Ours, by key."""
    found: dict[str, Blocks] = {}
    for key in keys:
        row = _ROW_OF[key]
        if row not in found:
            found[row] = blocks(sys.executable, "ours", row, server, asked)
        print(f"{key:22} {told(key, found[row])}", flush=True)
    return {key: round(ratio(key, found[_ROW_OF[key]]), 4) for key in keys}


def measured_peers(names: Sequence[str], keys: Sequence[str], server: str, asked: argparse.Namespace) -> None:
    """The same for each peer."""
    for name in names:
        python = python_of(name, asked.environments)
        print(f"{name} ({versions_of(python, name)})")
        for key in keys:
            print(f"  {key:20} {told(key, blocks(python, name, _ROW_OF[key], server, asked))}", flush=True)


def measured_volumes(keys: Sequence[str], tokenizer: Path, server: str, asked: argparse.Namespace) -> dict[str, Any]:
    """Memory, disk, rates."""
    found: dict[str, Any] = {}
    for key in keys:
        count = (40 if key == "disk_bytes_2k256" else 20) if asked.quick else 0
        found[key] = _last_line([sys.executable, "-m", "capture_cost.volumes", key, str(tokenizer), server, str(count)])
        print(f"{key:22} {json.dumps(found[key])}", flush=True)
    return found


def gateway_numbers(asked: argparse.Namespace) -> dict[str, float]:
    """What ``benchmarks/gateway.py`` prints."""
    command = [sys.executable, str(HERE / "gateway.py"), "--json"]
    return _last_line([*command, "--blocks", "1", "--calls", "8"] if asked.quick else command)


def import_ms(asked: argparse.Namespace) -> dict[str, float]:
    """What ``benchmarks/import_time.py`` measures, on this source tree."""
    return {"import_ms": _last_line([sys.executable, str(HERE / "import_time.py"), "--json", *(["--quick"] if asked.quick else [])])}


def machine() -> str:
    """Cores, processor and Python."""
    name = next((line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "unknown processor")
    return f"{os.cpu_count()} cores, {name}, Python {sys.version.split()[0]}"


def _lines(path: str) -> list[str]:
    return Path(path).read_text(encoding="utf-8").splitlines() if Path(path).exists() else []


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the figures as one last line of JSON")
    parser.add_argument("--readme", action="store_true", help="put the figures into the README's table, and say where a goal is missed")
    parser.add_argument("--quick", action="store_true", help="a few calls each: shows that everything runs; no times to go by")
    parser.add_argument("--only", nargs="+", choices=list(GOALS), metavar="KEY", default=list(GOALS), help=f"some of {', '.join(GOALS)}")
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), metavar="NAME", help=f"also {', '.join(PEERS)}, or some of them")
    parser.add_argument("--blocks", type=int, default=_BLOCKS, help="blocks of each variant")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json; without it that of the embedded model")
    parser.add_argument("--environments", type=Path, default=HERE.parent / ".venv-peers", help="where the peers are installed")
    return parser.parse_args()


def main() -> None:
    asked = arguments()
    tokenizer = asked.tokenizer or tokenizer_file()
    wanted: Callable[[Any], list[str]] = lambda keys: [key for key in GOALS if key in keys and key in asked.only]  # noqa: E731
    print(machine())
    numbers: dict[str, Any] = {}
    with serving(tokenizer) as server:
        numbers |= measured_rows(wanted(_ROW_OF), server, asked)
        if asked.peers is not None:
            measured_peers(asked.peers or list(PEERS), wanted(_ROW_OF), server, asked)
        numbers |= measured_volumes(wanted(VOLUMES), tokenizer, server, asked)
    for keys, measure in ((("gateway_cpu_ms", "gateway_stream_ratio"), gateway_numbers), (("import_ms",), import_ms)):
        if wanted(keys):
            found = measure(asked)
            for key in wanted(keys):
                numbers[key] = found[key]
                print(f"{key:22} {found[key]:7.3f}", flush=True)
    if asked.readme:
        readme = HERE.parent / "README.md"
        readme.write_text(filled(readme.read_text(encoding="utf-8"), GOALS, numbers), encoding="utf-8")
    if asked.json:
        print(json.dumps({key: numbers[key] for key in GOALS if key in numbers}))


if __name__ == "__main__":
    main()
