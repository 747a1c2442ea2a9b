"""While training, an app's calls go to the policy: its client, its keys and its other calls stay its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

import rllm_trace as rllm
from rllm_trace._guard import counters
from rllm_trace.exceptions import CallRefusedError
from rllm_trace.routing import CallSite, CallSites, Endpoint, Route, call_seed, current_route, kept_header, reshaped, use_route
from rllm_trace.testing import Reply, ReplyChoice, ScriptedServer
from rllm_trace.types import Usage

MESSAGES: Any = [{"role": "user", "content": "hi"}]
CREATE: Any = {"model": "gpt-4o-mini", "messages": MESSAGES}
TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
RELEASE = tuple(int(part) for part in openai.__version__.split(".")[:2])
NOWHERE = "http://127.0.0.1:9/v1"


@pytest.fixture
def policy() -> Iterator[ScriptedServer]:
    with ScriptedServer([Reply(weight_versions=[(7, 0, 3)])], api_key="policy-key") as server:
        yield server


def route_to(server: ScriptedServer, **options: Any) -> Route:
    return Route(base_url=server.base_url, api_key="policy-key", model="policy", **options)


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    with _opened:
        yield


_opened = contextlib.ExitStack()


def own_client(server: ScriptedServer) -> openai.OpenAI:
    http = openai.DefaultHttpxClient(verify=False)
    return _opened.enter_context(openai.OpenAI(base_url=server.base_url, api_key=server.api_key, http_client=http))


def foreign_client(**options: Any) -> openai.OpenAI:
    """A client as an app makes it for its own provider, which cannot be reached."""
    http = openai.DefaultHttpxClient(
        verify=False, headers={"x-proxy-key": "sk-proxy"}, cookies={"session": "sk-cookie"}, params={"key": "sk-param"}
    )
    client = openai.OpenAI(
        base_url=NOWHERE,
        api_key="sk-foreign",
        organization="org-foreign",
        project="proj-foreign",
        default_headers={"X-Api-Key": "sk-custom", "authorization": "Bearer sk-lower"},
        default_query={"api-version": "sk-query"},
        max_retries=0,
        http_client=http,
        **options,
    )
    return _opened.enter_context(client)


@pytest.mark.parametrize("stream", [False, True], ids=["create", "stream"])
def test_a_call_is_redirected_and_its_client_untouched(stream: bool, policy: ScriptedServer, recording: Any) -> None:
    """URL, key and model are the policy's for this call; the client object still points where it did."""
    client = foreign_client()

    def app() -> str:
        answer = client.chat.completions.create(**CREATE, stream=stream)
        if stream:
            return "".join(chunk.choices[0].delta.content or "" for chunk in answer)
        return answer.choices[0].message.content or ""

    call = recording.call(app, route=route_to(policy))
    (exchange,) = policy.log
    assert recording.value == "ok"
    assert (exchange.path, exchange.body["model"]) == ("/v1/chat/completions", "policy")
    assert (call.model, call.requested_model, call.endpoint) == ("policy", "gpt-4o-mini", "policy")
    assert call.server == policy.base_url.split("/")[2]
    assert (call.policy_version_start, call.policy_version_end) == (7, 7)
    assert (call.exact, call.trainable) == (True, True)
    assert (str(client.base_url), client.api_key, client.organization) == (NOWHERE + "/", "sk-foreign", "org-foreign")


