"""Every name that leaves the process, spelled once: span attributes, baggage and header names, environment variables.

Names under ``gen_ai.`` and ``openinference.`` belong to public conventions that still change; names under ``rllm.`` are ours.
The key of an attribute and of the baggage entry with the same meaning is the same string. A value is a string, bool, int,
float or a list of strings: never bytes, never None, never a list of numbers (token arrays are base64 strings).
"""

from __future__ import annotations

from typing import Final

# GenAI conventions: what a span is
OPERATION_NAME: Final = "gen_ai.operation.name"
PROVIDER_NAME: Final = "gen_ai.provider.name"
PROVIDER_OPENAI: Final = "openai"
"""Of calls to the app's own endpoint: the client's protocol decides, as the conventions say."""
PROVIDER_OURS: Final = "rllm"
"""Of calls to the served policy, and of agents."""
CONVERSATION_ID: Final = "gen_ai.conversation.id"
"""The user's session id if given, else the episode id."""
WORKFLOW_NAME: Final = "gen_ai.workflow.name"
AGENT_ID: Final = "gen_ai.agent.id"
AGENT_NAME: Final = "gen_ai.agent.name"
TOOL_NAME: Final = "gen_ai.tool.name"
TOOL_TYPE: Final = "gen_ai.tool.type"
TOOL_CALL_ID: Final = "gen_ai.tool.call.id"
TOOL_DESCRIPTION: Final = "gen_ai.tool.description"
TOOL_CALL_ARGUMENTS: Final = "gen_ai.tool.call.arguments"
TOOL_CALL_RESULT: Final = "gen_ai.tool.call.result"

# GenAI conventions: values of OPERATION_NAME, which are also the first word of a span's name
OP_WORKFLOW: Final = "invoke_workflow"
OP_AGENT: Final = "invoke_agent"
OP_CHAT: Final = "chat"
OP_COMPLETION: Final = "text_completion"
OP_TOOL: Final = "execute_tool"
SPAN_REWARD: Final = "rllm.reward"
"""First word of a reward span's name; rewards have no operation in the conventions."""

# GenAI conventions: request and response
REQUEST_MODEL: Final = "gen_ai.request.model"
REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
REQUEST_TOP_P: Final = "gen_ai.request.top_p"
REQUEST_TOP_K: Final = "gen_ai.request.top_k"
REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
REQUEST_SEED: Final = "gen_ai.request.seed"
REQUEST_STOP: Final = "gen_ai.request.stop_sequences"
REQUEST_FREQUENCY_PENALTY: Final = "gen_ai.request.frequency_penalty"
REQUEST_PRESENCE_PENALTY: Final = "gen_ai.request.presence_penalty"
REQUEST_CHOICE_COUNT: Final = "gen_ai.request.choice.count"
REQUEST_STREAM: Final = "gen_ai.request.stream"
RESPONSE_ID: Final = "gen_ai.response.id"
RESPONSE_MODEL: Final = "gen_ai.response.model"
RESPONSE_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
TIME_TO_FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"
"""Seconds, float."""
USAGE_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
USAGE_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
SYSTEM_INSTRUCTIONS: Final = "gen_ai.system_instructions"
INPUT_MESSAGES: Final = "gen_ai.input.messages"
OUTPUT_MESSAGES: Final = "gen_ai.output.messages"
TOOL_DEFINITIONS: Final = "gen_ai.tool.definitions"
EVALUATION_NAME: Final = "gen_ai.evaluation.name"
EVALUATION_SCORE: Final = "gen_ai.evaluation.score.value"
EVALUATION_LABEL: Final = "gen_ai.evaluation.score.label"
EVALUATION_EXPLANATION: Final = "gen_ai.evaluation.explanation"

