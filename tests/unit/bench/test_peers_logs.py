"""Logs of verl and TRL as they write them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlspeed.bench.peers_logs import is_trl_state, trl_record, verl_record
from rlspeed.bench.sources import load_all
from rlspeed.errors import DataError


def verl_row(seconds: float) -> dict[str, float]:
    return {
        "timing_s/step": seconds,
        "timing_s/gen": seconds / 2,
        "timing_s/update_actor": seconds / 4,
        "perf/throughput": 1000 / seconds,
        "perf/max_memory_allocated_gb": 46.5,
        "perf/mfu/actor": 0.4,
        "prompt_length/mean": 60.0,
        "response_length/mean": 40.0,
    }


def test_verls_file_log(tmp_path: Path) -> None:
    path = tmp_path / "verl.jsonl"
    lines = [{"step": 0, "data": {"val-core/x/acc/mean@1": 0.3}}]
    lines += [{"step": i, "data": verl_row(s)} for i, s in enumerate((10.0, 2.0, 2.0, 4.0), 1)]
    path.write_text("".join(json.dumps(x) + "\n" for x in lines) + '{"step": 5, "da')
    record = verl_record(path, warm_up=1)
    assert record.values["step_seconds"].samples == (2.0, 2.0, 4.0)
    assert record.values["answer_tokens_per_second"].samples == pytest.approx((200.0, 200.0, 100.0))
    assert record.values["phase/other"].samples == (0.5, 0.5, 1.0)
    assert record.values["peak_device_memory"].samples == (46.5,) * 3
    assert record.values["mfu_update"].samples == (0.4,) * 3
    assert record.extra["warm_up_step_seconds"] == [[10.0]]


def test_verls_console(tmp_path: Path) -> None:
    path = tmp_path / "verl.log"
    path.write_text(
        "(TaskRunner pid=9) Training Progress: 1/3\n"
        "\x1b[36m(TaskRunner pid=9)\x1b[0m step:1 - actor/grad_norm:0.5 - timing_s/step:9.000 - perf/throughput:111.1\n"
        "(TaskRunner pid=9) step:2 - actor/lr:1e-06 - timing_s/step:np.float64(3.0) - perf/throughput:333.3 - note:x\n"
    )
    record = verl_record(path, warm_up=1)
    assert record.values["step_seconds"].samples == (3.0,)
    assert record.values["tokens_per_second"].samples == (333.3,)
    with pytest.raises(DataError, match=r"2 step\(s\)"):
        verl_record(path, warm_up=2)


def test_trls_state(tmp_path: Path) -> None:
    """Generation serves two steps here: its tokens are divided by the seconds of both."""
    path = tmp_path / "trainer_state.json"
    totals = (1000, 1000, 3000, 3000, 4000, 4000)
    history = [{"step": i, "step_time": 2.0, "num_tokens": t, "reward": 0.1} for i, t in enumerate(totals, 1)]
    path.write_text(json.dumps({"log_history": [*history, {"step": 6, "train_runtime": 12.0}], "global_step": 6}))
    assert is_trl_state(path)
    record = trl_record(path, warm_up=2, devices=2)
    assert record.values["step_seconds"].samples == (2.0,) * 4
    assert record.values["tokens_per_second"].samples == (250.0, 125.0)
    assert "answer_tokens_per_second" not in record.values
    (again,), names = load_all([str(tmp_path)], warm_up=2, peer_devices=2)
    assert (again.values, names) == (record.values, ["trl-x2"])
    path.write_text("[]")
    assert not is_trl_state(path)
    with pytest.raises(DataError):
        trl_record(path, warm_up=0)