@pytest.mark.parametrize("shape", ["create", "raw", "post", "extra headers"])
def test_nothing_of_the_apps_own_provider_leaves_for_the_policy(shape: str, policy: ScriptedServer, recording: Any) -> None:
    """No key, organisation, cookie, custom header or query parameter of the app's arrives at the policy."""
    client = foreign_client()

    def app() -> None:
        if shape == "raw":
            client.chat.completions.with_raw_response.create(**CREATE).parse()
        elif shape == "post":
            client.post("/chat/completions", body=dict(CREATE), cast_to=object)
        elif shape == "extra headers":
            client.chat.completions.create(**CREATE, extra_headers={"X-Secret": "sk-extra"}, extra_query={"q": "sk-extra-query"})
        else:
            client.chat.completions.create(**CREATE)

    call = recording.call(app, route=route_to(policy))
    (exchange,) = policy.log
    assert recording.error is None
    assert exchange.headers["authorization"] == "Bearer policy-key"
    seen = json.dumps([exchange.path, exchange.headers, exchange.body])
    assert [secret for secret in ("sk-", "org-foreign", "proj-foreign") if secret in seen] == []
    assert "policy-key" not in repr(call)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_an_azure_client_is_redirected_without_its_key(is_async: bool, policy: ScriptedServer, recording: Any) -> None:
    """Azure's ``api-key`` header, deployment path and api-version stay at home."""
    own: Any = {"azure_endpoint": "http://127.0.0.1:9", "api_key": "sk-azure", "api_version": "2024-10-21"}

    async def go() -> None:
        async with openai.AsyncAzureOpenAI(**own, http_client=openai.DefaultAsyncHttpxClient(verify=False)) as client:
            await client.chat.completions.create(**CREATE)

    def app() -> None:
        if is_async:
            asyncio.run(go())
            return
        with openai.AzureOpenAI(**own, http_client=openai.DefaultHttpxClient(verify=False)) as client:
            client.chat.completions.create(**CREATE)

    call = recording.call(app, route=route_to(policy))
    (exchange,) = policy.log
    assert exchange.path == "/v1/chat/completions"
    assert "sk-azure" not in json.dumps(exchange.headers)
    assert (call.exact, call.requested_model) == (True, "gpt-4o-mini")


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_stream_of_the_policy_that_is_left_at_its_finish_reason_has_ended(is_async: bool, policy: ScriptedServer, recording: Any) -> None:
    """An app that keeps its stream and never reads the usage event loses nothing: the call is whole, and its episode does not wait."""
    kept: list[Any] = []

    async def go() -> None:
        http = openai.DefaultAsyncHttpxClient(verify=False)
        async with openai.AsyncOpenAI(base_url=NOWHERE, api_key="sk-foreign", http_client=http) as client:
            kept.append(await client.chat.completions.create(**CREATE, stream=True))
            async for chunk in kept[0]:
                if chunk.choices[0].finish_reason:
                    break

    def app() -> None:
        if is_async:
            asyncio.run(go())
            return
        kept.append(foreign_client().chat.completions.create(**CREATE, stream=True))
        for chunk in kept[0]:
            if chunk.choices[0].finish_reason:
                break

    episode = recording.episode(app, route=route_to(policy))
    (call,) = episode.calls
    assert (call.exact, call.complete, call.usage) == (True, True, Usage(prompt_tokens=3, completion_tokens=3))
    assert (episode.termination, episode.open_calls) == ("completed", 0)


def test_a_policy_lost_after_the_finish_reason_gave_a_whole_reply(recording: Any) -> None:
    """The app gets the last chunk and then the error, as without us; the reply was received whole and is recorded so."""
    seen: list[str | None] = []
    with ScriptedServer([Reply(disconnect_after=4)], api_key="policy-key") as server:

        def app() -> None:
            for chunk in foreign_client().chat.completions.create(**CREATE, stream=True):
                seen.append(chunk.choices[0].finish_reason)

        call = recording.call(app, route=route_to(server))
    assert type(recording.error).__name__ in ("RemoteProtocolError", "APIConnectionError")
    assert seen == [None, None, None, "stop"]
    assert (call.exact, call.complete, call.usage, call.error) == (True, True, None, None)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("what", ["auth", "hooks", "proxy", "environment"])
