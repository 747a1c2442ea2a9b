"""A GGUF file or a seed goes in, a Hugging Face model folder comes out.

Run as a process of its own (``python -m rllm_trainer._make_model``), so that torch and transformers never enter the process
that asked. The same input gives the same tensors on every machine; the folder is complete when the process exits with 0.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, Final

__all__ = ["CHATML", "convert_smollm2", "main", "make_tiny"]

END_OF_TURN: Final = "<|im_end|>"
END_OF_TEXT: Final = "<|endoftext|>"

CHATML: Final = r"""{%- macro text(content) -%}
{%- if content is string -%}{{ content }}{%- elif content -%}
{%- for part in content -%}{{ part['text'] }}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- set system = text(messages[0]['content']) if messages[0]['role'] == 'system' else SYSTEM -%}
{{- '<|im_start|>system\n' + system }}
{%- if tools %}
{{- "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>" }}
{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}
{{- "\n</tools>\n\nFor each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>" }}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- for m in messages %}
{%- if m['role'] == 'system' and loop.first %}
{%- elif m['role'] == 'assistant' %}
{{- '<|im_start|>assistant\n' }}
{%- generation %}
{{- text(m['content']) }}
{%- for call in m.get('tool_calls') or [] %}
{%- set f = call['function'] if call.get('function') else call %}
{{- ('\n' if (m['content'] or not loop.first) else '') + '<tool_call>\n{"name": "' + f['name'] + '", "arguments": ' }}
{{- f['arguments'] if f['arguments'] is string else (f['arguments'] | tojson) }}{{- '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>' }}
{%- endgeneration %}
{{- '\n' }}
{%- elif m['role'] == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + text(m['content']) + '\n</tool_response><|im_end|>\n' }}
{%- else %}
{{- '<|im_start|>' + m['role'] + '\n' + text(m['content']) + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""  # noqa: E501
"""ChatML with tools in the Hermes form. ``SYSTEM`` stands for what a model was tuned to see where the caller gives no system message.
``generation`` marks what the assistant says, for the token masks of ``apply_chat_template``."""

SMOLLM2_SYSTEM: Final = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
TINY_SYSTEM: Final = "You are a helpful assistant."


def _template(system: str) -> str:
    return CHATML.replace("SYSTEM", repr(system))


def convert_smollm2(gguf: Path, out: Path) -> None:
    """Dequantise the GGUF file to fp32 safetensors, with the tokenizer as its authors published it."""
    transformers: Any = import_module("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype="float32")
    # The loader leaves its marks of quantisation on a model that is not quantised any more.
    model.hf_quantizer = None
    for name in ("quantization_config", "_name_or_path"):
        if hasattr(model.config, name):
            delattr(model.config, name)
    for name in ("is_quantized", "quantization_method"):
        if hasattr(model, name):
            setattr(model, name, None)
    model.generation_config = transformers.GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model.save_pretrained(out, safe_serialization=True)

    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = "<|im_start|>", END_OF_TURN, END_OF_TURN
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.model_max_length = 8192
    tokenizer.chat_template = _template(SMOLLM2_SYSTEM)
    tokenizer.save_pretrained(out)
    _restore_pre_tokenizer(out / "tokenizer.json")


def _restore_pre_tokenizer(path: Path) -> None:
    """The GGUF loader drops the split into single digits and adds a SentencePiece decoder; put back what the model was trained with."""
    spec = json.loads(path.read_text(encoding="utf-8"))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level]}
    spec["decoder"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    spec["normalizer"] = None
    spec["post_processor"] = None
    path.write_text(json.dumps(spec, ensure_ascii=False), encoding="utf-8")


def make_tiny(family: str, out: Path) -> None:
    """A random two-layer model of 91 thousand parameters over bytes; ``family`` is ``qwen2`` or ``llama``.

    The head dimension is 32 because vLLM's CPU attention takes only multiples of it; the wide initialisation makes
    distributions that are far from flat, so that a wrong logprob shows.
    """
    torch: Any = import_module("torch")
    transformers: Any = import_module("transformers")
    prefix = {"qwen2": "Qwen2", "llama": "Llama"}[family]
    tokenizer = _byte_tokenizer()
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = getattr(transformers, f"{prefix}Config")(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=2048,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        initializer_range=0.2,
        bos_token_id=None,
        **special,
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).to(torch.float32)
    model.config.dtype = "float32"
    model.generation_config = transformers.GenerationConfig(**special)
    model.save_pretrained(out, safe_serialization=True)
    tokenizer.save_pretrained(out)


def _byte_tokenizer() -> Any:
    """261 ids: 256 bytes, three control tokens, two tool tags; whatever is sampled decodes, whatever is written encodes."""
    tokenizers: Any = import_module("tokenizers")
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    symbols: list[str] = sorted(byte_level.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    for names, special in (((END_OF_TEXT, "<|im_start|>", END_OF_TURN), True), (("<tool_call>", "</tool_call>"), False)):
        add = tokenizer.add_special_tokens if special else tokenizer.add_tokens
        add([tokenizers.AddedToken(name, special=special, normalized=False) for name in names])
    transformers: Any = import_module("transformers")
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=None,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        unk_token=None,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = _template(TINY_SYSTEM)
    return fast


def main(argv: list[str]) -> int:
    """``smollm2 GGUF OUT`` or ``qwen2|llama OUT``."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # this process is ours: it converts files and looks nothing up
    kind, *paths = argv
    if kind == "smollm2":
        convert_smollm2(Path(paths[0]), Path(paths[1]))
    else:
        make_tiny(kind, Path(paths[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
