"""A shop's assistant for a very small model: it looks an item up, then works out the answer in one line of Python."""

import csv
import os
from pathlib import Path

from smolagents import ActionStep, CodeAgent, FinalAnswerStep, LogLevel, OpenAIModel, TaskStep, Timing, tool
from smolagents.agents import EMPTY_PROMPT_TEMPLATES

with (Path(__file__).parent / "stock.csv").open() as file:
    STOCK = {row["item"]: int(row["count"]) for row in csv.DictReader(file)}

MODEL = OpenAIModel(
    model_id="smollm2-135m-instruct",
    api_base=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
    max_tokens=20,
)
MAX_STEPS = 2

PROMPTS = {**EMPTY_PROMPT_TEMPLATES, "system_prompt": "Use stock('item') to see how many there are, then final_answer(number)."}

# A model this small learns more from one worked example than from a page of rules.
EXAMPLE = [
    TaskStep(task="pens: how many plus 5?"),
    ActionStep(step_number=1, timing=Timing(start_time=0.0), model_output="stock('pens')", observations="17 pens"),
    ActionStep(step_number=2, timing=Timing(start_time=0.0), model_output="final_answer(17 + 5)"),
]


@tool
def stock(item: str) -> str:
    """Say how many of an item are in stock.

    Args:
        item: The item's name, such as 'pens'.
    """
    return f"{STOCK[item]} {item}" if item in STOCK else f"no {item} here"


def keep_short(step: ActionStep) -> None:
    """Of a step, the history keeps the line of code and what it gave; the model reads nothing else."""
    step.tool_calls = None
    if step.observations is not None:
        step.observations = str(step.action_output)


def ask(question: str) -> int | None:
    """Answer a question such as "pens: how many plus 5?"; None where the agent comes to no number."""
    agent = CodeAgent(
        tools=[stock],
        model=MODEL,
        prompt_templates=PROMPTS,
        code_block_tags=("", "\n"),
        max_steps=MAX_STEPS,
        step_callbacks=[keep_short],
        verbosity_level=LogLevel.OFF,
    )
    agent.memory.steps = list(EXAMPLE)
    for step in agent.run(question, stream=True, reset=False):
        if isinstance(step, FinalAnswerStep):
            return step.output if type(step.output) is int else None
        if isinstance(step, ActionStep) and (step.error or (step.step_number == MAX_STEPS and not step.is_final_answer)):
            return None
    return None


def correct(output: int | None, answer: int) -> bool:
    """Whether an output of ``ask`` is the right number."""
    return output == answer


if __name__ == "__main__":
    print(ask("rugs: how many minus 3?"))
