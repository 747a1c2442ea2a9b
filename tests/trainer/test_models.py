"""Names become model folders: embedded ones are made once, whole or not at all; everything else is refused with what to do."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from rllm_trainer.exceptions import ModelError
from rllm_trainer.models import resolve_model

RESOLVE = "import sys; from rllm_trainer.models import resolve_model; print(resolve_model(sys.argv[1])); print('torch' in sys.modules)"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "rllm" / "models"


def digest(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_two_processes_that_ask_at_once_make_a_model_once(cache: Path) -> None:
    """Both get the same whole folder, neither loads torch, and nothing half-made is left beside it."""
    both = [subprocess.Popen([sys.executable, "-c", RESOLVE, "tiny-qwen2"], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    answers = [process.communicate(timeout=240)[0].split() for process in both]
    assert answers == [[str(cache / "tiny-qwen2-2"), "False"]] * 2
    assert sorted(path.name for path in cache.iterdir()) == [".tiny-qwen2-2.lock", "tiny-qwen2-2"]
    listed = json.loads((cache / "tiny-qwen2-2" / "rllm-files.json").read_text())
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= listed.keys()


def test_a_made_model_is_the_same_everywhere_and_made_again_where_it_is_damaged(cache: Path) -> None:
    """A folder that lost bytes is replaced by one with the same files, byte for byte."""
    first = resolve_model("tiny-llama")
    made = digest(first)
    weights = first / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert digest(resolve_model("tiny-llama")) == made


def test_the_tiny_tokenizer_writes_and_reads_any_bytes() -> None:
    """261 ids: every byte has one, the control tokens are single ids, the end of a turn is the end of a reply."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(resolve_model("tiny-qwen2"))
    text = "añ中\n17"
    assert (len(tokenizer), len(tokenizer(text).input_ids), tokenizer.decode(tokenizer(text).input_ids)) == (261, 9, text)
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_local_folder_is_taken_as_it_is() -> None:
    """A folder with config, weights and tokenizer is the model, and nothing is made or copied."""
    folder = resolve_model("tiny-qwen2")
    assert resolve_model(folder) == folder
    assert resolve_model(str(folder)) == folder


@pytest.mark.slow
def test_the_default_model_is_as_its_authors_published_it() -> None:
    """Single digits, the end of a turn as the end of a reply, the authors' system message, and no trace of quantisation."""
    from transformers import AutoTokenizer

    folder = resolve_model(None)
    assert folder == resolve_model("smollm2-135m-instruct")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_ids_to_tokens(tokenizer("a 175").input_ids) == ["a", "Ġ", "1", "7", "5"]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)) == (2, 2, 49152)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n"
    )
    config = json.loads((folder / "config.json").read_text())
    assert (config["dtype"], config["eos_token_id"], "quantization_config" in config) == ("float32", 2, False)


@pytest.mark.parametrize(
    "name, message",
    [
        ("no-such-model", "no folder here; expected a Hugging Face model folder, a hub name 'owner/name', or one of smollm2-135m-instruct"),
        ("owner/name", "could not be fetched from the model hub"),
        ("empty", "lacks config.json, *.safetensors, tokenizer.json"),
        ("file", "which is a file; give the folder"),
    ],
)
def test_what_is_no_model_is_refused_with_what_to_do(name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence that says what was got and what to give."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(ModelError) as raised:
        resolve_model(name)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the cache folder is a file, the error names it and the variable that moves it."""
    (tmp_path / "rllm").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ModelError, match="set XDG_CACHE_HOME to another folder"):
        resolve_model("tiny-qwen2")
