"""The pool in this process: failure policy, time-outs, async calls, streaming, life."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from typing import Any

import pytest

from rlspeed.config.schema import Reward, RewardFunction, RewardModel
from rlspeed.errors import RewardError
from rlspeed.rewards.pool import RewardPool
from rlspeed.rewards.types import Sample, Score, add_model_scores

Make = Callable[..., RewardPool]
Samples = Callable[[int], list[Sample]]

FAILS_FOR_SOME = """
    calls = []
    def f(solution_str, extra_info):
        calls.append(extra_info["index"])
        if extra_info["index"] in {bad}:
            raise KeyError("the key that is not there")
        return {{"score": 1.0, "calls": len(calls)}}
"""


def test_a_failure_stops_with_sample_and_the_users_traceback(make_pool: Make, make_samples: Samples) -> None:
    """life-11: 1 of 8 samples raises; nothing becomes 0."""
    pool = make_pool(FAILS_FOR_SOME.format(bad={5}))
    with pytest.raises(RewardError) as caught:
        pool.score(make_samples(8))
    text = str(caught.value)
    assert "reward function 'f'" in text
    assert "user_rewards.py" in text
    assert "data row 15, answer 1" in text
    assert 'raise KeyError("the key that is not there")' in text
    assert "rewards/call.py" not in text
    assert "on_failure: mask" in text


def test_masked_failures_are_counted_and_not_called_again(make_pool: Make, make_samples: Samples) -> None:
    pool = make_pool(FAILS_FOR_SOME.format(bad={1}), on_failure="mask")
    scores = pool.score(make_samples(4))
    assert [s.total for s in scores] == [1.0, None, 1.0, 1.0]
    failed = scores[1].failed
    assert failed is not None
    assert failed.startswith("f: raised KeyError")
    assert [s.failed for i, s in enumerate(scores) if i != 1] == [None] * 3
    assert scores[3].extra["calls"] == 4  # one call for each sample
    assert scores[1].parts == {}


def test_too_many_masked_failures_stop_the_run(make_pool: Make, make_samples: Samples) -> None:
    """life-11: raises for every sample; also exactly at and just above the share."""
    pool = make_pool(FAILS_FOR_SOME.format(bad={0, 1}), on_failure="mask", max_failed_share=0.5)
    assert [s.total for s in pool.score(make_samples(4))] == [None, None, 1.0, 1.0]
    with pytest.raises(RewardError, match="failed for 2 of 3 answers") as caught:
        pool.score(make_samples(3))
    assert "KeyError" in str(caught.value)
    with pytest.raises(RewardError, match="failed for 1 of 1 answers"):
        pool.score(make_samples(1))


def test_a_failing_batch_function_fails_all_its_samples(make_pool: Make, make_samples: Samples) -> None:
    pool = make_pool(
        "def f(completions, **kw): return [1.0 / len(kw['no_column'])]", on_failure="mask", max_failed_share=1
    )
    assert [s.total for s in pool.score(make_samples(3))] == [None] * 3
    stop = make_pool("def f(completions, **kw): raise ValueError('x')")
    with pytest.raises(RewardError, match=r"data row 10, answer 0; data row 11, answer 1; .*; and 2 more"):
        stop.score(make_samples(6))


def test_one_bad_entry_of_a_batch_fails_one_sample(make_pool: Make, make_samples: Samples) -> None:
    pool = make_pool("def f(completions): return [1.0, float('nan'), 2.0, 3.0]", on_failure="mask")
    assert [s.total for s in pool.score(make_samples(4))] == [1.0, None, 2.0, 3.0]


def test_parts_of_other_functions_survive_a_masked_failure(make_pool: Make, make_samples: Samples) -> None:
    code = "def a(solution_str): return 1\ndef b(completions): return [2, 'x', 2, 2]"
    scores = make_pool(code, "a", "b", on_failure="mask").score(make_samples(4))
    assert [s.total for s in scores] == [3.0, None, 3.0, 3.0]
    assert scores[1].parts == {"a": 1.0}


def test_samples_that_no_function_applies_to(make_pool: Make, make_samples: Samples) -> None:
    code = "def f(completions): return [None, 1.0, 1.0, 1.0]"
    with pytest.raises(RewardError, match=r"data row 10, answer 0: no reward function applies"):
        make_pool(code).score(make_samples(4))
    scores = make_pool(code, on_failure="mask").score(make_samples(4))
    assert [s.total for s in scores] == [None, 1.0, 1.0, 1.0]
    assert scores[0].failed is not None
    with_model = make_pool(code, model=RewardModel(path="a-model", weight=2.0))
    scores = add_model_scores(with_model.score(make_samples(4)), [0.5, 0.5, 0.5, 0.5], 2.0)
    assert [s.total for s in scores] == [1.0, 2.0, 2.0, 2.0]
    assert scores[0].parts == {"model": 0.5}


def test_model_scores_leave_failed_samples_failed() -> None:
    scores = add_model_scores([Score(total=None, failed="f: x"), Score(total=1.0, parts={"f": 1.0})], [3.0, 4.0], 0.5)
    assert [s.total for s in scores] == [None, 3.0]
    assert scores[1].parts == {"f": 1.0, "model": 4.0}
    with pytest.raises(ValueError, match="2 scores, 1 model"):
        add_model_scores(scores, [1.0], 1.0)


def test_a_model_alone_needs_no_functions(make_samples: Samples) -> None:
    with RewardPool(Reward(model=RewardModel(path="x"))) as pool:
        assert pool.score(make_samples(2)) == [Score(total=None), Score(total=None)]


def test_sigalrm_in_a_thread_is_an_error_that_says_what_to_do(make_pool: Make, make_samples: Samples) -> None:
    """life-11: signal.alarm in a thread raises; the run stops and names the way out."""
    pool = make_pool(
        """
        import signal
        def f(solution_str):
            signal.signal(signal.SIGALRM, lambda *a: None)
            return 1.0
        """
    )
    with pytest.raises(RewardError, match=r"set reward\.workers to 1 or more: the function uses signals"):
        pool.score(make_samples(1))


def test_a_hung_function_stops_the_run_and_the_pool(make_pool: Make, make_samples: Samples) -> None:
    pool = make_pool(
        """
        import threading
        def f(solution_str, extra_info):
            if extra_info["index"] == 2:
                threading.Event().wait()
            return 1.0
        """,
        timeout_seconds=0.3,
        on_failure="mask",
    )
    with pytest.raises(RewardError, match=r"data row 12(.|\n)*within 0.3 s(.|\n)*reward.workers"):
        pool.score(make_samples(4))
    with pytest.raises(RewardError, match="data row 12"):
        pool.submit(make_samples(1)[0])
    pool.close()


def test_a_hung_function_does_not_keep_the_process_alive(user_file: Callable[..., str]) -> None:
    path = user_file("import threading\ndef f(solution_str): threading.Event().wait()\n")
    code = f"""
    from rlspeed.config.schema import Reward, RewardFunction
    from rlspeed.rewards.pool import RewardPool
    from rlspeed.rewards.types import Sample
    pool = RewardPool(Reward(functions=[RewardFunction(path={path + ":f"!r})], timeout_seconds=0.2))
    sample = Sample(index=0, prompt_id=0, sample_id=0, prompt="", prompt_text="", response_text="")
    try:
        pool.score([sample])
    except Exception as error:
        print(type(error).__name__)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.strip() == "RewardError"


