"""A real OTLP receiver inside this process: spans of other processes in, received spans out, over HTTP and gRPC.

    with OTLPReceiver(grpc=True) as receiver:
        subprocess.run(command, env=os.environ | receiver.environ("http/protobuf"))
    spans = receiver.spans()

It listens on loopback, unless it is given another host, and takes only what carries its token. HTTP understands protobuf and JSON, plain,
gzip and deflate. What is taken is kept in a list of bounded size and given to ``on_spans``, on the receiver's threads; what does not fit is
rejected and counted, and the sender is told. Everything it starts ends with ``close``.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import threading
import zlib
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, Self, cast
from urllib.parse import quote

from rllm_trace import attributes as names
from rllm_trace._guard import guard
from rllm_trace._otlp_decode import ReceivedSpan, spans_of_json, spans_of_message, spans_of_protobuf
from rllm_trace.exceptions import ConfigurationError

__all__ = ["OTLPReceiver", "ReceivedSpan"]

_LOOPBACK: Final = "127.0.0.1"
_PATH: Final = "/v1/traces"
_MAX_BODY: Final = 64 * 2**20
_MAX_SPANS: Final = 100_000
_MAX_CONNECTIONS: Final = 256
_SILENCE: Final = 30.0
"""Seconds after which a connection that says nothing is closed."""
_CLOSE: Final = 5.0
_PROTOBUF: Final = "application/x-protobuf"
_JSON: Final = "application/json"
_GRPC_THREADS: Final = 4
_INSTALL: Final = "the OTLP receiver needs a package that is not installed ({}): pip install 'rllm-trace[otlp]'"


class OTLPReceiver:
    """Listens from its construction until ``close``; a context manager.

    ``host``: an address of this machine, the one that senders use. Ports of 0 are chosen by the system. ``token=None`` makes one up.
    Raises ConfigurationError if it cannot listen there, or if the packages of a protocol are missing (extra ``otlp``).
    """

    def __init__(
        self,
        *,
        host: str = _LOOPBACK,
        http: bool = True,
        grpc: bool = False,
        http_port: int = 0,
        grpc_port: int = 0,
        token: str | None = None,
        on_spans: Callable[[list[ReceivedSpan]], None] | None = None,
        max_spans: int = _MAX_SPANS,
        max_body: int = _MAX_BODY,
    ) -> None:
        self._host = f"[{host}]" if ":" in host else host
        self.token = token or secrets.token_urlsafe(24)
        self.max_body = max_body
        """Bytes of one request, uncompressed; larger ones are refused."""
        self.rejected = 0
        """Spans that did not fit, since the start."""
        self._on_spans = on_spans
        self._max_spans = max_spans
        self._spans: list[ReceivedSpan] = []
        self._changed = threading.Condition()
        self._http: _HTTPServer | None = None
        self._grpc: Any = None
        self._grpc_port = 0
        try:
            if http:
                _check_protobuf()
                self._http = _HTTPServer(self, host, http_port)
            if grpc:
                self._grpc, self._grpc_port = _grpc_server(self, self._host, grpc_port)
        except BaseException:
            self.close()
            raise

    @property
    def headers(self) -> dict[str, str]:
        """What a sender must send along."""
        return {names.HEADER_AUTHORIZATION: f"Bearer {self.token}"}

    @property
    def http_endpoint(self) -> str:
        """Base URL; senders add ``/v1/traces``."""
        assert self._http is not None, "the receiver was made with http=False"
        return f"http://{self._host}:{self._http.server_port}"

    @property
    def grpc_endpoint(self) -> str:
        """URL for gRPC senders."""
        assert self._grpc is not None, "the receiver was made with grpc=False"
        return f"http://{self._host}:{self._grpc_port}"

    def environ(self, protocol: str = "http/protobuf") -> dict[str, str]:
        """Variables that make any OpenTelemetry SDK of a child process send its spans here."""
        endpoint = self.grpc_endpoint if protocol == "grpc" else self.http_endpoint
        headers = ",".join(f"{key}={quote(value)}" for key, value in self.headers.items())
        given = {"ENDPOINT": endpoint, "HEADERS": headers, "PROTOCOL": protocol}
        return {names.ENV_OTLP + key: value for key, value in given.items()}

    def spans(self) -> list[ReceivedSpan]:
        """What has been received and is still kept, in the order of arrival."""
        with self._changed:
            return list(self._spans)

    def take(self) -> list[ReceivedSpan]:
        """The same, and forgets it."""
        with self._changed:
            taken, self._spans = self._spans, []
            return taken

    def wait(self, count: int, timeout: float) -> bool:
        """Blocks until at least ``count`` spans are kept. False: the deadline came first."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._spans) >= count, max(0.0, timeout))

    def close(self) -> None:
        """Stops listening and ends its threads, within seconds."""
        if self._http is not None:
            self._http.stop()
        if self._grpc is not None:
            self._grpc.stop(0).wait(_CLOSE)

    def abandon(self) -> None:
        """In a forked child: closes its copy of the listening socket; the parent's goes on listening."""
        if self._http is not None:
            self._http.server_close_socket()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def accepts(self, authorization: str) -> bool:
        """Whether the header carries the token; takes the same time whatever is wrong with it."""
        return hmac.compare_digest(authorization.encode(), f"Bearer {self.token}".encode())

    def receive(self, spans: list[ReceivedSpan]) -> int:
        """Takes spans in; gives how many did not fit."""
        with self._changed:
            room = max(0, self._max_spans - len(self._spans))
            kept, refused = spans[:room], len(spans) - min(room, len(spans))
            self._spans += kept
            self.rejected += refused
            self._changed.notify_all()
        if kept and self._on_spans is not None:
            with guard("receiver of spans"):
                self._on_spans(kept)
        return refused


