"""Spans over OTLP: our exporter and OpenTelemetry's, HTTP and gRPC, into a real receiver in this process."""

from __future__ import annotations

import gzip
import json
import logging
import os
import random
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult

import rllm_trace as rllm
from rllm_trace._disclosure import Disclosure
from rllm_trace._guard import counters
from rllm_trace._otlp_decode import spans_of_json
from rllm_trace._spans import Span
from rllm_trace.episodes import build_episode
from rllm_trace.exceptions import ConfigurationError
from rllm_trace.exporters import OTLPExporter
from rllm_trace.exporters._otlp_settings import otlp_settings
from rllm_trace.exporters._readable import converter
from rllm_trace.otlp_receiver import OTLPReceiver

PROTOCOLS = ["http/protobuf", "grpc"]


@pytest.fixture
def receiver() -> Iterator[OTLPReceiver]:
    with OTLPReceiver(grpc=True) as receiver:
        yield receiver


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in list(os.environ):
        if key.startswith("OTEL_"):
            monkeypatch.delenv(key)


def exporter(receiver: OTLPReceiver, protocol: str, **options: Any) -> OTLPExporter:
    endpoint = receiver.grpc_endpoint if protocol == "grpc" else f"{receiver.http_endpoint}/v1/traces"
    return OTLPExporter(endpoint, protocol=protocol, headers=receiver.headers, **options)


def readable(*spans: Span) -> list[ReadableSpan]:
    convert = converter("app")
    return [convert(span, Disclosure(content=True, tokens=True)) for span in spans]


def wide(text: str, number: int = 0) -> ReadableSpan:
    """A span of ours with one large attribute."""
    (span,) = readable(
        Span(
            kind="other",
            name=f"wide {number}",
            trace_id="1" * 32,
            span_id=f"{number + 1:016x}",
            parent_id=None,
            episode_id="ep-1",
            trajectory_id="1" * 16,
            trajectory_name="t",
            started=1,
            ended=2,
            facts={"payload": text},
        )
    )
    return span


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("compression", ["none", "gzip", "deflate"])
def test_an_episode_arrives_whole(receiver: OTLPReceiver, spans: dict[str, Span], protocol: str, compression: str) -> None:
    """Ids, parents, times and tokens are those that were sent, so that the receiving process builds the equal episode."""
    spans["tool"].facts["gen_ai.tool.call.result"] = "a result"
    sender = exporter(receiver, protocol, compression=compression)
    assert sender.export(readable(*spans.values())) is SpanExportResult.SUCCESS
    sender.shutdown()
    received = receiver.spans()
    assert [span.name for span in received] == [
        "invoke_workflow solve",
        "invoke_agent solver",
        "chat policy",
        "execute_tool add",
        "rllm.reward exact",
    ]
    assert received[0].resource["service.name"] == "app"
    assert received[0].links == (("fedcba9876543210fedcba9876543210", "00000000000000ff"),)
    assert (received[2].kind, received[3].status, received[3].status_message) == ("client", "error", "no number in What is 2+2?")
    assert [span.ours() for span in received] == list(spans.values())
    assert build_episode([span for span in (span.ours() for span in received) if span]) == build_episode(list(spans.values()))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_opentelemetrys_own_exporter_is_understood(receiver: OTLPReceiver, spans: dict[str, Span], protocol: str) -> None:
    """A child that uses the plain SDK reaches the receiver by its standard variables, out of order and gzipped."""
    program = """
import os, sys
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
if os.environ["OTEL_EXPORTER_OTLP_PROTOCOL"] == "grpc":
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
else:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter()))
tracer = provider.get_tracer("theirs")
with tracer.start_as_current_span("outer"):
    with tracer.start_as_current_span("inner", attributes={"list": [1, 2], "f": 0.5, "b": True}):
        pass
provider.shutdown()
"""
    environ = os.environ | receiver.environ(protocol) | {"OTEL_EXPORTER_OTLP_COMPRESSION": "gzip"}
    subprocess.run([sys.executable, "-c", program], env=environ, check=True, timeout=60)
    inner, outer = receiver.spans()
    assert (inner.name, outer.name) == ("inner", "outer")
    assert inner.parent_id == outer.span_id
    assert (inner.attributes, inner.scope) == ({"list": [1, 2], "f": 0.5, "b": True}, "theirs")
    assert inner.ours() is None


