"""The pure parts of the embedded server: stop strings, the prefix tree, templates, rotary forms, seeded draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rllm_trainer.models import resolve_model
from rllm_trainer.serving._local.arena import Arena
from rllm_trainer.serving._local.model import inverse_frequencies
from rllm_trainer.serving._local.prefix_store import PrefixStore
from rllm_trainer.serving._local.sampling import Row, SamplingParams, generator, sample
from rllm_trainer.serving._local.spec import ModelSpec, Rope, read_spec
from rllm_trainer.serving._local.template import ChatTemplate, TemplateError
from rllm_trainer.serving._local.tokens import TextStream, Tokenizer


@pytest.fixture(scope="module")
def tiny() -> Path:
    return resolve_model("tiny-qwen2")


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Tokenizer:
    return Tokenizer(tiny)


def test_text_is_held_back_where_a_stop_may_begin(tokenizer: Tokenizer) -> None:
    """Characters that begin a stop string wait; the stop string itself never shows; incomplete characters come at the end."""
    stream = TextStream(tokenizer, ["END"], include_stop=False, skip_special=True)
    taken = []
    for token in tokenizer.encode("a ENd END", add_special_tokens=False):
        stop = stream.push(token)
        taken.append(stream.take())
    assert (taken, stop) == (["a", " ", "", "", "ENd", " ", "", "", ""], "END")
    assert stream.text == "a ENd "
    cut = TextStream(tokenizer, [], include_stop=False, skip_special=True)
    ids = tokenizer.encode("né", add_special_tokens=False)[:-1]
    assert [cut.push(token) for token in ids] == [None, None]
    assert cut.take() == "n"
    cut.finish(ids)
    assert cut.take() == "\ufffd"


def test_special_tokens_are_hidden_and_pieces_are_bytes(tokenizer: Tokenizer) -> None:
    """The end token has no text in a reply; each token's bytes are its own, also where they are half a character."""
    assert tokenizer.decode([65 - 33, 258], skip_special=True) == "A"
    first, second = (tokenizer.piece(i).data for i in tokenizer.encode("é", add_special_tokens=False))
    assert first + second == "é".encode()
    assert tokenizer.piece(258).text == "<|im_end|>"


def tokens(*ids: int) -> Any:
    return np.array(ids, np.int32)


def keys(start: int, stop: int) -> torch.Tensor:
    """Keys and values that hold their own position."""
    return torch.arange(start, stop, dtype=torch.float32).view(1, 1, 1, -1, 1).expand(1, 2, 1, -1, 2).clone()


def test_a_prefix_is_found_to_the_token() -> None:
    """Stored sequences share what they share; a branch in the middle of one is found up to the branch; the limit holds."""
    store = PrefixStore()
    store.insert(tokens(1, 2, 3, 4), keys, 100)
    store.insert(tokens(1, 2, 9, 9, 9), keys, 100)
    assert store.tokens == 7
    assert [store.match(tokens(*ids), 10) for ids in ((1, 2, 3, 5), (1, 2, 9), (2,), (1, 2, 3, 4, 8))] == [3, 3, 0, 4]
    assert store.match(tokens(1, 2, 3, 4), 3) == 3
    draft = torch.zeros(1, 2, 1, 5, 2)
    assert store.copy_into(draft, tokens(1, 2, 9, 9, 7), 4) == 4
    assert draft[0, 0, 0, :, 0].tolist() == [0.0, 1.0, 2.0, 3.0, 0.0]


def test_the_least_recently_used_leaf_goes_first() -> None:
    """Room is made by dropping leaves that were not used for longest; what does not fit at all is not held."""
    store = PrefixStore()
    store.insert(tokens(1, 2, 3), keys, 6)
    store.insert(tokens(4, 5, 6), keys, 6)
    store.copy_into(torch.zeros(1, 2, 1, 3, 2), tokens(1, 2, 3), 3)
    store.insert(tokens(7, 8), keys, 6)
    assert [store.match(tokens(*ids), 9) for ids in ((1, 2, 3), (4, 5, 6), (7, 8))] == [3, 0, 2]
    store.insert(tokens(*range(10, 20)), keys, 6)
    assert store.tokens == 5
    store.clear()
    assert (store.tokens, store.match(tokens(1, 2, 3), 9)) == (0, 0)


SPEC = ModelSpec(
    family="llama",
    vocab=8,
    hidden=4,
    intermediate=4,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=2,
    eps=1e-6,
    tied=True,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    qk_norm=False,
    max_positions=1024,
    rope=Rope(theta=10_000.0),
)


def test_rows_stay_without_gaps() -> None:
    """Rows grow by doubling, keep their tokens, and the last one takes the place of one that ends."""
    arena = Arena(SPEC, max_rows=4, max_len=600)
    arena.resize(*arena.size_for(1, 3))
    assert (arena.rows, arena.capacity) == (1, 256)
    for value in range(3):
        arena.resize(*arena.size_for(value + 1, 3))
        assert arena.add(torch.full((2, 2, 1, 3, 2), float(value)), 3) == value
    assert arena.size_for(3, 257) == (4, 512)
    assert arena.size_for(3, 600) == (4, 600)
    assert arena.remove(0, 3) == 2
    assert arena.remove(1, 3) is None
    assert arena.read(0, 0, 3).unique().tolist() == [2.0]


