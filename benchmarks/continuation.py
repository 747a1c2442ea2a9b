"""How many of a CodeAgent's episodes with two or more calls are one row: prompts rendered anew, and continued exactly.

Two apps on the embedded model: the demo's, which was written so that its history begins with what was sampled, and the same one with
the framework's stock tags and history (``stock``): its tags are stop strings, and its history says each call once more. The same
questions and seeds for each.

    python benchmarks/continuation.py
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import rllm_trace as rllm
from rllm_trace.rollouts import rollout
from rllm_trace.routing import Route
from rllm_trainer.models import resolve_model
from rllm_trainer.samples import Counters, build_samples
from rllm_trainer.serving.local import LocalServer

DEMO = Path(__file__).parent.parent / "examples" / "smolagents_stock"
SETTINGS = ("rendered", "exact")
APPS = ("demo", "stock")
STEPS = 3
"""Calls of an episode of the second app at most."""


def main() -> None:
    options = _options()
    sys.path.insert(0, str(DEMO))
    from app import ask
    from questions import training_rows

    questions = [row["question"] for row in training_rows(0)[: options.questions]]
    apps = {name: app for name, app in zip(APPS, (ask, _as_it_comes()), strict=True) if name in options.apps}
    model = resolve_model(options.model)
    with tempfile.TemporaryDirectory() as folder:
        for setting in options.settings:
            server = LocalServer.start(model, run_dir=Path(folder) / setting, threads=1, max_model_len=1024, continuation=setting)
            try:
                for name, app in apps.items():
                    found, causes = _measured(app, questions, server)
                    print(json.dumps({"app": name, "continuation": setting, **found, "not continued": causes}))
            finally:
                server.close()


def _measured(app: Callable[[str], Any], questions: list[str], server: LocalServer) -> tuple[dict[str, Any], dict[str, int]]:
    before, cached = server.continuations(), server.stats()
    route = Route(base_url=server.base_url, api_key=server.api_key, model=server.model)

    def one(number: int) -> Counters:
        with rollout(task_id=str(number), route=route, seed=number) as handle:
            app(questions[number])
        return reduce(add, (build_samples(episode).counters for episode in handle.wait(30)), Counters())

    with ThreadPoolExecutor(16) as pool:
        counters = reduce(add, pool.map(one, range(len(questions))), Counters())
    after = server.stats()
    computed, saved = (after[name] - cached[name] for name in ("prompt_tokens_computed", "prompt_tokens_cached"))
    return {
        "episodes of two or more calls": counters.multi_call_episodes,
        "of those one row": round(counters.one_row_episodes / max(counters.multi_call_episodes, 1), 3),
        "breaks": dict(counters.breaks),
        "prompt tokens from the cache": round(saved / (computed + saved), 3),
    }, dict(server.continuations() - before)


def _as_it_comes() -> Callable[[str], Any]:
    """The demo's app with the framework's own tags and history."""
    from app import MODEL, PROMPTS, stock
    from smolagents import ActionStep, CodeAgent, FinalAnswerStep, LogLevel, TaskStep, Timing

    shown = [
        TaskStep(task="pens: how many plus 5?"),
        ActionStep(step_number=1, timing=Timing(start_time=0.0), model_output="<code>\nstock('pens')\n</code>", observations="17 pens"),
        ActionStep(step_number=2, timing=Timing(start_time=0.0), model_output="<code>\nfinal_answer(17 + 5)\n</code>"),
    ]

    @rllm.workflow
    def ask_as_it_comes(question: str) -> Any:
        agent = CodeAgent(tools=[stock], model=MODEL, prompt_templates=PROMPTS, verbosity_level=LogLevel.OFF)
        agent.memory.steps = list(shown)
        for step in agent.run(question, stream=True, reset=False):
            if isinstance(step, FinalAnswerStep):
                return step.output
            if isinstance(step, ActionStep) and step.step_number == STEPS:
                return None
        return None

    return ask_as_it_comes


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="a model folder; default: the embedded model")
    parser.add_argument("--apps", nargs="+", default=APPS, choices=APPS)
    parser.add_argument("--settings", nargs="+", default=SETTINGS, choices=SETTINGS)
    parser.add_argument("--questions", type=int, default=96)
    return parser.parse_args()


if __name__ == "__main__":
    main()