# General conventions
SERVICE_NAME: Final = "service.name"
SERVER_ADDRESS: Final = "server.address"
SERVER_PORT: Final = "server.port"
ERROR_TYPE: Final = "error.type"
ERROR_MESSAGE: Final = "error.message"
ERROR_STATUS: Final = "http.response.status_code"
USER_ID: Final = "user.id"
"""The user's own id for a person: content, since it may be a name."""
EXCEPTION_EVENT: Final = "exception"
EXCEPTION_TYPE: Final = "exception.type"
EXCEPTION_MESSAGE: Final = "exception.message"
EXCEPTION_STACKTRACE: Final = "exception.stacktrace"

# OpenInference, so that Phoenix shows every span with its icon
OPENINFERENCE_KIND: Final = "openinference.span.kind"
KIND_WORKFLOW: Final = "CHAIN"
KIND_AGENT: Final = "AGENT"
KIND_CALL: Final = "LLM"
KIND_TOOL: Final = "TOOL"
KIND_REWARD: Final = "EVALUATOR"
INPUT_VALUE: Final = "input.value"
OUTPUT_VALUE: Final = "output.value"

# Identity (attributes on every span of ours; the first three are baggage too)
SPAN_KIND: Final = "rllm.span.kind"
"""workflow, agent, tool, reward, chat or other."""
EPISODE_ID: Final = "rllm.episode.id"
TASK_ID: Final = "rllm.task.id"
TRAJECTORY_ID: Final = "rllm.trajectory.id"
TRAJECTORY_NAME: Final = "rllm.trajectory.name"
SESSION_ID: Final = "rllm.session.id"
RUN_ID: Final = "rllm.run.id"
PARENT_EPISODE_ID: Final = "rllm.episode.parent_id"

# On the workflow span
EPISODE_INPUT: Final = "rllm.episode.input"
"""The workflow's arguments by name, JSON text. Content."""
EPISODE_OUTPUT: Final = "rllm.episode.output"
"""What it returned, JSON text. Content."""
EPISODE_METADATA: Final = "rllm.episode.metadata"
"""JSON text."""
EPISODE_OPEN_CALLS: Final = "rllm.episode.open_calls"
MISSING: Final = "rllm.missing"
"""In the metadata of an episode that other processes had a part in: what did not arrive."""
TERMINATION: Final = "rllm.termination.reason"
GROUP_ID: Final = "rllm.group.id"
ROLLOUT_INDEX: Final = "rllm.rollout.index"
SPLIT: Final = "rllm.split"
TAGS: Final = "rllm.tags"
"""Texts to sort traces by."""

# On the chat span: always
CALL_OPERATION: Final = "rllm.call.operation"
CALL_REQUESTED_MODEL: Final = "rllm.call.requested_model"
CALL_ENDPOINT: Final = "rllm.call.endpoint"
CALL_SERVER: Final = "rllm.call.server"
CALL_NUMBER: Final = "rllm.call.number"
CALL_ATTEMPTS: Final = "rllm.call.attempts"
CALL_STATUS: Final = "rllm.call.status"
CALL_EXACT: Final = "rllm.call.exact"
CALL_INEXACT_REASON: Final = "rllm.call.inexact_reason"
CALL_COMPLETE: Final = "rllm.call.complete"
CALL_STREAMED: Final = "rllm.call.streamed"
CALL_MULTIMODAL: Final = "rllm.call.multimodal"
CALL_NO_TRAIN: Final = "rllm.call.no_train"
CALL_IN_REWARD: Final = "rllm.call.in_reward"
CALL_LATE: Final = "rllm.call.late"
CALL_USAGE_REPORTED: Final = "rllm.call.usage_reported"
"""False where ``gen_ai.usage.*`` are our counts, because the server sent none."""
CALL_TIME_TO_FIRST_TOKEN: Final = "rllm.call.time_to_first_token"
"""Nanoseconds, int."""
POLICY_VERSION_START: Final = "rllm.policy.version"
POLICY_VERSION_END: Final = "rllm.policy.version_end"
POLICY_VERSION_SPANS: Final = "rllm.policy.version_spans"
"""JSON text of [[version, first token, end token], ...]."""
PROMPT_TOKEN_COUNT: Final = "rllm.prompt.token_count"
RESPONSE_TOKEN_COUNT: Final = "rllm.response.token_count"
"""Sampled tokens, summed over choices."""
LOGPROB_MEAN: Final = "rllm.response.logprob.mean"
LOGPROB_MIN: Final = "rllm.response.logprob.min"
TOKENS_SHA256: Final = "rllm.tokens.sha256"
"""Digest over prompt ids, then ids and logprobs of each choice, as packed little-endian bytes, each preceded by its length."""

