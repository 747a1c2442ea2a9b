"""Where the rewards of a run come from, and what they may be."""

import asyncio
import functools
import sys
import types
from decimal import Decimal

import numpy as np
import pytest

from rllm_trace._decorators import workflow
from rllm_trace._rewards import reward as rllm_reward
from rllm_trace.exceptions import RewardError as BadReward
from rllm_trace.types import Episode, Reward, Trajectory
from rllm_trainer.exceptions import RewardError
from rllm_trainer.rollout.app import as_workflow, drained, is_async, is_workflow
from rllm_trainer.rollout.rewards import RewardFunction, plan_rewards, read_value, total_reward


def episode(rewards=(), own=None):
    total = sum(r.weight * r.value for r in rewards if not r.superseded) if rewards else None
    return Episode(
        id="e",
        trace_id="0" * 32,
        span_id="w",
        workflow="app",
        termination="completed",
        trajectories=[
            Trajectory(
                id="t",
                name="solver",
                calls=[],
                tools=[],
                rewards=list(own or []),
                reward=sum(r.value for r in own) if own else None,
                started=0,
                ended=1,
            )
        ],
        rewards=list(rewards),
        reward=total,
        started=0,
        ended=1,
        metadata={},
    )


def module_with(source):
    """A module of its own, with a function ``app`` in it."""
    module = types.ModuleType("an_app_of_a_test")
    sys.modules[module.__name__] = module
    exec(
        "import rllm_trace.rollouts\nfrom rllm_trace._decorators import workflow\nfrom rllm_trace._rewards import reward, add_reward\n"
        + source,
        vars(module),
    )
    return module


def test_parameters_are_filled_by_name():
    """Reserved words come first, then columns; the rest of the row stays out."""
    function = RewardFunction(lambda output, answer, row, episode, error=None: 1.0)
    row = {"answer": 4, "question": "2+2", "output": "ignored"}
    assert function.arguments(output="4", row=row, episode=None, error=None) == {
        "output": "4",
        "answer": 4,
        "row": row,
        "episode": None,
        "error": None,
    }


def test_defaults_of_a_reward_stay():
    """A parameter with a default and no column keeps it."""
    assert RewardFunction(lambda output, tolerance=0.1: 1.0).arguments(output=1, row={}, episode=None, error=None) == {"output": 1}


def test_a_parameter_that_nothing_fills_is_refused():
    """The error lists the reserved words and the columns."""
    function = RewardFunction(lambda output, solution: 1.0)
    with pytest.raises(
        RewardError, match=r"needs solution, and neither the reserved words \(output, row, episode, error\) nor .* \(answer\)"
    ):
        function.arguments(output=1, row={"answer": 4}, episode=None, error=None)


@pytest.mark.parametrize(
    "value, expected",
    [(0.5, 0.5), (1, 1.0), (True, 1.0), (np.float32(0.25), 0.25), (np.bool_(False), 0.0), (np.array(2.0), 2.0), (Decimal("0.5"), 0.5)],
)
def test_numbers_are_converted(value, expected):
    """Numbers, bools and scalars of numpy become floats."""

    def exact(output): ...

    assert read_value(RewardFunction(exact), value) == [Reward(name="exact", value=expected)]


def test_dicts_and_rewards_name_themselves():
    """A dict gives one reward a name; a Reward keeps its own name and weight."""
    judge = RewardFunction(rllm_reward(name="judge", weight=2.0)(lambda output: 0))
    assert read_value(judge, {"style": 0.5, "right": True}) == [
        Reward(name="style", value=0.5, weight=2.0),
        Reward(name="right", value=1.0, weight=2.0),
    ]
    assert read_value(judge, Reward(name="own", value=1, weight=0.5)) == [Reward(name="own", value=1.0, weight=0.5)]


@pytest.mark.parametrize("value", [None, "1.0", float("nan"), float("inf"), [1.0, 2.0], {"a": None}, {}, object(), Decimal("NaN"), 1j])
def test_what_is_no_number_is_refused(value):
    """None, text, NaN and the like are refused with the reward's name."""

    def exact(output): ...

    with pytest.raises(BadReward, match="exact"):
        read_value(RewardFunction(exact), value)


@pytest.mark.parametrize("value", [1.1e18, -1e39, 10**400, {"a": 1e300}])
def test_what_float32_cannot_compare_is_refused(value):
    """A score whose square float32 does not hold would make a group's advantages 0 or NaN; it is told to be scaled."""

    def money(output): ...

    assert read_value(RewardFunction(money), 1e18) == [Reward(name="money", value=1e18)]
    with pytest.raises(BadReward, match=r"money.*scale it to at most 1e\+18"):
        read_value(RewardFunction(money), value)


def test_a_given_name_is_not_given_again():
    """Of a dict only the names that the app has not given are taken."""
    judge = RewardFunction(rllm_reward(name="judge")(lambda output: 0))
    assert [r.name for r in read_value(judge, {"a": 1, "b": 2}, given=["a"])] == ["b"]


