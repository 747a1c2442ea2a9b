"""``rllm gateway``: a reverse proxy that makes the spans of apps that are not Python, or not patched.

An OpenAI-compatible request (chat, completions, responses) or an Anthropic Messages request comes in, with what names its episode; the
same request goes to the upstream or to the policy, and the record of the call is in its episode before the last byte of the answer leaves.
"""

from rllm_trace.gateway._gateway import Gateway
from rllm_trace.gateway._upstream import Upstream

__all__ = ["Gateway", "Upstream"]