def post(url: str, body: bytes, **headers: str) -> tuple[int, bytes]:
    request = urllib.request.Request(
        url, data=body, headers={key.replace("_", "-"): value for key, value in headers.items()}, method="POST"
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=20) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


JSON_REQUEST = {
    "resourceSpans": [
        {
            "resource": {"attributes": [{"key": "service.name", "value": {"stringValue": "js"}}]},
            "scopeSpans": [
                {
                    "scope": {"name": "node"},
                    "spans": [
                        {
                            "traceId": "0123456789ABCDEF0123456789abcdef",
                            "spanId": "00000000000000c1",
                            "parentSpanId": "",
                            "name": "json",
                            "kind": 3,
                            "startTimeUnixNano": "1700000000000000001",
                            "endTimeUnixNano": 1700000000000000002,
                            "attributes": [
                                {"key": "i", "value": {"intValue": "9007199254740993"}},
                                {"key": "d", "value": {"doubleValue": 0.5}},
                                {"key": "b", "value": {"boolValue": False}},
                                {"key": "raw", "value": {"bytesValue": "AP8="}},
                                {"key": "l", "value": {"arrayValue": {"values": [{"stringValue": "x"}, {"intValue": 2}]}}},
                                {"key": "m", "value": {"kvlistValue": {"values": [{"key": "k", "value": {"stringValue": "v"}}]}}},
                                {"key": "none", "value": {}},
                            ],
                            "status": {"code": "STATUS_CODE_ERROR", "message": "no"},
                            "events": [{"name": "e", "timeUnixNano": "5", "attributes": []}],
                            "links": [{"traceId": "f" * 32, "spanId": "e" * 16}],
                        }
                    ],
                }
            ],
        }
    ]
}


def test_json_is_understood(receiver: OTLPReceiver) -> None:
    """Hex ids in either case, 64-bit integers as text or number, enums by name or number, every kind of value."""
    url = f"{receiver.http_endpoint}/v1/traces"
    body = gzip.compress(json.dumps(JSON_REQUEST).encode())
    assert post(url, body, content_type="application/json; charset=utf-8", content_encoding="gzip", **receiver.headers) == (200, b"{}")
    (span,) = receiver.take()
    assert (span.trace_id, span.span_id, span.parent_id) == ("0123456789abcdef0123456789abcdef", "00000000000000c1", None)
    assert (span.kind, span.status, span.status_message, span.scope) == ("client", "error", "no", "node")
    assert (span.started, span.ended) == (1_700_000_000_000_000_001, 1_700_000_000_000_000_002)
    assert span.attributes == {
        "i": 9007199254740993,
        "d": 0.5,
        "b": False,
        "raw": b"\x00\xff",
        "l": ["x", 2],
        "m": {"k": "v"},
        "none": None,
    }
    assert span.events == (("e", 5, {}),)
    assert span.links == (("f" * 32, "e" * 16),)
    assert receiver.spans() == []


def test_ids_in_base64_are_understood() -> None:
    """Exporters that print protobuf's own JSON write ids so."""
    document = json.loads(json.dumps(JSON_REQUEST))
    span = document["resourceSpans"][0]["scopeSpans"][0]["spans"][0]
    span["traceId"], span["spanId"] = "ASNFZ4mrze8BI0VniavN7w==", "AAAAAAAAAME="
    (found,) = spans_of_json(json.dumps(document))
    assert (found.trace_id, found.span_id) == ("0123456789abcdef0123456789abcdef", "00000000000000c1")


