"""What is said of a server is enough, and has an effect, or is refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from rllm_trainer.config import make_settings
from rllm_trainer.exceptions import SettingError
from rllm_trainer.serving_settings import in_flight_of, key_name, require_trainable, urls_of

FIREWORKS = {"model": "accounts/a/models/m", "deployment": "accounts/a/deployments/d", "bucket": "/mnt/b"}


@pytest.mark.parametrize(
    "given, said",
    [
        ({"serving": "sglang"}, "needs serving_url="),
        ({"serving": "openai-compatible"}, "needs serving_url="),
        ({"serving": "fireworks"}, "needs fireworks="),
        ({"serving_url": "http://x/v1"}, "serving_url would have no effect: serving='auto' goes to no given URL"),
        ({"serving_key": "K"}, "serving_key would have no effect: a server of ours makes its own key"),
        ({"vllm": {"python": "p"}}, "vllm would have no effect: no vLLM is started"),
        ({"serving": "vllm", "serving_url": "http://x/v1", "vllm": {}}, "vllm would have no effect"),
        ({"fireworks": FIREWORKS}, "fireworks would have no effect: serving is 'auto'"),
        ({"serving": "sglang", "serving_url": "http://x/v1", "replicas": 2}, "replicas would have no effect: no server is started"),
        ({"serving": "fireworks", "fireworks": FIREWORKS, "in_flight": "keep"}, "calls must end before a swap; give 'wait'"),
        ({"replicas": 2, "port": 8000}, "port=8000 is one port, and there are several servers"),
        ({"serving": "vllm", "vllm": {"pythn": "p"}}, "unknown field pythn"),
        ({"serving": "torchserve"}, "choose one of 'auto', 'local', 'vllm', 'sglang', 'fireworks', 'openai-compatible'"),
    ],
)
def test_what_would_do_nothing_is_refused(given: dict[str, Any], said: str) -> None:
    """In a sentence that names the setting."""
    with pytest.raises(SettingError) as refused:
        make_settings(given)
    assert said in str(refused.value)


def test_a_server_that_takes_no_weights_is_not_trained_with() -> None:
    """The sentence says what is missing, and what works."""
    with pytest.raises(SettingError, match="no way to give it new weights"):
        require_trainable(make_settings({"serving": "openai-compatible", "serving_url": "http://x/v1"}))
    with pytest.raises(SettingError, match="has no bucket"):
        require_trainable(make_settings({"serving": "fireworks", "fireworks": FIREWORKS | {"bucket": None}}))


def test_defaults_follow_the_server() -> None:
    """Calls are kept where versions are told token by token; the key is found under the provider's own name."""
    fireworks = make_settings({"serving": "fireworks", "fireworks": FIREWORKS})
    assert in_flight_of(fireworks) == "wait"
    assert key_name(fireworks) == "FIREWORKS_API_KEY"
    attached = make_settings({"serving": "vllm", "serving_url": ["http://a/v1", "http://b/v1"], "serving_key": "MY_KEY"})
    assert in_flight_of(attached) == "keep"
    assert key_name(attached) == "MY_KEY"
    assert urls_of(attached) == ["http://a/v1", "http://b/v1"]
