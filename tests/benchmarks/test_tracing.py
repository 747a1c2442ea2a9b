"""`benchmarks/tracing.py` runs from end to end and prints every figure that it promises."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KEYS = [
    "small_ratio",
    "ids_2k256_ratio",
    "ids_8k2k_ratio",
    "ids_8k2k_over_plain",
    "stream_ratio",
    "stream_ids_ratio",
    "async_32_ratio",
    "kept_bytes_2k256",
    "disk_bytes_2k256",
    "records_per_s",
    "idle_us",
    "chat50_tokens",
    "gateway_cpu_ms",
    "gateway_stream_ratio",
    "import_ms",
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-pair tokenizer made of the prose itself, so that no model is needed."""
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.train_from_iterator(topics.values(), trainers.BpeTrainer(vocab_size=2_048, show_progress=False))
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


def run(tokenizer: Path, *options: str) -> dict[str, object]:
    command = [sys.executable, "benchmarks/tracing.py", "--quick", "--json", "--tokenizer", str(tokenizer), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-2_000:] + done.stderr[-2_000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_every_key_is_printed(tokenizer: Path) -> None:
    """The last line of ``--json`` has exactly the promised keys, in their order."""
    assert list(run(tokenizer)) == KEYS


def test_a_long_chat_is_stored_once_and_a_record_takes_little_room(tokenizer: Path) -> None:
    """Fifty turns store each token once; a call of 2,048 + 256 tokens takes less than 12,000 bytes of disk with its text."""
    figures = run(tokenizer, "--only", "disk_bytes_2k256", "chat50_tokens")
    assert figures["chat50_tokens"] == 1.0
    assert float(str(figures["disk_bytes_2k256"])) < 12_000


def test_figures_go_into_their_cells_of_the_table_and_a_missed_goal_is_named() -> None:
    """Other rows, goals and what peers measure stay; a figure at its limit does not meet it; a key without a row is refused."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        from capture_cost.table import filled, is_met
    finally:
        sys.path.pop(0)
    table = (
        "| key | goal | ours | peers |\n|---|---|---|---|\n| `a_ratio`: calls | < 1.06 | run it | 1.2 |\n"
        "| `b_bytes`: two | < 12,000 / < 24,000 | 1 / 2, **not met** | |\n| `c`: left | > 2 | 3 | |\n"
    )
    goals = {"a_ratio": "< 1.06", "b_bytes": "< 12000 / < 24000", "c": "> 2"}
    assert filled(table, goals, {"a_ratio": 1.06, "b_bytes": [11_868.2, 21_613]}) == (
        "| key | goal | ours | peers |\n|---|---|---|---|\n| `a_ratio`: calls | < 1.06 | 1.060, **not met** | 1.2 |\n"
        "| `b_bytes`: two | < 12,000 / < 24,000 | 11,868 / 21,613 | |\n| `c`: left | > 2 | 3 | |\n"
    )
    assert [is_met("1.0", 1.0), is_met("", 9.0), is_met("> 1500", 1_499)] == [True, True, False]
    with pytest.raises(ValueError, match="no row of the table is about d"):
        filled(table, goals, {"d": 1})