def test_requests_that_are_wrong_get_a_reason(receiver: OTLPReceiver) -> None:
    """Nothing is taken from them, and nothing of the sender's is echoed but what it must correct."""
    url = f"{receiver.http_endpoint}/v1/traces"
    good = {"content_type": "application/x-protobuf", **receiver.headers}
    assert post(url, b"", content_type="application/x-protobuf") == (401, b"missing or wrong bearer token")
    assert post(url, b"", content_type="application/x-protobuf", authorization="Bearer wrong")[0] == 401
    assert post(f"{receiver.http_endpoint}/v1/logs", b"", **good) == (404, b"got '/v1/logs'; spans go to /v1/traces")
    assert post(url, b"{}", **{**good, "content_type": "text/html"})[0] == 415
    assert post(url, b"\xff\xff", **good)[0] == 400
    assert post(url, b"{}", **{**good, "content_type": "application/json"})[0] == 400
    assert post(url, b"[1]", **{**good, "content_type": "application/json"})[0] == 400
    assert post(url, b"not gzip", content_encoding="gzip", **good)[0] == 400
    assert post(url, b"x", content_encoding="br", **good)[0] == 415
    assert receiver.spans() == []


def test_a_bomb_is_refused(spans: dict[str, Span]) -> None:
    """A small body that inflates beyond the limit ends there."""
    with OTLPReceiver(max_body=100_000) as receiver:
        url = f"{receiver.http_endpoint}/v1/traces"
        body = gzip.compress(b"\0" * 10_000_000)
        assert post(url, body, content_type="application/x-protobuf", content_encoding="gzip", **receiver.headers)[0] == 413
        assert post(url, b"\0" * 100_001, content_type="application/x-protobuf", **receiver.headers)[0] == 413


def test_grpc_needs_the_token(receiver: OTLPReceiver, spans: dict[str, Span]) -> None:
    """A sender without it is refused at once, without retries, and nothing is taken."""
    sender = OTLPExporter(receiver.grpc_endpoint, protocol="grpc")
    assert sender.export(readable(spans["agent"])) is SpanExportResult.FAILURE
    sender.shutdown()
    assert receiver.spans() == []


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_full_receiver_says_how_many_it_rejected(spans: dict[str, Span], protocol: str) -> None:
    """The sender counts as lost what was not taken, and only that."""
    with OTLPReceiver(grpc=True, max_spans=2) as receiver:
        sender = exporter(receiver, protocol)
        assert sender.deliver(readable(*spans.values())) == 2
        sender.shutdown()
        assert len(receiver.spans()) == 2
        assert receiver.rejected == 3


def test_a_port_in_use_is_said() -> None:
    """One sentence names it."""
    with OTLPReceiver(grpc=True) as receiver:
        port = int(receiver.http_endpoint.rpartition(":")[2])
        with pytest.raises(ConfigurationError, match=f"cannot listen on 127.0.0.1:{port} "):
            OTLPReceiver(http_port=port)
        port = int(receiver.grpc_endpoint.rpartition(":")[2])
        with pytest.raises(ConfigurationError, match=f"cannot listen on 127.0.0.1:{port} "):
            OTLPReceiver(http=False, grpc=True, grpc_port=port)


def test_the_receiver_leaves_nothing_behind() -> None:
    """Its threads end with it, and its port is free again."""
    before = set(threading.enumerate())
    receiver = OTLPReceiver()
    port = int(receiver.http_endpoint.rpartition(":")[2])
    receiver.close()
    assert [thread for thread in set(threading.enumerate()) - before if thread.is_alive()] == []
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", port))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_batch_is_split_by_size(receiver: OTLPReceiver, protocol: str, caplog: pytest.LogCaptureFixture) -> None:
    """Thirty spans of 400 kB, which no gRPC receiver takes at once, all arrive, in order."""
    sizes: list[int] = []
    sender = exporter(receiver, protocol)
    send = sender._transport.send

    def watched(body: bytes, timeout: float) -> Any:
        sizes.append(len(body))
        return send(body, timeout)

    sender._transport.send = watched  # type: ignore[method-assign]
    assert sender.deliver([wide("x" * 400_000, number) for number in range(30)]) == 30
    sender.shutdown()
    assert [span.name for span in receiver.spans()] == [f"wide {number}" for number in range(30)]
    assert max(sizes) <= 4 * 2**20