# On the chat span: content
REQUEST_BODY: Final = "rllm.request.body"
"""The JSON body as sent, exactly."""
REQUEST_ORIGINAL: Final = "rllm.request.original"
"""JSON text: the app's own value of each field that was changed."""
RESPONSE_CHOICES: Final = "rllm.response.choices"
"""JSON text: every choice without its ids and logprobs."""

# On the chat span: tokens
PROMPT_TOKEN_IDS: Final = "rllm.prompt.token_ids"
RESPONSE_TOKEN_IDS: Final = "rllm.response.token_ids"
"""Ids of the first choice; those of the following ones are under ``response_key(RESPONSE_TOKEN_IDS, position)``."""
RESPONSE_LOGPROBS: Final = "rllm.response.logprobs"
TOKENS_ENCODING: Final = "rllm.tokens.encoding"
TOKENS_ENCODING_VALUE: Final = "b64:i32le,f32le"

# On the reward span
REWARD_NAME: Final = "rllm.reward.name"
REWARD_VALUE: Final = "rllm.reward.value"
REWARD_VALUES: Final = "rllm.reward.values"
"""JSON text: every reward that the function gave, where it gave several."""
REWARD_WEIGHT: Final = "rllm.reward.weight"
REWARD_TARGET: Final = "rllm.reward.target"
REWARD_TARGET_SPAN: Final = "rllm.reward.target_span_id"
REWARD_SCOPE: Final = "rllm.reward.scope"

# On a span that is only a word between two processes of ours
SPAN_RECEIPT: Final = "rllm.receipt"
RECEIPT: Final = "rllm.receipt.id"
RECEIPT_LOST: Final = "rllm.receipt.lost"
"""Spans that were dropped or failed in the process that sends it, int."""
RECEIPT_ENDED: Final = "rllm.receipt.ended"
"""Numbers of what that process has handed on and has seen end, with spaces between."""
SPAN_RECORD: Final = "rllm.record"
RECORD: Final = "rllm.record.frame"
"""A whole episode that ran there, for who collects here: base64 of a frame of the store's log."""

# On spans that an exporter had to cut
OMITTED_ATTRIBUTES: Final = "rllm.export.omitted_attributes"

CONTENT_KEYS: Final = frozenset(
    {
        SYSTEM_INSTRUCTIONS,
        INPUT_MESSAGES,
        OUTPUT_MESSAGES,
        TOOL_DEFINITIONS,
        TOOL_CALL_ARGUMENTS,
        TOOL_CALL_RESULT,
        EVALUATION_EXPLANATION,
        INPUT_VALUE,
        OUTPUT_VALUE,
        EPISODE_INPUT,
        EPISODE_OUTPUT,
        REQUEST_BODY,
        REQUEST_ORIGINAL,
        REQUEST_STOP,
        RESPONSE_CHOICES,
        ERROR_MESSAGE,
        PROMPT_TOKEN_IDS,
        RESPONSE_TOKEN_IDS,
        RESPONSE_LOGPROBS,
        EXCEPTION_MESSAGE,
        EXCEPTION_STACKTRACE,
    }
)
"""Attributes that may hold what a user or a model wrote; they leave only where content may."""

PLAIN_PREFIXES: Final = ("rllm.", "gen_ai.", "error.", "openinference.span.", "server.", "http.response.")
"""Where content may not go, only attributes under these leave, and of these not ``CONTENT_KEYS`` and ``CONTENT_PREFIXES``."""
CONTENT_PREFIXES: Final = ("gen_ai.prompt.", "gen_ai.completion.")
"""Content in other instrumentations' spelling."""
VIEW_KEYS: Final = (INPUT_MESSAGES, OUTPUT_MESSAGES, TOOL_DEFINITIONS, SYSTEM_INSTRUCTIONS)
"""Attributes that say again, for display, what ``REQUEST_BODY`` and ``RESPONSE_CHOICES`` hold."""

