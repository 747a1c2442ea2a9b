"""A quorum that is given to ``fit``: groups go on without their last rollout, which is on file with the reason and in no gradient."""

import threading
from collections import Counter

import openai

from rllm_trainer import fit
from rllm_trainer.rollout.record import read_rollouts

GIVEN_UP = "its group had its quorum, and quorum_grace was over"


def test_a_step_does_not_wait_for_the_last_of_a_group(tmp_path):
    """Of three rollouts of a row, two answer and one hangs: with quorum=0.6 both steps are taken, each with four of its six rollouts."""
    over, started, lock = threading.Event(), Counter(), threading.Lock()

    def app(word):
        with lock:
            started[word] += 1
            last = started[word] == 3
        if last:
            over.wait(300)
        with openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="unused") as client:
            reply = client.chat.completions.create(model="m", messages=[{"role": "user", "content": word}], max_tokens=6, temperature=1.0)
        return reply.choices[0].message.content

    def vowels(output):
        return sum(letter in "aeiou" for letter in output) / 6

    try:
        result = fit(
            app,
            [{"word": f"say {number}"} for number in range(4)],
            model="tiny-qwen2",
            reward=vowels,
            output_dir=tmp_path / "run",
            batch_tasks=2,
            group_size=3,
            epochs=1,
            threads=1,
            progress=False,
            quorum=0.6,
            quorum_grace=0.2,
        )
    finally:
        over.set()
    lines = [line for line in result.metrics if line["step"] > 0]
    assert [(line["rollouts"], line["rollouts/excluded"]) for line in lines] == [(6, 2), (6, 2)]
    for rollouts in read_rollouts(tmp_path / "run").values():
        assert Counter(rollout.reason for rollout in rollouts) == {None: 4, GIVEN_UP: 2}
        assert {rollout.reward for rollout in rollouts if rollout.reason == GIVEN_UP} == {None}