def test_what_the_app_put_on_its_http_client_stays_at_home(
    what: str, is_async: bool, policy: ScriptedServer, recording: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Credentials, signing hooks and proxies of the app's own HTTP client do not touch a call to the policy on this machine."""

    def sign(request: Any) -> None:
        request.headers["x-signature"] = "sk-signed"

    async def sign_async(request: Any) -> None:
        sign(request)

    if what == "environment":
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
    options: Any = {
        "auth": {"auth": ("user", "sk-password")},
        "hooks": {"event_hooks": {"request": [sign_async if is_async else sign]}},
        "proxy": {"proxy": "http://127.0.0.1:9"},
        "environment": {},
    }[what]

    async def go() -> None:
        http = openai.DefaultAsyncHttpxClient(verify=False, **options)
        async with openai.AsyncOpenAI(base_url=NOWHERE, api_key="sk-foreign", max_retries=0, http_client=http) as client:
            await client.chat.completions.create(**CREATE)

    def app() -> None:
        if is_async:
            asyncio.run(go())
            return
        http = openai.DefaultHttpxClient(verify=False, **options)
        with openai.OpenAI(base_url=NOWHERE, api_key="sk-foreign", max_retries=0, http_client=http) as client:
            client.chat.completions.create(**CREATE)

    call = recording.call(app, route=route_to(policy))
    assert recording.error is None
    assert policy.log[0].headers["authorization"] == "Bearer policy-key"
    assert "sk-" not in json.dumps(policy.log[0].headers)
    assert (call.exact, call.attempts) == (True, 1)


def test_an_asynchronous_client_is_redirected(policy: ScriptedServer, recording: Any) -> None:
    """The same for ``AsyncOpenAI`` and for legacy completions."""

    async def app() -> None:
        http = openai.DefaultAsyncHttpxClient(verify=False)
        async with openai.AsyncOpenAI(base_url=NOWHERE, api_key="sk-foreign", http_client=http) as client:
            await client.chat.completions.create(**CREATE)
            await client.completions.create(model="davinci", prompt="once")

    calls = recording.calls(lambda: asyncio.run(app()), route=route_to(policy))
    assert [exchange.path for exchange in policy.log] == ["/v1/chat/completions", "/v1/completions"]
    assert [(call.requested_model, call.model, call.exact) for call in calls] == [
        ("gpt-4o-mini", "policy", True),
        ("davinci", "policy", True),
    ]


def test_the_versions_of_the_policy_are_not_the_apps_to_see(policy: ScriptedServer, recording: Any) -> None:
    """``metadata`` with weight versions is taken out of what the app gets from the policy."""
    recording.call(lambda: foreign_client().chat.completions.create(**CREATE), route=route_to(policy))
    assert "weight_version" not in recording.value.model_dump_json(warnings=False)
    assert b"weight_version" in policy.log[0].sent


def test_a_call_that_spans_a_swap_says_so(recording: Any) -> None:
    """Versions at dispatch and at completion, and which tokens ran under which."""
    with ScriptedServer([Reply(weight_versions=[(3, 0, 2), (4, 2, 3)])], api_key="policy-key") as server:
        call = recording.call(lambda: foreign_client().chat.completions.create(**CREATE), route=route_to(server))
    assert (call.policy_version_start, call.policy_version_end, call.version_spans) == (3, 4, [(3, 0, 2), (4, 2, 3)])


@pytest.mark.parametrize("stream", [False, True])
def test_each_choice_of_a_call_that_spans_a_swap_says_so(recording: Any, stream: bool) -> None:
    """With n=2 each reply has its own spans; the call ends under the newest of them."""
    versions = [(3, 0, 3), (3, 0, 1, 1), (4, 1, 3, 1)]
    with ScriptedServer([Reply(weight_versions=versions)], api_key="policy-key") as server:
        create = foreign_client().chat.completions.create
        call = recording.call(lambda: list(create(**CREATE, n=2, stream=True)) if stream else create(**CREATE, n=2), route=route_to(server))
    assert (call.policy_version_start, call.policy_version_end, call.version_spans) == (3, 4, None)
    assert [choice.version_spans for choice in call.choices] == [None, [(3, 0, 1), (4, 1, 3)]]


def test_embeddings_keep_their_endpoint(policy: ScriptedServer, recording: Any) -> None:
    """What is no completion goes where the app sends it."""
    with ScriptedServer(api_key="own") as own:
        client = own_client(own)

        def app() -> None:
            client.embeddings.create(model="e", input="x")
            client.models.list()

        assert recording.calls(app, route=route_to(policy)) == []
        assert [exchange.path for exchange in own.log] == ["/v1/embeddings", "/v1/models"]
    assert policy.log == []


@pytest.mark.skipif(RELEASE < (1, 106), reason="this release of openai takes no function as a key")
def test_a_request_made_by_a_hook_of_a_redirected_call_is_not_taken_for_it(policy: ScriptedServer, recording: Any) -> None:
    """A token provider that asks the app's own server while a call is under way sends its own request with its own key."""
    with ScriptedServer(api_key="own") as own:
        client = own_client(own)

        def token() -> str:
            client.with_options(api_key="own").embeddings.create(model="e", input="x")
            return "own"

        http = openai.DefaultHttpxClient(verify=False)
        asking = _opened.enter_context(openai.OpenAI(base_url=own.base_url, api_key=token, http_client=http))
        call = recording.call(lambda: asking.chat.completions.create(**CREATE), route=route_to(policy))
        assert {(exchange.path, exchange.headers["authorization"]) for exchange in own.log} == {("/v1/embeddings", "Bearer own")}
    assert (call.exact, call.attempts, len(policy.log)) == (True, 1, 1)


def test_a_sub_class_that_does_not_call_on_leaks_nothing(policy: ScriptedServer, recording: Any) -> None:
    """Where a sub-class overrides ``_prepare_request``, what it adds is still taken out."""

    class Signing(openai.OpenAI):
        def _prepare_request(self, request: Any) -> None:
            request.headers["x-signature"] = "sk-signed"

    http = openai.DefaultHttpxClient(verify=False, params={"key": "sk-param"})
    client = _opened.enter_context(Signing(base_url=NOWHERE, api_key="sk-foreign", http_client=http))
    call = recording.call(lambda: client.chat.completions.create(**CREATE), route=route_to(policy))
    (exchange,) = policy.log
    assert "sk-" not in json.dumps([exchange.path, exchange.headers])
    assert (call.exact, call.attempts) == (True, 1)


def test_only_replaced_models_are_redirected(policy: ScriptedServer, recording: Any) -> None:
    """With ``replaces`` other model names keep their endpoint, and both are seen as call sites."""
    sites = CallSites()
    with ScriptedServer(api_key="own") as own:
        client = own_client(own)

        def app() -> None:
            client.chat.completions.create(**CREATE, temperature=0)
            client.chat.completions.create(model="judge", messages=MESSAGES, seed=5)
            client.chat.completions.create(**CREATE, temperature=0.5)

        calls = recording.calls(app, route=route_to(policy, replaces=frozenset({"gpt-4o-mini"}), sites=sites))
    assert [call.endpoint for call in calls] == ["policy", "own", "policy"]
    assert sites.models() == {"gpt-4o-mini", "judge"}
    assert sites.seen() == [
        CallSite(
            model="gpt-4o-mini",
            endpoint="policy",
            trained=True,
            calls=2,
            values={
                "temperature": Counter({0: 1, 0.5: 1}),
                "top_p": Counter({None: 2}),
                "top_k": Counter({None: 2}),
                "seed": Counter({None: 2}),
                "constrained": Counter({None: 2}),
            },
        ),
        CallSite(
            model="judge",
            endpoint="own",
            trained=False,
            calls=1,
            values={
                "temperature": Counter({None: 1}),
                "top_p": Counter({None: 1}),
                "top_k": Counter({None: 1}),
                "seed": Counter({5: 1}),
                "constrained": Counter({None: 1}),
            },
        ),
    ]


def test_a_refusal_of_the_policy_is_the_apps_error(recording: Any) -> None:
    """A policy that will not give ids fails the call at once; nothing is replayed."""
    with ScriptedServer(refuses={"return_token_ids": (400, "unknown field return_token_ids")}, api_key="policy-key") as server:
        call = recording.call(lambda: foreign_client().chat.completions.create(**CREATE), route=route_to(server))
        assert len(server.log) == 1
    assert isinstance(recording.error, openai.BadRequestError)
    assert call.error is not None


def test_sampling_of_the_run_overrides_the_apps_and_both_are_recorded(policy: ScriptedServer, recording: Any) -> None:
    """What was sent is the call's sampling; what the app asked for is beside it where it differs."""
    route = route_to(policy, sampling={"temperature": 1.0, "max_tokens": 64, "top_p": None})
    options: Any = {"temperature": 0, "top_p": 0.5, "stop": ["x"], "extra_body": {"max_completion_tokens": 4096}}
    call = recording.call(lambda: foreign_client().chat.completions.create(**CREATE, **options), route=route)
    assert call.sampling == {"temperature": 1.0, "max_tokens": 64, "stop": ["x"]}
    assert call.requested_sampling == {"temperature": 0, "max_completion_tokens": 4096, "top_p": 0.5, "max_tokens": None}
    assert call.exact


def test_each_call_gets_a_seed_of_its_own_that_a_rerun_repeats(policy: ScriptedServer, recording: Any) -> None:
    """Seeds follow from the rollout's seed, the role and the number of the call; a seed of the app's stays."""
    client = foreign_client()

    def app() -> None:
        client.chat.completions.create(**CREATE)
        client.chat.completions.create(**CREATE)
        client.chat.completions.create(**CREATE, seed=99)

    first = [call.sampling["seed"] for call in recording.calls(app, route=route_to(policy), seed=11)]
    again = [call.sampling["seed"] for call in recording.calls(app, route=route_to(policy), seed=11)]
    other = [call.sampling["seed"] for call in recording.calls(app, route=route_to(policy), seed=12)]
    assert first == again == [call_seed(11, "app", 0), call_seed(11, "app", 1), 99]
    assert len({*first, *other}) == 5


def test_agents_of_one_name_do_not_draw_the_same_numbers(recording: Any, policy: ScriptedServer) -> None:
    """Two solvers that ask the same: each has a seed of its own, and the first has that of a solver alone."""
    client = foreign_client()

    def solvers() -> None:
        for _ in range(2):
            with rllm.agent("solver"):
                client.chat.completions.create(**CREATE)

    calls = recording.calls(solvers, route=route_to(policy), seed=11)
    assert [call.sampling["seed"] for call in calls] == [call_seed(11, "solver", 0), call_seed(11, "solver", 0, 1)]
    assert call_seed(11, "solver", 0) != call_seed(11, "solver", 0, 1)


def test_a_call_seed_is_fixed_for_good() -> None:
    """A checkpoint of a run can be continued by another version: the numbers do not change."""
    assert [call_seed(0, "solver", 0), call_seed(0, "solver", 1), call_seed(1, "solver", 0)] == [822744125, 581607993, 1876677578]


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "function": {"name": "f"}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}},
    ],
)
def test_forced_tools_are_asked_for_as_auto(choice: Any, policy: ScriptedServer, recording: Any) -> None:
    """The policy is asked with ``tool_choice="auto"``, so that its logprobs are its own; both values are recorded."""
    call = recording.call(
        lambda: foreign_client().chat.completions.create(**CREATE, tools=[TOOL], tool_choice=choice), route=route_to(policy)
    )
    assert policy.log[0].body["tool_choice"] == "auto"
    assert (call.sampling["tool_choice"], call.requested_sampling) == ("auto", {"tool_choice": choice})
    assert (call.exact, call.trainable) == (True, True)


