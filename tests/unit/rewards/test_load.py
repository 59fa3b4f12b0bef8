"""Finding functions and recognising signatures; every fault of every function in one error."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlspeed.config.schema import Reward, RewardFunction, RewardModel
from rlspeed.errors import ConfigError
from rlspeed.rewards.load import load_function, load_functions, specs_of
from rlspeed.rewards.types import FunctionSpec


def spec(path: str, **fields: object) -> FunctionSpec:
    return FunctionSpec(path=path, name="f", **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        ("def f(data_source, solution_str, ground_truth, extra_info=None)", "verl"),
        ("def f(data_source, solution_str, ground_truth, extra_info=None, **kwargs)", "verl"),
        ("def f(solution_str, ground_truth)", "verl"),
        ("def f(*, solution_str)", "verl"),
        ("def f(data_sources, solution_strs, ground_truths, extra_infos)", "verl_batch"),
        ("def f(prompts, completions, **kwargs)", "trl"),
        ("def f(completions, answer)", "trl"),
        ("def f(completions, queries, **kwargs)", "trl"),
        ("def f(queries, prompts, labels)", "openrlhf"),
        ("def f(queries, prompts, labels, **kwargs)", "openrlhf"),
        ("async def f(prompts, completions, **kwargs)", "trl"),
    ],
)
def test_signatures_are_told_by_argument_names(head: str, kind: str, user_file: Callable[..., str]) -> None:
    loaded = load_function(spec(user_file(f"{head}:\n    return 0\n") + ":f"))
    assert loaded.kind == kind
    assert loaded.is_async == head.startswith("async")
    assert loaded.whole_batch == (kind != "verl")


def test_a_signature_can_be_set(user_file: Callable[..., str]) -> None:
    path = user_file("def f(**kw): return 0\ndef g(a, b, c): return 0\ndef h(solution_strs, **kw): return 0\n")
    assert load_function(spec(path + ":f", signature="verl")).kind == "verl"
    assert load_function(spec(path + ":f", signature="trl")).kind == "trl"
    assert load_function(spec(path + ":g", signature="openrlhf")).kind == "openrlhf"
    assert load_function(spec(path + ":h", signature="verl")).kind == "verl_batch"


@pytest.mark.parametrize(
    ("code", "fields", "words"),
    [
        ("def f(question, answer): return 0", {}, ("signature that is not recognised", "f(question, answer)", "TRL")),
        ("def f(**kw): return 0", {}, ("not recognised",)),
        ("def f(solution_str, completions): return 0", {}, ("two signatures", "solution_str, completions")),
        ("def f(solution_str, reward_router_address): return 0", {}, ("reward_router_address", "nothing gives")),
        ("def f(solution_str, /): return 0", {}, ("positional-only",)),
        ("def f(solution_str): return 0", {"kwargs": {"tempo": 1}}, ("kwargs.tempo", "does not take")),
        ("def f(solution_str, temp=1): return 0", {"kwargs": {"tempo": 1}}, ("did you mean temp?",)),
        ("def f(a, b): return 0", {"signature": "openrlhf"}, ("three arguments by position",)),
        ("def f(a, b): return 0", {"signature": "trl"}, ("does not take 'completions'",)),
        ("def f(a, b): return 0", {"signature": "verl"}, ("does not take 'solution_str'",)),
        ("f = 7", {}, ("type int", "a function")),
        ("def compute_score(solution_str): return 0", {}, ("has no 'f'", "compute_score")),
        ("def ff(solution_str): return 0", {}, ("did you mean ff?",)),
        ("import nowhere_to_be_found", {}, ("importing", "No module named 'nowhere_to_be_found'", "line 1")),
        ("x = 1 / 0", {}, ("ZeroDivisionError",)),
        ("def f(:", {}, ("SyntaxError",)),
        ("import sys; sys.exit(3)", {}, ("SystemExit",)),
        ("f = min", {}, ("signature",)),
    ],
)
def test_faults_say_what_was_found(
    code: str, fields: dict[str, object], words: tuple[str, ...], user_file: Callable[..., str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_function(spec(user_file(code) + ":f", where="reward.functions[4]", **fields))
    text = str(caught.value)
    assert all(word in text for word in words), text
    assert "reward.functions[4]" in text
    assert "rewards/load.py" not in text  # tracebacks are the user's own


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("no_colon", ("'no_colon'", "module:function")),
        ("module:", ("module:function",)),
        ("not/there.py:f", ("no file", "there.py")),
        ("no_such_module_here:f", ("no module 'no_such_module_here'",)),
        ("builtin:exact_numbr", ("no such built-in rule", "did you mean builtin:exact_number?")),
        ("json:dumps", ("not recognised",)),
        ("json:no_such", ("json has no 'no_such'",)),
    ],
)
def test_paths_that_lead_nowhere(path: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_function(spec(path))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_all_faults_of_all_functions_come_at_once(user_file: Callable[..., str]) -> None:
    path = user_file("def good(solution_str): return 0\ndef bad(x): return 0\n")
    specs = [
        spec(f"{path}:good", where="reward.functions[0]"),
        spec(f"{path}:bad", where="reward.functions[1]"),
        spec("nowhere.py:f", where="reward.functions[2]"),
        spec("builtin:regex", where="reward.functions[3]"),
    ]
    with pytest.raises(ConfigError) as caught:
        load_functions(specs)
    assert [f.where.split("]")[0][-1] for f in caught.value.faults] == ["1", "2", "3"]


def test_module_paths_search_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_project_rewards.py").write_text("class C:\n    @staticmethod\n    def f(solution_str): return 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert load_function(spec("my_project_rewards:C.f")).kind == "verl"
    assert load_function(spec("./my_project_rewards.py:C.f")).kind == "verl"


def test_a_file_finds_its_neighbours_and_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "neighbour_of_rewards.py").write_text("VALUE = 3\n")
    (tmp_path / "json.py").write_text("raise RuntimeError('the standard library is hidden')\n")
    (tmp_path / "r.py").write_text(
        "import json, neighbour_of_rewards\ndef f(solution_str): return neighbour_of_rewards.VALUE\n"
    )
    loaded = load_function(spec(f"{tmp_path}/r.py:f"))
    assert loaded.function("x") == 3


def test_names_default_to_the_function_and_must_differ() -> None:
    twice = Reward(functions=[RewardFunction(path="builtin:gsm8k"), RewardFunction(path="a.py:gsm8k")])
    with pytest.raises(ConfigError, match=r"functions\[1\].name.*\n?.*functions\[0\]"):
        specs_of(twice)
    named = Reward(
        functions=[RewardFunction(path="builtin:gsm8k"), RewardFunction(path="a.py:gsm8k", name="b", weight=2)]
    )
    assert [(s.name, s.weight) for s in specs_of(named)] == [("gsm8k", 1.0), ("b", 2.0)]


def test_without_functions_the_data_source_decides_and_a_model_alone_is_enough() -> None:
    (spec_,) = specs_of(Reward())
    assert (spec_.path, spec_.name) == ("builtin:data_source", "data_source")
    assert specs_of(Reward(model=RewardModel(path="somewhere"))) == ()


def test_callable_objects_and_their_async_form(user_file: Callable[..., str]) -> None:
    path = user_file(
        """
        class Sync:
            def __call__(self, solution_str): return 1.0
        class Async:
            async def __call__(self, solution_str): return 1.0
        sync, asynchronous = Sync(), Async()
        """
    )
    assert not load_function(spec(path + ":sync")).is_async
    assert load_function(spec(path + ":asynchronous")).is_async


def test_reading_signatures_needs_neither_schema_nor_torch() -> None:
    """Worker processes import the loader; they must start fast."""
    import subprocess

    code = "import sys, rlspeed.rewards.worker; print([m for m in ('torch', 'pydantic', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
