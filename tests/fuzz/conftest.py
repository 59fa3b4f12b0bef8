"""How long to try: a few examples of each kind, or RLSPEED_FUZZ_SECONDS in all; and a tokenizer for the readers."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[2]))

SECONDS = float(os.environ.get("RLSPEED_FUZZ_SECONDS", "0"))
TARGETS = 8  # tests in this folder; they share the time
HANG_SECONDS = 20

Body = Callable[[Any], None]


def _hangs(number: int, frame: FrameType | None) -> None:
    raise AssertionError(f"no answer in {HANG_SECONDS} s")


@pytest.fixture
def attempt(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., None]]:
    """`attempt(strategy, body)`: body of many examples; a call that does not come back fails as well."""
    count = 0

    def attempt(strategy: st.SearchStrategy[Any], body: Body, few: int = 25) -> None:
        def once(value: Any) -> None:
            nonlocal count
            count += 1
            signal.alarm(HANG_SECONDS)
            try:
                body(value)
            finally:
                signal.alarm(0)

        test = settings(
            max_examples=few if SECONDS == 0 else 200,
            deadline=None,
            database=None,
            phases=[Phase.generate],  # to shrink a hang would take for ever
            suppress_health_check=list(HealthCheck),
        )(given(strategy)(once))
        end = time.monotonic() + SECONDS / TARGETS
        test()
        while time.monotonic() < end:
            test()

    before = signal.signal(signal.SIGALRM, _hangs)
    yield attempt
    signal.signal(signal.SIGALRM, before)
    if SECONDS:
        with capsys.disabled():
            print(f"\n{request.node.name}: {count:,} examples")


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from rlspeed.data.render import load_tokenizer
    from tests.unit.data.conftest import make_tokenizer

    return load_tokenizer(str(make_tokenizer(tmp_path_factory.mktemp("tokenizers") / "plain")))


@pytest.fixture
def renderer(tokenizer: Any) -> Any:
    from rlspeed.data.render import PromptRenderer

    return PromptRenderer(tokenizer)