def test_constrained_calls_can_be_left_inexact(policy: ScriptedServer, recording: Any) -> None:
    """``inexact`` sends the app's own value."""
    route = route_to(policy, constrained="inexact")
    call = recording.call(lambda: foreign_client().chat.completions.create(**CREATE, tools=[TOOL], tool_choice="required"), route=route)
    assert policy.log[0].body["tool_choice"] == "required"
    assert (call.exact, call.inexact_reason) == (False, "constrained: tool_choice required")


@pytest.mark.parametrize("options", [{"tools": [TOOL], "tool_choice": "required"}, {"response_format": {"type": "json_object"}}])
def test_constrained_calls_can_be_refused(options: Any, policy: ScriptedServer, recording: Any) -> None:
    """``refuse`` raises a sentence that names the constraint, before anything is sent."""
    recording.call(lambda: foreign_client().chat.completions.create(**CREATE, **options), route=route_to(policy, constrained="refuse"))
    assert isinstance(recording.error, CallRefusedError)
    assert "constrained='as_auto'" in str(recording.error)
    assert policy.log == []


def test_a_response_format_stays_and_is_inexact(policy: ScriptedServer, recording: Any) -> None:
    """A grammar that is no forced tool is sent as it is and named."""
    call = recording.call(
        lambda: foreign_client().chat.completions.create(**CREATE, response_format={"type": "json_object"}), route=route_to(policy)
    )
    assert policy.log[0].body["response_format"] == {"type": "json_object"}
    assert call.inexact_reason == "constrained: response_format json_object"


