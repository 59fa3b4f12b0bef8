"""`rlspeed bench generate` without the door: prompts, runs, the record."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlspeed.bench.generate import GenerateOptions, Run, measure_generate, summarise
from rlspeed.errors import ConfigError, DataError, RlspeedError


def test_a_record_of_the_builtin_generator() -> None:
    seen: list[tuple[int, int]] = []
    options = GenerateOptions(
        model="quickstart", prompts=("quickstart:train",), limit=6, n=2, max_new_tokens=5, whole=True, repeats=2
    )
    record = measure_generate(options, lambda number, total, speed: seen.append((number, total)))
    assert seen == [(0, 2), (1, 2), (2, 2)], "one run warms up"
    assert record.name == "generate-builtin"
    assert record.values["answer_tokens"].samples == (60.0, 60.0), (
        "without an end token each answer has its full length"
    )
    assert all(s > 0 for s in record.values["answer_tokens_per_second"].samples)
    assert record.extra["requests"] == 12
    assert record.extra["options"]["whole"] is True
    again = measure_generate(options)
    assert (again.data, again.profile) == (record.data, record.profile)


def test_lines_of_a_text_file_are_prompts(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("1 + 2 =\n\n3 + 4 =\n")
    record = measure_generate(GenerateOptions(model="quickstart", prompts=(str(file),), max_new_tokens=3, repeats=1))
    assert record.extra["requests"] == 2


def test_faults_are_named_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        measure_generate(GenerateOptions(model="quickstart", prompts=("x.parquet",), repeats=0, n=0, temperature=-1.0))
    for part in ("--repeats", "--n", "--temperature"):
        assert part in str(caught.value)
    with pytest.raises(DataError, match=r"gone\.txt"):
        measure_generate(GenerateOptions(model="quickstart", prompts=(str(tmp_path / "gone.txt"),)))
    with pytest.raises(RlspeedError, match="no-model"):
        measure_generate(GenerateOptions(model=str(tmp_path / "no-model"), prompts=("quickstart:train",)))


def test_speed_is_answer_tokens_over_seconds() -> None:
    runs = [
        Run(seconds=2.0, tokens=100, steps=10, latency=(0.1, 0.0, 0.2), tail_seconds=0.5),
        Run(seconds=4.0, tokens=100, steps=10, latency=(0.2, 0.0, 0.2), tail_seconds=0.7),
    ]
    values = summarise(runs)
    assert values["answer_tokens_per_second"].samples == (50.0, 25.0)
    assert values["token_latency_mean"].samples == (100.0, 200.0)
    without = summarise([Run(seconds=1.0, tokens=1, steps=1, latency=None, tail_seconds=None)])
    assert set(without) == {"answer_tokens_per_second", "seconds", "answer_tokens"}
