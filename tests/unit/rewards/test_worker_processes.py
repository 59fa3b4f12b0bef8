"""The pool with worker processes: isolation, signals, time-outs, deaths, the parent's death."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rlspeed.errors import ConfigError, RewardError
from rlspeed.rewards.pool import RewardPool
from rlspeed.rewards.types import Sample

Make = Callable[..., RewardPool]
Samples = Callable[[int], list[Sample]]


def is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_until_gone(pid: int, seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while is_running(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not is_running(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_all_signatures_in_workers_and_nothing_heavy_is_imported(make_pool: Make, make_samples: Samples) -> None:
    """Workers have no torch unless the user's file imports it, and the parent never runs the user's file."""
    pool = make_pool(
        """
        import asyncio, os, sys, threading
        sys.reward_file_was_run = True
        def f(solution_str, ground_truth):
            assert threading.current_thread() is threading.main_thread()
            heavy = [m for m in ("torch", "transformers", "pydantic") if m in sys.modules]
            return {"score": int(ground_truth), "pid": os.getpid(), "heavy": heavy}
        def g(completions, log_metric, trainer_state, **kw):
            log_metric("m", 2.0)
            return [None if trainer_state.global_step == 3 else 1.0] * len(completions)
        async def h(solution_str):
            await asyncio.sleep(0)
            return {"score": 100.0, "async_pid": os.getpid()}
        """,
        "f",
        "g",
        "h",
        "builtin:exact_number",
        workers=2,
    )
    scores = pool.score(make_samples(6), step=3)
    assert [s.total for s in scores] == [101.0 + i for i in range(6)]
    assert pool.take_metrics() == {"m": 2.0}
    assert not hasattr(sys, "reward_file_was_run")
    assert {str(s.extra["heavy"]) for s in scores} == {"[]"}
    pids = {s.extra["pid"] for s in scores} | {s.extra["async_pid"] for s in scores}
    assert os.getpid() not in pids
    assert len({s.extra["async_pid"] for s in scores}) == 1
    pool.close()
    assert all(wait_until_gone(pid) for pid in pids)


def test_functions_with_sigalrm_work_in_workers(make_pool: Make, make_samples: Samples) -> None:
    """life-11: the alarm ends the slow call inside the function; an alarm left behind strikes no later call."""
    pool = make_pool(
        """
        import signal, time
        def strike(signum, frame): raise TimeoutError("alarm")
        def f(solution_str, extra_info):
            signal.signal(signal.SIGALRM, strike)
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            if extra_info["index"] == 0:
                return 5.0  # leaves its alarm running
            try:
                time.sleep(30)
            except TimeoutError:
                return 1.0
        """,
        workers=1,
    )
    first, second = make_samples(2)
    assert pool.score([first])[0].total == 5.0
    time.sleep(0.2)
    assert pool.score([second])[0].total == 1.0


def test_a_timed_out_worker_is_killed_and_replaced(make_pool: Make, make_samples: Samples, tmp_path: Path) -> None:
    """Masked with the reason; C code that holds the interpreter (a hopeless pattern) is ended, and what it started."""
    pool = make_pool(
        f"""
        import os, re, subprocess
        def f(solution_str, extra_info):
            if extra_info["index"] == 1:
                child = subprocess.Popen(["sleep", "1000"])
                open({str(tmp_path / "child")!r}, "w").write(str(child.pid))
                re.match(r"(a+)+b", "a" * 60)
            return {{"score": 1.0, "pid": os.getpid()}}
        """,
        workers=1,
        timeout_seconds=1.0,
        on_failure="mask",
    )
    scores = pool.score(make_samples(4))
    assert [s.total for s in scores] == [1.0, None, 1.0, 1.0]
    assert "within 1 s" in str(scores[1].failed)
    assert scores[0].extra["pid"] != scores[2].extra["pid"]
    assert wait_until_gone(scores[0].extra["pid"])
    assert wait_until_gone(int((tmp_path / "child").read_text()))


def test_a_dead_worker_is_replaced_once_and_a_masked_call_is_not_repeated(
    make_pool: Make, make_samples: Samples, tmp_path: Path
) -> None:
    pool = make_pool(
        f"""
        import os, signal
        def f(solution_str, extra_info, bad=()):
            with open({str(tmp_path / "calls")!r}, "a") as calls:
                calls.write(str(extra_info["index"]))
            if extra_info["index"] in (1, 5, 6):
                os.kill(os.getpid(), signal.SIGSEGV)
            return 1.0
        """,
        workers=1,
        on_failure="mask",
    )
    scores = pool.score(make_samples(4))
    assert [s.total for s in scores] == [1.0, None, 1.0, 1.0]
    assert "was killed by SIGSEGV" in str(scores[1].failed)
    assert (tmp_path / "calls").read_text() == "0123"
    with pytest.raises(RewardError, match=r"data row 16(.|\n)*2 times in a row"):
        pool.score(make_samples(8)[4:])


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_worker_that_dies_is_restarted_once_then_the_run_stops(
    make_pool: Make, make_samples: Samples, tmp_path: Path, kind: str
) -> None:
    """Sample 1 kills its worker once, as the kernel does that is out of memory: the call is made again by another one.
    Sample 6 does it each time.
    """
    pool = make_pool(
        f"""
        import os, pathlib, signal
        {kind} f(solution_str, extra_info):
            index, mark = extra_info["index"], pathlib.Path({str(tmp_path / "mark")!r})
            if index == 6 or (index == 1 and not mark.exists()):
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return float(index)
        """,
        workers=1,
        on_failure="stop",
    )
    assert [s.total for s in pool.score(make_samples(4))] == [0.0, 1.0, 2.0, 3.0]
    with pytest.raises(RewardError, match=r"was killed by SIGKILL \(2 times in a row; it was restarted once\)"):
        pool.score(make_samples(8)[4:])


def test_a_worker_that_died_idle_costs_nothing(make_pool: Make, make_samples: Samples) -> None:
    code = "import os\ndef f(solution_str): return {'score': 1.0, 'pid': os.getpid()}"
    pool = make_pool(code, workers=1)
    pid = pool.score(make_samples(1))[0].extra["pid"]
    os.kill(pid, signal.SIGKILL)
    assert wait_until_gone(pid)
    score = pool.score(make_samples(1))[0]
    assert score.total == 1.0
    assert score.extra["pid"] != pid


def test_loading_faults_come_from_the_workers_as_configuration_errors(make_pool: Make) -> None:
    with pytest.raises(ConfigError) as caught:
        make_pool("def f(x): return 1", "f", "builtin:nothing", {"path": "nowhere.py:f", "name": "third"}, workers=2)
    text = str(caught.value)
    assert [f.where for f in caught.value.faults] == [f"reward.functions[{i}].path" for i in range(3)]
    assert "not recognised" in text
    assert "no such built-in" in text
    with pytest.raises(ConfigError, match="exit code 7"):
        make_pool("import os; os._exit(7)", workers=1)


def test_an_async_function_that_blocks_its_loop_is_ended(
    make_pool: Make, make_samples: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlspeed.rewards.process_lanes.LOOP_GRACE_SECONDS", 0.2)
    pool = make_pool(
        """
        import threading
        async def f(solution_str, extra_info):
            if extra_info["index"] == 1:
                threading.Event().wait()
            return 1.0
        """,
        workers=1,
        timeout_seconds=0.5,
        on_failure="mask",
        max_failed_share=1.0,
    )
    scores = pool.score(make_samples(2))
    assert scores[1].total is None
    assert "blocks the event loop" in str(scores[1].failed)
    assert pool.score(make_samples(1))[0].total == 1.0


def test_an_async_worker_that_dies_fails_what_was_under_way(make_pool: Make, make_samples: Samples) -> None:
    pool = make_pool(
        """
        import os
        async def f(solution_str, extra_info):
            if extra_info["index"] == 1:
                os._exit(3)
            return 1.0
        """,
        workers=1,
        on_failure="mask",
        max_failed_share=1.0,
    )
    assert "ended with exit code 3" in str(pool.score(make_samples(2))[1].failed)
    assert pool.score(make_samples(1))[0].total == 1.0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_and_their_children_die_with_a_killed_parent(user_file: Callable[..., str], tmp_path: Path) -> None:
    """kill -9 of the training process, one worker idle and one busy in C code that never lets a thread run."""
    path = user_file(
        f"""
        import os, re
        def f(solution_str, extra_info):
            open({str(tmp_path)!r} + f"/{{os.getpid()}}.pid", "w").close()
            re.match(r"(a+)+b", "a" * 60)
        """
    )
    code = f"""
    from rlspeed.config.schema import Reward, RewardFunction
    from rlspeed.rewards.pool import RewardPool
    from rlspeed.rewards.types import Sample
    import time
    pool = RewardPool(Reward(functions=[RewardFunction(path={path + ":f"!r})], workers=2))
    pool.submit(Sample(index=0, prompt_id=0, sample_id=0, prompt="", prompt_text="", response_text=""))
    time.sleep(120)
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)])
    try:
        end = time.monotonic() + 60
        children: list[int] = []
        while (not list(tmp_path.glob("*.pid")) or len(children) < 2) and time.monotonic() < end:
            time.sleep(0.05)
            tasks = Path(f"/proc/{parent.pid}/task").glob("*/children")
            children = [int(pid) for t in tasks for pid in t.read_text().split()]
        busy = [int(p.stem) for p in tmp_path.glob("*.pid")]
        assert len(busy) == 1
        assert set(busy) < set(children)
    finally:
        parent.kill()
        parent.wait()
    assert all(wait_until_gone(pid) for pid in children)


def test_closing_does_not_wait_for_a_busy_worker(make_pool: Make, make_samples: Samples, tmp_path: Path) -> None:
    pool = make_pool(
        f"""
        import threading
        def f(solution_str):
            open({str(tmp_path / "started")!r}, "w").close()
            threading.Event().wait()
        """,
        workers=1,
        timeout_seconds=100,
    )
    pool.submit(make_samples(1)[0])
    end = time.monotonic() + 30
    while not (tmp_path / "started").exists() and time.monotonic() < end:
        time.sleep(0.02)
    worker = pool._process_lanes[0]._worker
    assert worker is not None
    pool.close()
    assert not is_running(worker.process.pid)


def test_prints_of_functions_do_not_disturb_the_answers(
    make_pool: Make, make_samples: Samples, capfd: pytest.CaptureFixture[str]
) -> None:
    pool = make_pool("def f(solution_str):\n    print('hello from', solution_str)\n    return 1.0", workers=1)
    assert pool.score(make_samples(1))[0].total == 1.0
    pool.close()
    assert "hello from answer 0" in capfd.readouterr().out