def test_the_timeout_of_the_route_limits_an_attempt(recording: Any) -> None:
    """A policy that does not answer ends the call within ``call_timeout``, whatever the client's own timeout is."""
    with ScriptedServer([Reply(hold_after=0)], api_key="policy-key") as server:
        client = foreign_client(timeout=600)
        call = recording.call(lambda: client.chat.completions.create(**CREATE), route=route_to(server, call_timeout=0.2))
    assert isinstance(recording.error, openai.APITimeoutError)
    assert call.attempts == 1
    assert client.timeout == 600


def test_a_shorter_timeout_of_the_app_stays(recording: Any) -> None:
    """The route's limit only lowers."""
    with ScriptedServer([Reply(hold_after=0)], api_key="policy-key") as server:
        call = recording.call(
            lambda: foreign_client().chat.completions.create(**CREATE, timeout=0.2), route=route_to(server, call_timeout=500)
        )
    assert isinstance(recording.error, openai.APITimeoutError)
    assert call.error is not None


def test_an_endpoint_can_be_chosen_for_each_call(policy: ScriptedServer, recording: Any) -> None:
    """``resolve`` sees the scope of the call; what it raises is the call's error."""
    seen: list[str] = []

    def resolve(scope: Any) -> Endpoint:
        seen.append(scope.trajectory_name)
        if len(seen) > 1:
            raise RuntimeError("no server is ready")
        return Endpoint(base_url=policy.base_url, api_key="policy-key", model="chosen")

    client = foreign_client()

    def app() -> None:
        client.chat.completions.create(**CREATE)
        with pytest.raises(RuntimeError, match="no server is ready"):
            client.chat.completions.create(**CREATE)

    calls = recording.calls(app, route=Route(base_url="", api_key="", model="", resolve=resolve))
    assert seen == ["app", "app"]
    assert [(call.model, call.error and call.error.type) for call in calls] == [("chosen", None), ("gpt-4o-mini", "RuntimeError")]


