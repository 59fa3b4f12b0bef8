"""What functions of each signature get, and what they may return; all in the thread of this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rlspeed.errors import RewardError
from rlspeed.rewards.pool import RewardPool
from rlspeed.rewards.types import Sample

Make = Callable[..., RewardPool]
Samples = Callable[[int], list[Sample]]


def totals(scores: list[Any]) -> list[float | None]:
    return [s.total for s in scores]


def test_verl_gets_its_four_arguments_and_kwargs(make_pool: Make, make_samples: Samples) -> None:
    pool = make_pool(
        """
        def f(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0, **kwargs):
            assert kwargs == {}, kwargs
            return {"score": bonus + int(ground_truth), "seen": [data_source, solution_str, extra_info], "acc": True}
        """,
        {"path": "f", "kwargs": {"bonus": 0.5}},
    )
    scores = pool.score(make_samples(2))
    assert totals(scores) == [0.5, 1.5]
    assert scores[1].extra == {"seen": ["unit", "answer 1", {"index": 1}], "acc": True}
    assert scores[1].parts == {"f": 1.5}


def test_verl_functions_get_only_what_they_take(make_pool: Make, make_samples: Samples) -> None:
    assert totals(make_pool("def f(solution_str): return len(solution_str)").score(make_samples(1))) == [8.0]


def test_kwargs_override_what_the_data_says(make_pool: Make, make_samples: Samples) -> None:
    code = "def f(data_source, solution_str): return {'score': 1, 'source': data_source}"
    pool = make_pool(code, {"path": "f", "kwargs": {"data_source": "gsm8k"}})
    assert pool.score(make_samples(1))[0].extra == {"source": "gsm8k"}


def test_missing_extra_info_is_an_empty_dict(make_pool: Make, make_sample: Callable[..., Sample]) -> None:
    pool = make_pool("def f(solution_str, extra_info): return len(extra_info)")
    assert totals(pool.score([make_sample(0, extra_info={})])) == [0.0]


def test_verl_batch_gets_lists(make_pool: Make, make_samples: Samples) -> None:
    pool = make_pool(
        """
        def f(data_sources, solution_strs, ground_truths, extra_infos):
            assert len(data_sources) == len(solution_strs) == len(extra_infos) == 3
            return [int(ground_truths[0]), {"score": int(ground_truths[1]), "note": solution_strs[1]}, 2.5]
        """
    )
    scores = pool.score(make_samples(3))
    assert totals(scores) == [0.0, 1.0, 2.5]
    assert scores[1].extra == {"note": "answer 1"}


def test_trl_gets_columns_and_texts(make_pool: Make, make_sample: Callable[..., Sample]) -> None:
    pool = make_pool(
        """
        def f(prompts, completions, completion_ids, level, only_in_one, **kwargs):
            assert prompts == ["question 0", "question 1"] and completions == ["answer 0", "answer 1"]
            assert completion_ids == [[5, 6, 2], [5, 6, 2]] and level == [0, 1] and only_in_one == [None, "x"]
            assert kwargs["ground_truth"] == ["0", "1"] and "prompt" not in kwargs
            return [1.0, None]
        """
    )
    two = make_sample(1, columns={"level": 1, "only_in_one": "x", "prompt": "again"})
    with pytest.raises(RewardError, match="no reward function applies"):
        pool.score([make_sample(0), two])


def test_trl_completions_are_messages_for_message_prompts(make_pool: Make, make_sample: Callable[..., Sample]) -> None:
    messages = [{"role": "user", "content": "hi"}]
    pool = make_pool(
        """
        def f(prompts, completions, **kwargs):
            assert prompts == [[{"role": "user", "content": "hi"}]]
            assert completions == [[{"role": "assistant", "content": "answer 0"}]]
            return [1]
        """
    )
    assert totals(pool.score([make_sample(0, prompt=messages)])) == [1.0]


def test_trl_state_and_logs(make_pool: Make, make_samples: Samples) -> None:
    pool = make_pool(
        """
        def f(completions, **kwargs):
            state = kwargs["trainer_state"]
            kwargs["log_extra"]("first", [c[0] for c in completions])
            kwargs["log_metric"]("share", 0.25)
            kwargs["log_metric"]("share", 0.75)
            return [state.global_step / state.max_steps] * len(completions)
        """,
        max_steps=10,
    )
    scores = pool.score(make_samples(2), step=5)
    assert totals(scores) == [0.5, 0.5]
    assert [s.extra for s in scores] == [{"first": "a"}, {"first": "a"}]
    assert pool.take_metrics() == {"share": 0.5}
    assert pool.take_metrics() == {}


def test_a_step_that_nobody_gave_is_none_and_not_zero(make_pool: Make, make_samples: Samples) -> None:
    pool = make_pool("def f(completions, trainer_state): return [trainer_state.global_step + 1 for _ in completions]")
    with pytest.raises(RewardError, match="NoneType"):
        pool.score(make_samples(1))


def test_trl_column_that_is_not_in_the_data(make_pool: Make, make_samples: Samples) -> None:
    pool = make_pool("def f(completions, solution): return [1.0 for _ in completions]")
    with pytest.raises(RewardError, match="missing 1 required positional argument: 'solution'"):
        pool.score(make_samples(2))


def test_openrlhf_gets_texts_by_position(make_pool: Make, make_samples: Samples) -> None:
    pool = make_pool(
        """
        import numpy as np
        def f(queries, prompts, labels, **kwargs):
            assert queries == ["Q0:answer 0", "Q1:answer 1"] and prompts == ["Q0:", "Q1:"] and labels == ["0", "1"]
            return {"rewards": np.array([1.0, -1.0]), "scores": [1, 0], "extra_logs": {"d": np.array([3, 4]), "all": 9}}
        """
    )
    scores = pool.score(make_samples(2))
    assert totals(scores) == [1.0, -1.0]
    assert [s.extra for s in scores] == [{"d": 3, "all": 9, "scores": 1}, {"d": 4, "all": 9, "scores": 0}]


def test_openrlhf_may_return_torch_tensors(make_pool: Make, make_samples: Samples) -> None:
    pool = make_pool(
        """
        import torch
        def f(queries, prompts, labels):
            r = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
            return {"rewards": r, "scores": r, "extra_logs": {"x": r}}
        def g(queries, prompts, labels):
            return torch.tensor([0.5, 0.25])
        """,
        "f",
        "g",
    )
    assert totals(pool.score(make_samples(2))) == [1.5, 2.25]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("True", 1.0),
        ("3", 3.0),
        ("-0.5", -0.5),
        ("np.float32(0.5)", 0.5),
        ("np.bool_(True)", 1.0),
        ("np.int64(7)", 7.0),
        ("np.array(2.0)", 2.0),
        ("fractions.Fraction(1, 4)", 0.25),
        ("{'score': np.float16(1)}", 1.0),
    ],
)
def test_numbers_of_every_kind(expression: str, value: float, make_pool: Make, make_samples: Samples) -> None:
    pool = make_pool(f"import fractions, numpy as np\ndef f(solution_str): return {expression}")
    assert totals(pool.score(make_samples(1))) == [value]


@pytest.mark.parametrize(
    ("head", "expression", "words"),
    [
        ("completions", "[1.0]", "got 1, expected 3"),
        ("completions", "[1.0, 2.0]", "got 2, expected 3"),
        ("completions", "1.0", "got 1.0 of type float, expected a list of 3"),
        ("completions", "np.array(1.0)", "shape"),
        ("completions", "np.ones((3, 1))", "shape"),
        ("completions", "{'rewards': [1, 2, 3]}", "type dict"),
        ("completions", "['1', '1', '1']", "type str"),
        ("completions", "'111'", "type str"),
        ("completions", "None", "type NoneType"),
        ("completions", "(x for x in (1, 2, 3))", "type generator"),
        ("completions", "[1.0, float('nan'), 1.0]", "got nan"),
        ("completions", "[1.0, [1.0], 1.0]", "type list"),
        ("solution_strs", "[1.0]", "got 1, expected 3"),
        ("solution_strs", "[1.0, None, 1.0]", "got None"),
        ("solution_strs", "[1.0, {'acc': 1}, 1.0]", "without 'score'"),
        ("queries, prompts, labels", "{'scores': [1, 1, 1]}", "without 'rewards'"),
        ("queries, prompts, labels", "{'rewards': [1]}", "got 1, expected 3"),
        ("queries, prompts, labels", "{'rewards': 1.0}", "expected 'rewards' with a list"),
        ("queries, prompts, labels", "{'rewards': [1, 1, 1], 'extra_logs': {'x': [1]}}", "got 1, expected 3"),
        ("queries, prompts, labels", "{'rewards': [1, None, 1]}", "got None"),
        ("solution_str", "'1'", "got '1' of type str"),
        ("solution_str", "None", "got None"),
        ("solution_str", "{}", "without 'score'"),
        ("solution_str", "{'score': '1'}", "type str"),
        ("solution_str", "[1.0]", "type list"),
        ("solution_str", "float('inf')", "got inf"),
        ("solution_str", "10 ** 400", "no float"),
        ("solution_str", "1j", "type complex"),
        ("solution_str", "decimal.Decimal(1)", "type Decimal"),
        ("solution_str", "np.ones(2)", "type ndarray"),
        ("solution_str", "asyncio.sleep(0)", "async def"),
    ],
)
def test_other_returns_are_refused(
    head: str, expression: str, words: str, make_pool: Make, make_samples: Samples
) -> None:
    """life-13: what was returned, what was expected, by which function, for which sample; nothing is broadcast."""
    code = f"import asyncio, decimal, numpy as np\ndef my_reward({head}): return {expression}"
    with pytest.raises(RewardError) as caught:
        make_pool(code, "my_reward").score(make_samples(3))
    text = str(caught.value)
    assert words in text, text
    assert "'my_reward'" in text
    assert "data row 1" in text


def test_functions_cannot_change_the_data_of_others(make_pool: Make, make_sample: Callable[..., Sample]) -> None:
    """Each call gets copies: of extra_info, columns, the ground truth, messages and the configured kwargs."""
    pool = make_pool(
        """
        def f(solution_str, ground_truth, extra_info, box):
            assert extra_info == {"deep": {"list": [1]}} and ground_truth == [1, 2] and box == []
            extra_info["deep"]["list"].append(2); ground_truth.clear(); box.append(1); extra_info["new"] = 1
            return 1.0
        def g(prompts, completions, extra_info, marks, **kwargs):
            assert extra_info == [{"deep": {"list": [1]}}] * 2 and marks == [[1], [1]]
            extra_info[0]["deep"]["list"].clear(); marks[0].append(3); prompts[0][0]["content"] = "changed"
            completions[0][0]["content"] = "changed"
            return [1.0, 1.0]
        """,
        {"path": "f", "kwargs": {"box": []}},
        "g",
    )
    shared = {"deep": {"list": [1]}}
    fields = {
        "extra_info": shared,
        "ground_truth": [1, 2],
        "columns": {"marks": [1]},
        "prompt": [{"role": "user", "content": "hi"}],
    }
    samples = [make_sample(0, **fields), make_sample(1, **fields)]
    assert totals(pool.score(samples)) == [2.0, 2.0]
    assert totals(pool.score(samples)) == [2.0, 2.0]
    assert shared == {"deep": {"list": [1]}}


def test_numpy_and_pyarrow_values_arrive_as_plain_ones(make_pool: Make, make_sample: Callable[..., Sample]) -> None:
    """data-12: 7 stays the integer 7 in a ground truth, however the reader kept it."""
    import pyarrow as pa

    pool = make_pool(
        """
        def f(solution_str, ground_truth, extra_info):
            assert type(ground_truth) is list and type(ground_truth[0]) is int, ground_truth
            assert extra_info == {"a": {"b": [1.5]}, "c": 3, "d": None}
            return 1
        """
    )
    extra = {"a": pa.scalar({"b": [1.5]}), "c": np.int32(3), "d": pa.scalar(None)}
    sample = make_sample(0, ground_truth=np.array([7, 8]), extra_info=extra)
    assert totals(pool.score([sample])) == [1.0]


def test_several_functions_are_summed_with_weights(make_pool: Make, make_samples: Samples) -> None:
    pool = make_pool(
        """
        def a(solution_str): return {"score": 1.0, "acc": 1}
        def b(completions, **kw): return [None, 4.0]
        def c(queries, prompts, labels): return {"rewards": [2.0, 2.0], "extra_logs": {"acc": [7, 8]}}
        """,
        "a",
        {"path": "b", "weight": 0.5, "name": "bee"},
        {"path": "c", "weight": -1.0},
    )
    scores = pool.score(make_samples(2))
    assert totals(scores) == [-1.0, 1.0]
    assert [s.parts for s in scores] == [{"a": 1.0, "c": 2.0}, {"a": 1.0, "bee": 4.0, "c": 2.0}]
    assert [s.extra for s in scores] == [{"acc": 1, "c/acc": 7}, {"acc": 1, "c/acc": 8}]
    assert pool.names == ("a", "bee", "c")
