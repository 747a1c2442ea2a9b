"""gunicorn with ``--preload``, the real one: the app is loaded and configured once, before its workers are forked."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rllm_trace.exporters import read_episodes
from rllm_trace.testing import ScriptedServer

APP = """
import os
import openai
import rllm_trace as rllm
from rllm_trace.exporters import JSONLExporter

rllm.configure(exporters=[JSONLExporter(os.environ["EPISODES"])], store=os.environ["STORE"])

@rllm.workflow
def serve(n):
    with openai.OpenAI(base_url=os.environ["APP_MODEL"], api_key="scripted", max_retries=0, timeout=300) as client:
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": n}])
    return [n, os.getpid()]

serve("10")  # while the app is loaded, in the process that forks

def application(environ, start_response):
    number, worker = serve(environ["PATH_INFO"].strip("/"))
    start_response("200 OK", [("content-type", "text/plain")])
    return [f"{number} {worker}".encode()]
"""


def test_workers_of_a_preloaded_app_deliver_what_they_record(tmp_path: Path, model: ScriptedServer) -> None:
    """Each request is one exact episode, in the file and in the store, once; a worker that is asked to end loses nothing."""
    (tmp_path / "served.py").write_text(APP)
    episodes, store = tmp_path / "episodes.jsonl", tmp_path / "store"
    environment = {**os.environ, "APP_MODEL": model.base_url, "EPISODES": str(episodes), "STORE": str(store)}
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), *sys.path])
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def get(number: int) -> tuple[int, int]:
        with opener.open(f"http://127.0.0.1:{port}/{number}", timeout=200) as answer:
            asked, worker = answer.read().split()
        return int(asked), int(worker)

    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        port = listening.getsockname()[1]
        command = [sys.executable, "-m", "gunicorn", "--preload", "--workers", "2", "--threads", "2", "--timeout", "0"]
        command += ["--graceful-timeout", "200", "--log-level", "error", "--bind", f"fd://{listening.fileno()}", "served:application"]
        with subprocess.Popen(command, env=environment, pass_fds=[listening.fileno()], cwd=tmp_path) as server:
            try:
                with ThreadPoolExecutor(4) as clients:
                    answers = list(clients.map(get, range(20, 40)))
                server.send_signal(signal.SIGTERM)
                assert server.wait(200) == 0
            finally:
                server.kill()
    assert [asked for asked, _ in answers] == list(range(20, 40))
    assert server.pid not in {worker for _, worker in answers}

    from rllm_trace.store import Store

    for found in (list(read_episodes(episodes)), list(Store(store))):
        assert Counter(episode.output[0] for episode in found) == Counter(["10", *map(str, range(20, 40))])
        assert all(list(call.choices[0].token_ids) == [int(episode.output[0]), 2] for episode in found for call in episode.calls)
        assert all(len(episode.calls) == 1 for episode in found)