def test_a_route_ends_with_its_block_and_follows_the_context() -> None:
    """Inside another route the inner one holds; None switches redirection off; threads without the context have none."""
    outer, inner = Route(base_url="a", api_key="k", model="m"), Route(base_url="b", api_key="k", model="m")
    with use_route(outer):
        with use_route(inner):
            assert current_route() is inner
        with use_route(None):
            assert current_route() is None
        assert current_route() is outer
    assert current_route() is None


def test_keys_do_not_show() -> None:
    """The repr of a route or an endpoint has no key."""
    assert "sk-1" not in repr(Route(base_url="http://x/v1", api_key="sk-1", model="m"))
    assert "sk-1" not in repr(Endpoint(base_url="http://x/v1", api_key="sk-1", model="m"))


def test_many_workflows_share_one_client_and_two_servers(recording: Any) -> None:
    """Eight concurrent rollouts with two routes through one client: every call arrives where its own route points."""
    from rllm_trace._decorators import workflow
    from rllm_trace.clients import ensure
    from rllm_trace.rollouts import rollout

    ensure()

    def echo(exchange: Any) -> Reply:
        number = int(exchange.body["messages"][0]["content"])
        return Reply(choices=[ReplyChoice(token_ids=[number, 2], logprobs=[-1.0, -0.5])])

    client = foreign_client()

    @workflow
    def app(number: int) -> None:
        for _ in range(5):
            client.chat.completions.create(model="any", messages=[{"role": "user", "content": str(number)}])

    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(ScriptedServer(echo, api_key="policy-key")) for _ in range(2)]

        def one(number: int) -> list[Any]:
            with rollout(route=route_to(servers[number % 2])) as handle:
                app(number)
            (episode,) = handle.wait(5)
            return [(call.server, call.choices[0].token_ids, call.exact) for call in episode.calls]

        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(one, range(8)))
        hosts = [server.base_url.split("/")[2] for server in servers]
    assert results == [[(hosts[number % 2], [number, 2], True)] * 5 for number in range(8)]


