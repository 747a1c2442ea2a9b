"""Apps in other processes, and the gateway as a process: every call lands in its own episode."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

import rllm_trace as rllm
from rllm_trace import attributes as A
from rllm_trace.episode_receiver import EpisodeReceiver
from rllm_trace.testing import Reply, ReplyChoice, ScriptedServer

_APP = """
import http.client, json, sys, threading, urllib.parse
jobs = json.load(sys.stdin)
def run(job):
    at = urllib.parse.urlsplit(job["url"])
    connection = http.client.HTTPConnection(at.netloc, timeout=60)
    for turn in range(3):
        content = f"{job['name']}.{turn}"
        body = {"model": "m", "messages": [{"role": "user", "content": content}], "stream": turn == 1}
        headers = {"authorization": "Bearer " + job["key"], "content-type": "application/json", **job["headers"]}
        connection.request("POST", at.path + "/chat/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        text = answer.read().decode()
        assert answer.status == 200 and content in text.replace('"}', ""), (answer.status, text)
threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print("done")
"""


def echo(exchange: Any) -> Reply:
    """What was asked, with ids that spell it."""
    content = exchange.body["messages"][0]["content"]
    ids = [*content.encode(), 2]
    choice = ReplyChoice(text=content, token_ids=ids, logprobs=[-0.5] * len(ids))
    return Reply(choices=[choice], prompt_token_ids=[1, *ids], tokens_per_chunk=100)


def run_app(jobs: list[dict[str, Any]]) -> None:
    done = subprocess.run([sys.executable, "-c", _APP], input=json.dumps(jobs), capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout == "done\n", done.stderr


def check(episodes: list[Any], count: int) -> None:
    """Each episode has its three calls, with its own ids."""
    assert len(episodes) == count
    for episode in episodes:
        name = episode.metadata["name"]
        replies = [bytes(call.choices[0].token_ids.tolist()[:-1]).decode() for call in episode.calls]
        found = [(call.messages[0]["content"], reply, call.exact) for call, reply in zip(episode.calls, replies, strict=True)]
        assert sorted(found) == [(f"{name}.{turn}", f"{name}.{turn}", True) for turn in range(3)]


def test_64_concurrent_episodes_through_another_process(behind: Any) -> None:
    """A third of them is told by headers, a third by path, a third by key; every call of the other process lands right."""
    _, gateway = behind(echo)
    ready, over = threading.Barrier(65), threading.Event()
    jobs: list[dict[str, Any]] = []

    @rllm.workflow
    def app(number: int) -> None:
        handle = rllm.current_episode()
        assert handle is not None
        handle.set(name=f"e{number}")
        job = {"name": f"e{number}", "url": gateway.base_url, "key": gateway.token, "headers": {}}
        if number % 3 == 0:
            job["headers"] = rllm.headers()
        elif number % 3 == 1:
            job["url"] = gateway.url_for()
        else:
            job["key"] = gateway.key_for(handle)
        jobs.append(job)
        ready.wait(100)
        assert over.wait(200)

    with rllm.collect() as episodes, ThreadPoolExecutor(64) as pool:
        running = [pool.submit(app, number) for number in range(64)]
        try:
            ready.wait(100)
            run_app(jobs)
        finally:
            over.set()
        for one in running:
            one.result(100)
    check(list(episodes), 64)
    assert gateway.counts == {"headers": 66, "path": 63, "key": 63}


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Any]:
    """Starts ``python -m rllm_trace.gateway`` and gives its address."""
    started: list[subprocess.Popen[str]] = []

    def start(*options: str, **environ: str) -> tuple[subprocess.Popen[str], str]:
        command = [sys.executable, "-m", "rllm_trace.gateway", "--port", "0", *options]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, A.ENV_GATEWAY_TOKEN: "tok", **environ})
        started.append(process)
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("rllm gateway: "):
                return process, line.split()[2].removesuffix(",")
        raise AssertionError("the gateway ended")

    yield start
    for process in started:
        process.kill()
        process.wait(10)
        assert process.stderr is not None
        process.stderr.close()


def test_the_command_keeps_episodes_that_any_language_opens(process: Any, tmp_path: Path) -> None:
    """Open, call, score, end over HTTP; an episode that a path names is opened by its first call; a signal ends all in order."""
    from rllm_trace.store import Store

    with ScriptedServer(echo, api_key="sk-upstream-1") as server, httpx.Client(trust_env=False, timeout=60) as http:
        gateway, url = process("--upstream", server.base_url, "--store", str(tmp_path), **{A.ENV_GATEWAY_UPSTREAM_KEY: "sk-upstream-1"})
        root = url.removesuffix("/v1")
        token = {"authorization": "Bearer tok"}
        opened = http.post(f"{root}/rllm/episodes", json={"task_id": "t1", "metadata": {"name": "a"}}, headers=token).json()
        body = {"model": "m", "messages": [{"role": "user", "content": "a.0"}]}
        key = {"authorization": f"Bearer {opened['api_key']}"}
        assert http.post(f"{url}/chat/completions", json=body, headers=key).status_code == 200
        assert http.post(f"{root}/rllm/episodes/{opened['id']}/end", headers=key).status_code == 403
        assert http.post(f"{root}/e/run-17/v1/chat/completions", json=body, headers=token).status_code == 200
        scored = http.post(f"{root}/rllm/episodes/{opened['id']}/rewards", json={"value": 0.5, "name": "exact"}, headers=token)
        assert scored.status_code == 200
        assert http.post(f"{root}/rllm/episodes/{opened['id']}/end", json={"output": "3"}, headers=token).status_code == 200
        assert http.get(f"{root}/rllm/stats", headers=token).json()["requests"] == {"key": 1, "path": 1, "refused": 1}
        gateway.send_signal(signal.SIGTERM)
        assert gateway.wait(60) == 0
    kept = {episode.id: episode for episode in Store(tmp_path).episodes()}
    assert sorted(kept) == sorted([opened["id"], "run-17"])
    episode = kept[opened["id"]]
    assert (episode.task_id, episode.reward, episode.output, episode.termination) == ("t1", 0.5, "3", "completed")
    assert [call.exact for one in kept.values() for call in one.calls] == [True, True]


def test_a_gateway_elsewhere_commits_calls_to_the_process_whose_episode_it_is(process: Any) -> None:
    """When the app has its answer, the call is in its open episode, with ids and logprobs."""
    from rllm_trace._recorder import recorder

    with ScriptedServer(echo) as server, EpisodeReceiver() as receiver, httpx.Client(trust_env=False, timeout=60) as http:
        told = {A.ENV_GATEWAY_UPSTREAM_KEY: server.api_key, A.ENV_GATEWAY_COMMIT_TOKEN: receiver.headers[A.HEADER_AUTHORIZATION][7:]}
        _, url = process("--upstream", server.base_url, "--commit-to", receiver.http_endpoint, **told)
        counts: list[int] = []

        @rllm.workflow
        def app() -> None:
            (episode,) = recorder.open_episodes.values()
            for turn in range(3):
                body = {"model": "m", "messages": [{"role": "user", "content": f"a.{turn}"}], "stream": turn == 1}
                headers = rllm.headers({"authorization": "Bearer tok"})
                assert http.post(f"{url}/chat/completions", json=body, headers=headers).status_code == 200
                counts.append(len(episode.spans))
            handle = rllm.current_episode()
            assert handle is not None
            handle.set(name="a")

        with rllm.collect() as episodes:
            app()
    assert counts == [1, 2, 3]
    check(list(episodes), 1)


def test_the_command_says_what_is_wrong_with_its_options() -> None:
    """Exit code 2 and one line."""
    done = subprocess.run([sys.executable, "-m", "rllm_trace.gateway"], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (
        2,
        "ConfigurationError: got neither --upstream nor --anthropic; say where calls are to go\n",
    )