def test_async_calls_run_at_once_in_one_loop(make_pool: Make, make_samples: Samples) -> None:
    """Every call waits until all eight have started: one after another they would never end."""
    pool = make_pool(
        """
        import asyncio
        started, go, loops = [], asyncio.Event(), set()
        async def f(solution_str, extra_info):
            loops.add(id(asyncio.get_running_loop()))
            started.append(1)
            if len(started) >= 8:
                go.set()
            await go.wait()
            return extra_info["index"] + 10 * len(loops)
        async def g(prompts, completions, **kw):
            await go.wait()
            return [0.0] * len(completions)
        """,
        "f",
        "g",
        timeout_seconds=20,
    )
    assert [s.total for s in pool.score(make_samples(8))] == [10.0 + i for i in range(8)]
    assert [s.total for s in pool.score(make_samples(1))] == [10.0]  # the same loop in the next step


def test_async_timeouts_are_per_call_and_maskable(make_pool: Make, make_samples: Samples) -> None:
    pool = make_pool(
        """
        import asyncio
        async def f(solution_str, extra_info):
            try:
                await asyncio.sleep(60 if extra_info["index"] == 1 else 0)
            except asyncio.CancelledError:
                await asyncio.sleep(60)  # a function that does not want to stop
            return 1.0
        """,
        timeout_seconds=0.3,
        on_failure="mask",
    )
    scores = pool.score(make_samples(4))
    assert [s.total for s in scores] == [1.0, None, 1.0, 1.0]
    assert "within 0.3 s" in str(scores[1].failed)
    assert [s.total for s in pool.score(make_samples(1))] == [1.0]