def test_which_headers_may_leave() -> None:
    """What the client library and we need stays; the rest may be a secret."""
    assert [name for name in ("Authorization", "api-key", "Cookie", "X-Title", "OpenAI-Organization") if kept_header(name)] == []
    assert all(kept_header(name) for name in ("Content-Type", "X-Stainless-Raw-Response", "traceparent", "x-rllm-episode-id", "Host"))


def test_reshaping_leaves_the_apps_body_alone() -> None:
    """The app's dictionary is not changed, and what did not change is not listed."""
    body = {"model": "policy", "messages": MESSAGES, "temperature": 1.0}
    sent, changed = reshaped(body, Route(base_url="", api_key="", model="policy", sampling={"temperature": 1.0}), "policy", None)
    assert sent == body
    assert sent is not body
    assert changed == {}


@pytest.mark.parametrize("broken", ["with_call", "is_sound"])
def test_a_fault_of_ours_sends_no_redirected_call_to_the_apps_endpoint(
    broken: str, policy: ScriptedServer, monkeypatch: pytest.MonkeyPatch, recording: Any
) -> None:
    """Where we fail at leading a call to the policy it fails too, by name: an answer of another model would be taken for the policy's."""

    def fails(*_: Any) -> Any:
        raise RuntimeError("ours")

    monkeypatch.setattr(f"rllm_trace.clients.openai.{broken}", fails)
    counted = counters.get("faults", "client")
    http = openai.DefaultHttpxClient(verify=False)
    with ScriptedServer() as own, openai.OpenAI(base_url=own.base_url, api_key=own.api_key, max_retries=0, http_client=http) as client:
        call = recording.call(lambda: client.chat.completions.create(**CREATE), route=route_to(policy))
        assert (own.log, policy.log) == ([], [])
    assert isinstance(recording.error, CallRefusedError)
    assert "must not reach the app's own endpoint" in str(recording.error)
    assert call.error.type == "rllm_trace.exceptions.CallRefusedError"
    assert counters.get("faults", "client") == counted + 1
    counters.add("faults", "client", -1)