def test_a_span_of_five_megabytes_goes_whole_over_http(receiver: OTLPReceiver) -> None:
    """An HTTP receiver takes it by default."""
    sender = exporter(receiver, "http/protobuf")
    assert sender.deliver([wide("small"), wide("x" * 5_000_000, 1)]) == 2
    sender.shutdown()
    assert len(receiver.spans()[1].attributes["payload"]) == 5_000_000


def test_a_span_too_large_for_grpc_names_what_it_left_behind(receiver: OTLPReceiver) -> None:
    """The span arrives without its largest attribute instead of failing its batch; identity stays."""
    sender = exporter(receiver, "grpc")
    assert sender.deliver([wide("small"), wide("x" * 5_000_000, 1), wide("small", 2)]) == 3
    sender.shutdown()
    small, cut, _ = receiver.spans()
    assert small.attributes["payload"] == "small"
    assert "payload" not in cut.attributes
    assert cut.attributes["rllm.export.omitted_attributes"] == ["payload"]
    assert cut.attributes["rllm.episode.id"] == "ep-1"


def test_views_are_left_behind_before_the_record(receiver: OTLPReceiver, spans: dict[str, Span]) -> None:
    """What only repeats the request for display goes first: the call comes out exact all the same."""
    body = {"model": "policy", "messages": [{"role": "user", "content": "y" * 2_500_000}]}
    spans["chat"].call.request = json.dumps(body).encode()
    sender = exporter(receiver, "grpc")
    assert sender.deliver(readable(spans["chat"])) == 1
    sender.shutdown()
    (received,) = receiver.spans()
    assert received.attributes["rllm.export.omitted_attributes"] == ["gen_ai.input.messages"]
    assert received.ours().call == spans["chat"].call


def test_a_call_that_lost_part_of_its_record_is_inexact(receiver: OTLPReceiver, spans: dict[str, Span]) -> None:
    """What was left behind on the way is the reason that the rebuilt call gives."""
    body = {"model": "policy", "messages": [{"role": "user", "content": "y" * 4_500_000}]}
    spans["chat"].call.request = json.dumps(body).encode()
    sender = exporter(receiver, "grpc")
    assert sender.deliver(readable(spans["chat"])) == 1
    sender.shutdown()
    call = receiver.spans()[0].ours().call
    assert call.exact is False
    assert call.inexact_reason == "too large to be exported: rllm.request.body"


