"""``child_env``: which child processes belong to a workflow, and what each of them sees."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

import rllm_trace as rllm
from rllm_trace import attributes as A
from rllm_trace._guard import counters
from rllm_trace.exceptions import ConfigurationError
from rllm_trace.routing import Route, current_route, use_route
from rllm_trace.testing import ScriptedServer

CHILDREN = """
CHILD = '''
from app_under_test import *
@rllm.tool
def look(n):
    return ask(n)
with rllm.agent("child"):
    look(int(sys.argv[1]))
threading.Thread(target=ask, args=(int(sys.argv[1]) + 1,)).start()
'''
ATTACHES = '''
from app_under_test import *
with rllm.attach_env():
    ask(int(sys.argv[1]))
ask(0)
'''
PLAIN = '''
import os, sys
assert "rllm_trace" not in sys.modules
'''

def run(code, n, **env):
    subprocess.run([sys.executable, "-c", code, str(n)], check=True, timeout=200, **env)

@rllm.workflow
def starts():
    before = dict(os.environ)
    run(CHILD, 20, env=rllm.child_env())
    run(ATTACHES, 30, env=rllm.child_env({**os.environ, "MORE": "1"}))
    run(CHILD, 40)
    run(PLAIN, 0, env=rllm.child_env())
    assert dict(os.environ) == before
    return "done"

if __name__ == "__main__":
    assert rllm.child_env() == dict(os.environ)
    with rllm.collect() as episodes:
        starts()
    show(episodes)
    print(json.dumps(sorted([t.name, len(t.calls), [x.result for x in t.tools]] for t in episodes[0].trajectories)))
    print(rllm.stats()["dropped"], rllm.stats()["faults"], rllm.stats()["late"])
"""


def test_a_child_with_the_environment_belongs_to_the_workflow(app: Callable[..., str]) -> None:
    """From its first decorated function on, in its threads too, or at once with ``attach_env``. One without it, and one that does not know
    of us, are as they were; this process's own environment stays what it is."""
    shown, names, counted = app(CHILDREN).splitlines()
    assert json.loads(shown) == [["done", [0, 20, 21, 30], "completed"]]
    assert json.loads(names) == [["child", 1, [20]], ["starts", 3, []]]
    assert counted == "{} {} {}"


CONTEXT = """
import json, sys
import rllm_trace as rllm
from rllm_trace.routing import current_route
handle = rllm.current_episode()
route = current_route()
parent = rllm.headers().get("x-rllm-parent", "")[:35]
print(json.dumps([handle and handle.id, parent, route and [route.model, route.api_key, route.sampling], rllm.stats()["orphan"]]))
"""


def child(environment: dict[str, str]) -> Any:
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [sys.executable, "-c", CONTEXT], env={**environment, **path}, capture_output=True, text=True, timeout=200, check=True
    )
    return json.loads(ran.stdout)


def test_episode_and_route_are_the_childs_too() -> None:
    """The child is in the same episode and trace, and its calls would go where this workflow's go."""
    route = Route(base_url="http://127.0.0.1:9/v1", api_key="local", model="policy", sampling={"temperature": 1.0})

    @rllm.workflow
    def starts() -> tuple[str, str, Any]:
        handle = rllm.current_episode()
        assert handle is not None
        with use_route(route):
            return handle.id, handle.trace_id, child(rllm.child_env())

    with rllm.collect():
        id, trace_id, seen = starts()
    assert seen == [id, f"00-{trace_id}", ["policy", "local", {"temperature": 1.0}], {}]
    assert current_route() is None


@pytest.mark.parametrize("text", ["", "{", '{"headers": 3}', '{"headers": {}, "home": {"endpoint": "x", "token": "y"}}'])
def test_a_broken_context_leaves_the_child_alone(text: str) -> None:
    """It is counted, and nothing is attached; an empty one is none."""
    assert child({**os.environ, A.ENV_CONTEXT: text}) == [None, "", None, {"malformed context": 1} if text else {}]


def test_disabled_in_the_child() -> None:
    """``RLLM_DISABLED=1`` in the child's environment wins."""

    @rllm.workflow
    def starts() -> Any:
        return child(rllm.child_env({**os.environ, A.ENV_DISABLED: "1"}))

    with rllm.collect():
        assert starts() == [None, "", None, {}]


def test_where_nothing_is_handed_over() -> None:
    """Outside a workflow, and in one that is not recorded, the environment is a plain copy and no receiver is opened."""
    given = {"A": "1"}
    assert rllm.child_env(given) == given
    assert rllm.child_env(given) is not given
    assert rllm.workflow(lambda: rllm.child_env(given))() == given
    from rllm_trace import _home

    assert _home._home.receiver is None


def test_what_comes_after_the_end_is_late_and_no_second_record(model: ScriptedServer) -> None:
    """A child that outlives its workflow: its call is counted where the record was made, which stays as it was delivered."""
    code = "import sys; from time import sleep; sys.stdin.read(); import openai, rllm_trace as rllm\n"
    code += "client = openai.OpenAI(base_url=sys.argv[1], api_key='scripted', max_retries=0, timeout=300)\n"
    code += "with rllm.agent('late'): client.chat.completions.create(model='m', messages=[{'role': 'user', 'content': '7'}])\n"
    processes: list[subprocess.Popen[bytes]] = []

    @rllm.workflow
    def starts() -> None:
        environment = {**rllm.child_env(), "PYTHONPATH": os.pathsep.join(sys.path)}
        processes.append(subprocess.Popen([sys.executable, "-c", code, model.base_url], env=environment, stdin=subprocess.PIPE))

    with rllm.collect() as episodes:
        starts()
    (process,) = processes
    process.communicate(timeout=200)
    assert process.returncode == 0
    assert [len(episode.calls) for episode in episodes] == [0]
    assert (counters.get("late", "chat"), counters.get("late", "agent")) == (1, 1)


def test_a_receiver_that_other_machines_reach(model: ScriptedServer) -> None:
    """It listens where it is told to, with a token, and children are told that place; the next ``configure`` ends it."""
    code = "import sys, openai, rllm_trace as rllm\n"
    code += "client = openai.OpenAI(base_url=sys.argv[1], api_key='scripted', max_retries=0, timeout=300)\n"
    code += "with rllm.agent('far'): client.chat.completions.create(model='m', messages=[{'role': 'user', 'content': '7'}])\n"
    rllm.configure(reachable_at="127.0.0.2")

    @rllm.workflow
    def starts() -> str:
        environment = {**rllm.child_env(), "PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run([sys.executable, "-c", code, model.base_url], env=environment, check=True, timeout=200)
        return json.loads(environment[A.ENV_CONTEXT])["home"]["endpoint"]

    with rllm.collect() as episodes:
        endpoint = starts()
    assert endpoint.startswith("http://127.0.0.2:")
    assert [list(call.choices[0].token_ids) for call in episodes[0].calls] == [[7, 2]]
    request = urllib.request.Request(f"{endpoint}/v1/traces", data=b"{}", headers={"content-type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60)
    assert refused.value.code == 401
    refused.value.close()
    rllm.configure()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", int(endpoint.rpartition(":")[2])), 60)


@pytest.mark.parametrize("place", ["0.0.0.0", "::", "", "http://127.0.0.1", "203.0.113.9", 7])
def test_a_place_that_nobody_can_reach_is_refused(place: Any) -> None:
    """A wildcard, no host at all, a URL, an address of another machine."""
    with pytest.raises(ConfigurationError):
        rllm.configure(reachable_at=place)