# Scope of our tracer, and the resource
SCOPE_NAME: Final = "rllm_trace"
DEFAULT_SERVICE_NAME: Final = PROVIDER_OURS

# Headers
HEADER_BAGGAGE: Final = "baggage"
HEADER_TRACEPARENT: Final = "traceparent"
HEADER_PARENT: Final = "x-rllm-parent"
"""Our own parent, in the form of a traceparent; the user's ``traceparent`` is never changed."""
HEADER_POLICY_VERSION: Final = "x-rllm-policy-version"
HEADER_EPISODE: Final = "x-rllm-episode-id"
HEADER_CONVERSATION: Final = "x-rllm-conversation"
"""Of a redirected call: ``episode/trajectory``, opaque to the server, by which it keeps the calls of one episode together."""
HEADER_LEFT_OUT: Final = "x-rllm-left-out"
"""Of an answer of the gateway: fields of the request that have no counterpart at the upstream."""
HEADER_AUTHORIZATION: Final = "authorization"
BAGGAGE_PREFIX: Final = "rllm."
"""Of attributes and baggage entries."""

# Environment
ENV_DISABLED: Final = "RLLM_DISABLED"
ENV_CONTEXT: Final = "RLLM_CONTEXT"
ENV_GATEWAY_TOKEN: Final = "RLLM_GATEWAY_TOKEN"
ENV_GATEWAY_UPSTREAM_KEY: Final = "RLLM_GATEWAY_UPSTREAM_KEY"
ENV_GATEWAY_ANTHROPIC_KEY: Final = "RLLM_GATEWAY_ANTHROPIC_KEY"
ENV_GATEWAY_COMMIT_TOKEN: Final = "RLLM_GATEWAY_COMMIT_TOKEN"
ENV_OPENAI_BASE_URL: Final = "OPENAI_BASE_URL"
ENV_OPENAI_API_KEY: Final = "OPENAI_API_KEY"
ENV_ANTHROPIC_BASE_URL: Final = "ANTHROPIC_BASE_URL"
ENV_ANTHROPIC_API_KEY: Final = "ANTHROPIC_API_KEY"
"""Carries our parent and baggage to a child process, as JSON of the headers."""
ENV_CAPTURE_CONTENT: Final = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
ENV_SERVICE_NAME: Final = "OTEL_SERVICE_NAME"
ENV_OTLP: Final = "OTEL_EXPORTER_OTLP_"
"""Prefix of the settings of every OTLP signal; followed by ENV_OTLP_TRACES_PART those of traces, which come first."""
ENV_OTLP_TRACES_PART: Final = "TRACES_"
ENV_BSP_QUEUE_SIZE: Final = "OTEL_BSP_MAX_QUEUE_SIZE"
ENV_BSP_BATCH_SIZE: Final = "OTEL_BSP_MAX_EXPORT_BATCH_SIZE"
ENV_BSP_DELAY: Final = "OTEL_BSP_SCHEDULE_DELAY"
"""Milliseconds."""
ENV_TEST_JAEGER: Final = "RLLM_TEST_JAEGER_URL"


def response_key(key: str, position: int) -> str:
    """The attribute key of the choice at ``position``: ``rllm.response.token_ids``, ``rllm.response.1.token_ids``, ..."""
    if position == 0:
        return key
    head, _, tail = key.rpartition(".")
    return f"{head}.{position}.{tail}"


def is_content(key: str) -> bool:
    """Whether an attribute, ours or another library's, may hold what a user or a model wrote. What is not known may."""
    return key in CONTENT_KEYS or key.startswith(CONTENT_PREFIXES) or not key.startswith(PLAIN_PREFIXES)