class Script(HTTPServer):
    """Answers each POST with the next status of a list, then 200."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)
        self.seen: list[str] = []
        super().__init__(("127.0.0.1", 0), Scripted)
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1/traces"


class Scripted(BaseHTTPRequestHandler):
    server: Script

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.server.seen.append(self.path)
        status = self.server.statuses.pop(0) if self.server.statuses else 200
        self.send_response(status)
        if status == 302:
            self.send_header("location", "http://127.0.0.1:1/elsewhere")
        self.send_header("retry-after", "0")
        self.send_header("content-length", "0")
        self.end_headers()


@pytest.fixture
def script() -> Iterator[Any]:
    servers: list[Script] = []

    def start(*statuses: int) -> Script:
        servers.append(Script(*statuses))
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_what_may_pass_later_is_tried_again(script: Any, spans: dict[str, Span]) -> None:
    """503 and 429 are asked again within the timeout of the batch, and then counted as delivered."""
    server = script(503, 429)
    sender = OTLPExporter(server.url)
    sender._random.uniform = lambda low, high: 0.001  # type: ignore[method-assign]
    assert sender.deliver(readable(spans["agent"])) == 1
    assert len(server.seen) == 3


@pytest.mark.parametrize("status", [400, 401, 302, 500])
def test_what_will_never_pass_is_given_up_at_once(
    script: Any, spans: dict[str, Span], status: int, caplog: pytest.LogCaptureFixture
) -> None:
    """One request, one log line that names endpoint and status and no header."""
    server = script(status)
    sender = OTLPExporter(server.url, headers={"authorization": "Bearer SECRET"})
    with caplog.at_level(logging.WARNING, "rllm_trace"):
        assert sender.deliver(readable(spans["agent"])) == 0
        assert sender.deliver(readable(spans["agent"])) == 1
    assert len(server.seen) == 2
    assert f"HTTP {status}" in caplog.text
    assert "SECRET" not in caplog.text + repr(sender.settings)


def test_a_receiver_with_a_lower_limit_gets_the_parts(script: Any, spans: dict[str, Span]) -> None:
    """413 for a batch: its halves are sent instead."""
    server = script(413)
    assert OTLPExporter(server.url).deliver(readable(*spans.values())) == 5
    assert len(server.seen) == 3


def test_a_large_batch_goes_in_as_few_requests_as_fit_it(script: Any) -> None:
    """Ten spans of a million bytes: three of them fit into the 4 MB of a request, so there are four requests."""
    server = script()
    assert OTLPExporter(server.url).deliver([wide("x" * 1_000_000, number) for number in range(10)]) == 10
    assert len(server.seen) == 4


def test_shutdown_ends_a_wait(script: Any, spans: dict[str, Span]) -> None:
    """A sender that waits before trying again gives up as soon as it is told."""
    server = script(*[503] * 50)
    sender = OTLPExporter(server.url, timeout=1000)
    sender._random.uniform = lambda low, high: 1000.0  # type: ignore[method-assign]
    done: list[int] = []
    thread = threading.Thread(target=lambda: done.append(sender.deliver(readable(spans["agent"]))))
    thread.start()
    sender.shutdown()
    thread.join(20)
    assert done == [0]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_sending_leaves_the_apps_random_numbers_alone(receiver: OTLPReceiver, spans: dict[str, Span], protocol: str) -> None:
    """Jitter comes from the system's generator: a seeded run is the same with and without export."""
    random.seed(7)
    expected = [random.random() for _ in range(3)]
    random.seed(7)
    sender = exporter(receiver, protocol)
    sender.deliver(readable(*spans.values()))
    sender.shutdown()
    assert [random.random() for _ in range(3)] == expected