class _Refusal(Exception):
    """An HTTP answer that is no success."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _HTTPServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, receiver: OTLPReceiver, host: str, port: int) -> None:
        self.receiver = receiver
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._connections = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise ConfigurationError(
                f"the OTLP receiver cannot listen on {host}:{port} ({error}); give an address of this machine, or another http_port"
            ) from error
        self._thread = threading.Thread(target=self.serve_forever, args=(0.1,), name="rllm-otlp-http", daemon=True)
        self._thread.start()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._connections.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A sender that hangs up is no news."""

    def server_close_socket(self) -> None:
        self.socket.close()

    def stop(self) -> None:
        self.shutdown()
        self._thread.join(_CLOSE)
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _SILENCE

    @property
    def _receiver(self) -> OTLPReceiver:
        assert isinstance(self.server, _HTTPServer)
        return self.server.receiver

    def log_message(self, format: str, *args: Any) -> None:
        """Headers and paths stay out of the app's stderr."""

    def do_POST(self) -> None:
        kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        try:
            rejected = self._receiver.receive(self._decoded(kind))
        except _Refusal as refusal:
            self._answer(refusal.status, "text/plain; charset=utf-8", str(refusal).encode(), keep=False)
        else:
            self._answer(200, kind, _partial_success(kind, rejected), keep=True)

    def _decoded(self, kind: str) -> list[ReceivedSpan]:
        receiver = self._receiver
        if not receiver.accepts(self.headers.get(names.HEADER_AUTHORIZATION, "")):
            raise _Refusal(401, "missing or wrong bearer token")
        if self.path != _PATH:
            raise _Refusal(404, f"got {self.path[:100]!r}; spans go to {_PATH}")
        if kind not in (_PROTOBUF, _JSON):
            raise _Refusal(415, f"got content-type {kind[:100]!r}; expected {_PROTOBUF} or {_JSON}")
        body = _inflated(self._body(), self.headers.get("content-encoding", "identity").strip().lower(), receiver.max_body)
        try:
            return spans_of_protobuf(body) if kind == _PROTOBUF else spans_of_json(body)
        except ValueError as error:
            raise _Refusal(400, str(error)) from error

    def _body(self) -> bytes:
        length = self.headers.get("content-length", "")
        if not length.isdecimal():
            raise _Refusal(411, "a content-length is needed")
        if int(length) > self._receiver.max_body:
            raise _Refusal(413, f"{length} bytes; at most {self._receiver.max_body} are taken")
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise _Refusal(400, f"the body ended after {len(body)} of {length} bytes")
        return body

    def _answer(self, status: int, kind: str, body: bytes, *, keep: bool) -> None:
        self.close_connection = not keep
        with contextlib.suppress(OSError):
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            if not keep:
                self.send_header("connection", "close")
            self.end_headers()
            self.wfile.write(body)


def _inflated(body: bytes, encoding: str, limit: int) -> bytes:
    if encoding in ("", "identity"):
        return body
    if encoding not in ("gzip", "deflate"):
        raise _Refusal(415, f"got content-encoding {encoding[:100]!r}; expected gzip, deflate or none")
    inflater = zlib.decompressobj(zlib.MAX_WBITS | 32)
    try:
        inflated = inflater.decompress(body, limit + 1)
    except zlib.error as error:
        raise _Refusal(400, f"the body is not {encoding}: {error}") from error
    if len(inflated) > limit:
        raise _Refusal(413, f"more than {limit} bytes uncompressed")
    return inflated


def _check_protobuf() -> None:
    try:
        _response(0)
    except ImportError as error:
        raise ConfigurationError(_INSTALL.format(error)) from error


def _partial_success(kind: str, rejected: int) -> bytes:
    if kind == _JSON:
        return b"{}" if not rejected else b'{"partialSuccess":{"rejectedSpans":"%d","errorMessage":"the receiver is full"}}' % rejected
    return _response(rejected).SerializeToString()


def _response(rejected: int) -> Any:
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service

    answer = service.ExportTraceServiceResponse()
    if rejected:
        answer.partial_success.rejected_spans = rejected
        answer.partial_success.error_message = "the receiver is full"
    return answer


def _grpc_server(receiver: OTLPReceiver, host: str, port: int) -> tuple[Any, int]:
    """(server, port). The only place that imports grpc to receive."""
    try:
        from concurrent.futures import ThreadPoolExecutor

        import grpc
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service
    except ImportError as error:
        raise ConfigurationError(
            f"OTLP over gRPC needs a package that is not installed ({error}): pip install 'rllm-trace[otlp]'"
        ) from error

    class Servicer(service.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            metadata = {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}
            if not receiver.accepts(metadata.get(names.HEADER_AUTHORIZATION, "")):
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "missing or wrong bearer token")
            return _response(receiver.receive(spans_of_message(request)))

    threads = ThreadPoolExecutor(_GRPC_THREADS, thread_name_prefix="rllm-otlp-grpc")
    server: Any = grpc.server(threads, options=[("grpc.max_receive_message_length", receiver.max_body), ("grpc.so_reuseport", 0)])
    cast("Any", service).add_TraceServiceServicer_to_server(Servicer(), server)
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise ConfigurationError(f"the OTLP receiver cannot listen on {host}:{port} ({error}); give another grpc_port") from error
    server.start()
    return server, bound