@pytest.mark.parametrize("kind", ["default", "linear", "llama3"])
def test_rotary_frequencies_are_transformers_own(kind: str) -> None:
    """Each rotary form gives, to the last bit, the inverse frequencies that transformers computes from the same config."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    extra: dict[str, Any] = {
        "default": {},
        "linear": {"factor": 4.0},
        "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    }[kind]
    config: Any = LlamaConfig(
        hidden_size=64, num_attention_heads=2, head_dim=32, rope_parameters={"rope_type": kind, "rope_theta": 500.0, **extra}
    )
    spec = read_spec({**config.to_dict(), "model_type": "llama"})
    assert spec is not None
    assert inverse_frequencies(spec.rope, 32).tolist() == LlamaRotaryEmbedding(config).inv_freq.tolist()


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "mamba"},
        {"hidden_act": "gelu"},
        {"use_sliding_window": True, "sliding_window": 128},
        {"layer_types": ["sliding_attention"]},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}},
        {"partial_rotary_factor": 0.5},
        {"quantization_config": {}},
    ],
)
def test_what_the_forward_does_not_compute_is_left_to_transformers(changes: dict[str, Any]) -> None:
    """Windows, other activations, families and rotary forms are never computed as if they were plain."""
    plain = {
        "model_type": "qwen2",
        "vocab_size": 8,
        "hidden_size": 4,
        "intermediate_size": 4,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    assert read_spec(plain) is not None
    assert read_spec({**plain, **changes}) is None


CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "look it up"},
    {
        "role": "assistant",
        "content": "Sure.",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"q":  "é"}'}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "17"},
]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {"q": {"type": "string"}}}}}]


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_templates_render_as_transformers_renders_them(tiny: Path, tools: list[dict[str, Any]] | None) -> None:
    """The prompt's text is what the model's own tokenizer class makes of the same messages and tools."""
    from transformers import AutoTokenizer

    theirs: Any = AutoTokenizer.from_pretrained(tiny)
    for messages in (CONVERSATION, CONVERSATION[:1], [{"role": "system", "content": "Be brief."}, *CONVERSATION]):
        expected = theirs.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
        assert ChatTemplate(tiny).render(messages, tools) == expected


def test_a_template_gets_what_it_expects(tmp_path: Path) -> None:
    """Arguments are an object where the template prints them as JSON; no content is empty text; its own complaints come through."""
    text = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    template = ChatTemplate(tmp_path, text)
    assert template.render(CONVERSATION, TOOLS) == 'look it upSure.{"q": "é"}17'
    assert template.render([{"role": "user", "content": None}], None) == ""
    refusing = ChatTemplate(tmp_path, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(TemplateError, match="roles must alternate"):
        refusing.render(CONVERSATION, None)
    with pytest.raises(TemplateError, match=r"no chat template; put one into its folder, as chat_template\.jinja"):
        ChatTemplate(tmp_path).render(CONVERSATION, None)


def draw(logits: list[float], seed: int = 0, sampled: tuple[int, ...] = (), **params: Any) -> tuple[int, float]:
    row = Row(params=SamplingParams(**params), rng=generator(seed, 0), prompt_ids=(0,), sampled_ids=sampled)
    (one,) = sample(torch.tensor([logits]), [row])
    return one.token_id, round(one.logprob, 4)


def test_reported_logprobs_are_those_of_what_was_sampled() -> None:
    """Temperature, truncation, bias and penalties are in the logprob; temperature 0 reports the model's own."""
    assert draw([0.0, 1.0], temperature=0.0) == (1, -0.3133)
    assert {draw([0.0, 1.0], seed, temperature=0.5) for seed in range(20)} == {(0, -2.1269), (1, -0.1269)}
    assert {draw([0.0, 1.0, 1.0], seed, top_k=2) for seed in range(20)} == {(1, -0.6931), (2, -0.6931)}
    assert draw([0.0, 3.0, 1.0], top_p=0.5) == (1, 0.0)
    assert draw([0.0, 3.0, 1.0], min_p=0.5) == (1, 0.0)
    assert draw([0.0, 1.0], temperature=0.0, logit_bias={0: 2.0}) == (0, -0.3133)
    assert draw([0.0, 1.0], sampled=(1, 1), temperature=0.0, presence_penalty=0.5, frequency_penalty=0.5) == (0, -0.4741)
    assert draw([0.5, 1.0], sampled=(1,), temperature=0.0, repetition_penalty=4.0) == (1, -0.6326)


def test_a_diverged_model_is_seen() -> None:
    """Logits that are not finite give no made-up logprob."""
    assert np.isnan(draw([float("nan"), 1.0])[1])


def test_every_seed_of_64_bits_has_random_numbers_of_its_own() -> None:
    """Negative seeds, as hashes are, and those from 2**63 on differ too; a seed's first choice is not its second."""
    seeds = [0, 1, -1, -2, -(2**63), 2**63, 2**63 + 1, 2**62 + 1, 2**62]
    drawn = [generator(seed, choice).integers(0, 2**62) for seed in seeds for choice in (0, 1)]
    assert len(set(drawn)) == 2 * len(seeds) - 2
    assert generator(-(2**63), 0).integers(0, 2**62) == generator(2**63, 0).integers(0, 2**62)
    assert generator(7, 1).integers(0, 2**62) == generator(7, 1).integers(0, 2**62)