def test_a_proxy_is_left_aside_on_loopback(receiver: OTLPReceiver, spans: dict[str, Span], monkeypatch: pytest.MonkeyPatch) -> None:
    """With http_proxy set to something else, spans for this machine still arrive."""
    for name in ("http_proxy", "HTTP_PROXY", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for protocol in PROTOCOLS:
        sender = exporter(receiver, protocol)
        assert sender.deliver(readable(spans["agent"])) == 1
        sender.shutdown()


def test_one_span_that_cannot_be_encoded_does_not_lose_its_batch(receiver: OTLPReceiver, spans: dict[str, Span]) -> None:
    """A third party's span with a name that is no text costs that span."""
    bad = wide("x")
    bad._name = 5
    sender = exporter(receiver, "http/protobuf")
    assert sender.deliver([wide("a", 1), bad, wide("b", 2)]) == 2
    sender.shutdown()
    assert [span.name for span in receiver.spans()] == ["wide 1", "wide 2"]


def test_settings_come_from_the_standard_variables() -> None:
    """Those of traces win over those of all signals, an argument over both."""
    environ = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "https://collector:4318/base/",
        "OTEL_EXPORTER_OTLP_HEADERS": "api-key=a%20b,X-Other = c=d",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "2500",
        "OTEL_EXPORTER_OTLP_TRACES_COMPRESSION": "gzip",
        "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
        "OTEL_EXPORTER_OTLP_CERTIFICATE": "/ca.pem",
    }
    found = otlp_settings(environ)
    assert (found.protocol, found.endpoint, found.secure) == ("http/protobuf", "https://collector:4318/base/v1/traces", True)
    assert found.headers == {"api-key": "a b", "x-other": "c=d"}
    assert (found.timeout, found.compression, found.certificate, found.loopback) == (2.5, "gzip", "/ca.pem", False)
    assert otlp_settings({**environ, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x/y"}).endpoint == "http://x/y"
    assert otlp_settings(environ, endpoint="http://z/v1/traces", timeout=7, compression="deflate").timeout == 7
    assert otlp_settings({}).endpoint == "http://localhost:4318/v1/traces"


def test_settings_of_grpc() -> None:
    """Host and port; TLS unless the scheme is http or the variable says insecure."""
    grpc = {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
    default = otlp_settings(grpc)
    assert (default.endpoint, default.secure, default.loopback) == ("localhost:4317", False, True)
    assert otlp_settings({**grpc, "OTEL_EXPORTER_OTLP_ENDPOINT": "https://c:1"}).secure is True
    bare = otlp_settings({**grpc, "OTEL_EXPORTER_OTLP_ENDPOINT": "c:1"})
    assert (bare.endpoint, bare.secure) == ("c:1", True)
    assert otlp_settings({**grpc, "OTEL_EXPORTER_OTLP_ENDPOINT": "c:1", "OTEL_EXPORTER_OTLP_INSECURE": "true"}).secure is False


@pytest.mark.parametrize(
    "environ, message",
    [
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, "OTEL_EXPORTER_OTLP_PROTOCOL='http/json': expected http/protobuf or grpc"),
        ({"OTEL_EXPORTER_OTLP_TIMEOUT": "soon"}, "OTEL_EXPORTER_OTLP_TIMEOUT='soon': expected a number of milliseconds"),
        ({"OTEL_EXPORTER_OTLP_TIMEOUT": "0"}, "OTLP timeout 0: expected a number above 0"),
        (
            {"OTEL_EXPORTER_OTLP_HEADERS": "a=1,SECRET"},
            "OTEL_EXPORTER_OTLP_HEADERS: entry 2 is no name=value; separate entries with commas",
        ),
        ({"OTEL_EXPORTER_OTLP_TRACES_COMPRESSION": "br"}, "OTEL_EXPORTER_OTLP_TRACES_COMPRESSION='br': expected none or gzip or deflate"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "ftp://x"}, "OTLP endpoint of scheme 'ftp': expected http or https"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://"}, "OTLP endpoint 'http://': expected a URL such as http://localhost:4318"),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://me:SECRET@host"},
            "OTLP endpoint at host with credentials in its URL: put them into OTEL_EXPORTER_OTLP_HEADERS",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(environ: dict[str, str], message: str) -> None:
    """The variable, what it has, what it may have; never a secret."""
    with pytest.raises(ConfigurationError) as raised:
        otlp_settings(environ)
    assert str(raised.value) == message


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_workflow_arrives_by_name_and_variables(receiver: OTLPReceiver, protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``exporters=["otlp"]`` and the standard variables are all it takes; without a word on content, none is sent."""
    for key, value in receiver.environ(protocol).items():
        monkeypatch.setenv(key, value)

    @rllm.workflow
    def solve(question: str) -> str:
        return "SECRET"

    rllm.configure(exporters=["otlp"], service_name="demo")
    try:
        assert solve("SECRET?") == "SECRET"
        assert rllm.flush(20) is True
    finally:
        rllm.shutdown()
        rllm.configure()
    (span,) = receiver.spans()
    assert (span.name, span.resource["service.name"]) == ("invoke_workflow solve", "demo")
    assert "SECRET" not in repr(span)


def test_a_dead_back_end_blocks_nobody(spans: dict[str, Span]) -> None:
    """With nothing listening, the app goes on, a flush ends at its deadline, and every span is counted as lost."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]

    @rllm.workflow
    def solve() -> int:
        return 4

    before = counters.get("failed", "span") + counters.get("dropped", "span")
    rllm.configure(exporters=[OTLPExporter(f"http://127.0.0.1:{port}/v1/traces", timeout=0.3)])
    try:
        assert [solve() for _ in range(3)] == [4, 4, 4]
        assert rllm.flush(0.05) is False
    finally:
        rllm.shutdown(20)
        rllm.configure()
    assert counters.get("failed", "span") + counters.get("dropped", "span") - before == 3


@pytest.mark.jaeger
def test_a_real_jaeger_takes_an_episode(spans: dict[str, Span]) -> None:
    """The server that RLLM_TEST_JAEGER_URL names accepts the request."""
    sender = OTLPExporter(f"{os.environ['RLLM_TEST_JAEGER_URL'].rstrip('/')}/v1/traces")
    assert sender.deliver(readable(*spans.values())) == 5