@pytest.mark.parametrize(
    "error", ["ValueError('no')", "SystemExit(2)", "asyncio.CancelledError()", "KeyboardInterrupt()"]
)
def test_async_functions_may_raise_anything(error: str, make_pool: Make, make_samples: Samples) -> None:
    code = f"import asyncio\nasync def f(solution_str): raise {error}"
    pool = make_pool(code, on_failure="mask", max_failed_share=1)
    assert [s.total for s in pool.score(make_samples(2))] == [None, None]
    assert [s.total for s in pool.score(make_samples(2))] == [None, None]


@pytest.mark.parametrize(
    "error", ["SystemExit(2)", "KeyboardInterrupt()", "GeneratorExit()", "Evil()", "RecursionError()"]
)
def test_functions_may_raise_anything(error: str, make_pool: Make, make_samples: Samples) -> None:
    code = f"""
    class Evil(BaseException):
        def __str__(self): raise RuntimeError("even its text fails")
    def f(solution_str): raise {error}
    """
    pool = make_pool(code)
    with pytest.raises(RewardError, match="data row 10"):
        pool.score(make_samples(1))


def test_answers_are_scored_while_others_are_still_to_come(make_pool: Make, make_samples: Samples) -> None:
    """The first call has begun before the second answer is submitted; the batch function sees both at the end."""
    pool = make_pool(
        """
        import threading
        first = threading.Event()
        def f(solution_str, extra_info):
            first.set()
            return extra_info["index"]
        def g(completions, **kw): return [len(completions)] * len(completions)
        """,
        "f",
        "g",
    )
    one, two = make_samples(2)
    pool.submit(one)
    (module,) = [m for n, m in sys.modules.items() if n.startswith("rlspeed_reward_user") and hasattr(m, "first")][-1:]
    assert module.first.wait(timeout=20)
    with pytest.raises(ValueError, match="1 submitted"):
        pool.score([two])
    pool.submit(two)
    assert [s.total for s in pool.collect()] == [2.0, 3.0]
    assert pool.collect() == []
    assert pool.score([]) == []


def test_after_an_error_the_pool_starts_afresh(make_pool: Make, make_samples: Samples) -> None:
    """Outcomes of the abandoned batch do not leak into the next."""
    pool = make_pool(FAILS_FOR_SOME.format(bad={0}))
    with pytest.raises(RewardError):
        pool.score(make_samples(50))
    scores = pool.score(make_samples(3)[1:])
    assert [s.total for s in scores] == [1.0, 1.0]


def test_a_closed_pool_says_so_and_leaves_no_thread(make_pool: Make, make_samples: Samples) -> None:
    code = "def f(solution_str): return 1\nasync def g(solution_str): return 1"
    before = set(threading.enumerate())
    pool = make_pool(code, "f", "g")
    pool.score(make_samples(1))
    pool.close()
    pool.close()
    with pytest.raises(RewardError, match="closed"):
        pool.submit(make_samples(1)[0])
    assert set(threading.enumerate()) <= before


def test_two_ranks_worth_of_pools_do_not_meet(make_pool: Make, make_samples: Samples) -> None:
    code = "def f(solution_str, k=0): return k"
    one = make_pool(code, {"path": "f", "kwargs": {"k": 1}})
    two = make_pool(code, {"path": "f", "kwargs": {"k": 2}})
    assert [one.score(make_samples(1))[0].total, two.score(make_samples(1))[0].total] == [1.0, 2.0]


def test_builtin_rules_work_through_the_pool(make_sample: Callable[..., Sample]) -> None:
    functions: list[Any] = [
        RewardFunction(path="builtin:exact_number"),
        RewardFunction(path="builtin:length", kwargs={"start": 1, "limit": 5, "factor": 2.0}),
        RewardFunction(path="builtin:format", kwargs={"tags": ["a"]}, weight=10),
    ]
    with RewardPool(Reward(functions=functions)) as pool:
        (score,) = pool.score([make_sample(0, response_text="<a>it is 1,000</a>", ground_truth=1000)])
    assert score.parts == {"exact_number": 1.0, "length": -1.0, "format": 10.0 / 10}
    assert score.total == 10.0
    assert score.extra == {"acc": 1.0, "pred": "1,000"}