def test_given_functions_are_called_whatever_the_app_gave():
    """``reward=`` functions are due unless the app gave a reward of their name."""

    def one(output): ...

    two = rllm_reward(name="second")(lambda output: 0)
    plan = plan_rewards([one, two], lambda: None)
    assert [f.name for f in plan.functions] == ["one", "second"]
    assert [f.name for f in plan.due(episode([Reward(name="one", value=1)]), None)] == ["second"]
    assert [f.name for f in plan.due(episode([Reward(name="other", value=1)]), None)] == ["one", "second"]


def test_after_a_failure_only_rewards_that_take_the_error_are_called():
    """A reward without ``error`` has no say about an app that raised."""

    def plain(output): ...
    def lenient(output, error): ...

    plan = plan_rewards([plain, lenient], lambda: None)
    assert [f.name for f in plan.due(episode(), ValueError())] == ["lenient"]
    assert [f.name for f in plan.due(episode(), None)] == ["plain", "lenient"]


def test_rewards_of_the_apps_module_are_found():
    """Without ``reward=`` the functions decorated in the app's module are taken, by their names."""
    module = module_with("@reward(name='right', weight=3.0)\ndef f(output): return 1\n@workflow\ndef app(x): ...\ndef g(output): return 0")
    plan = plan_rewards(None, module.app)
    assert [(f.name, f.weight) for f in plan.functions] == [("right", 3.0)]
    assert plan.source == "those that the app gives while it runs, else right of an_app_of_a_test, called after it"
    assert plan.due(episode([Reward(name="other", value=1)]), None) == []


def test_the_plain_function_is_called():
    """A decorated reward is called without its decorator: no workflow is running that it could score."""
    module = module_with("@reward\ndef f(output): return output * 2\ndef app(x): ...")
    (function,) = plan_rewards(None, module.app).functions
    assert function.call(output=2) == 4
    assert function.call is module.f.__wrapped__


def test_an_app_that_gives_rewards_itself():
    """An app whose module adds rewards needs no function; so does one with a decorated method."""
    for source in ("def app(x):\n  add_reward(1.0)", "class A:\n  @reward\n  def score(self): return 1\ndef app(x): A().score()"):
        plan = plan_rewards(None, module_with(source).app)
        assert plan.functions == []
        assert plan.source == "only those that the app gives while it runs"


def test_no_reward_anywhere_is_an_error():
    """Nothing to learn from is found before the first rollout."""
    module = module_with("def app(x): ...")
    with pytest.raises(RewardError, match=r"no reward: app was given none, and its module an_app_of_a_test has no function decorated"):
        plan_rewards(None, module.app)
    assert plan_rewards([], module.app).functions == []


def test_two_rewards_of_one_name_are_refused():
    """Two functions with one name would overwrite each other."""
    with pytest.raises(RewardError, match="two rewards are named 'same'"):
        plan_rewards([rllm_reward(name="same")(lambda output: 0), rllm_reward(name="same")(lambda output: 1)], lambda: None)


def test_a_value_is_no_reward_function():
    """``reward=1`` is refused."""
    with pytest.raises(RewardError, match="reward: got 1; expected a function or a list of functions"):
        plan_rewards(1, lambda: None)


def test_totals():
    """The episode's own total counts; without one, the mean of its trajectories' totals."""
    assert total_reward(episode([Reward(name="a", value=1, weight=0.5), Reward(name="b", value=2)])).reward == 2.5
    assert total_reward(episode(own=[Reward(name="s", value=0.75, target="t")])).reward == 0.75
    assert total_reward(episode()).reward is None
    assert total_reward(episode([Reward(name="a", value=1)], own=[Reward(name="s", value=0.5, target="t")])).rewards == {"s": 0.5, "a": 1}


def test_workflows_are_recognised():
    """The decorator is seen through other decorators, partials and methods; other functions are none."""

    @workflow
    def app(x): ...
    @workflow
    async def coroutine(x): ...

    @functools.wraps(app)
    def decorated(*args, **kwargs):
        return app(*args, **kwargs)

    class App:
        @workflow
        def run(self, x): ...

    assert all(map(is_workflow, (app, coroutine, decorated, functools.partial(app, 1), App().run, workflow(functools.partial(app)))))
    assert not is_workflow(lambda x: x)
    assert not is_workflow(rllm_reward(lambda output: 1))
    assert as_workflow(app) is app


def test_async_apps_are_recognised():
    """Coroutine functions, async generators, decorated, partial or as objects."""

    async def coroutine(x): ...
    async def stream(x):
        yield 1

    class App:
        async def __call__(self, x): ...

    assert all(map(is_async, (coroutine, stream, workflow(coroutine), functools.partial(coroutine, 1), App(), workflow(App()))))
    assert not is_async(lambda x: 1)


def test_an_undecorated_function_that_returns_a_coroutine_is_run_to_its_end():
    """What the function returned is awaited or exhausted inside its workflow."""

    async def answer(x):
        return x + 1

    assert as_workflow(lambda x: answer(x))(1) == 2
    assert as_workflow(lambda x: (i for i in range(x)))(3) == [0, 1, 2]
    assert asyncio.run(as_workflow(answer)(1)) == 2
    assert drained("text") == "text"
