"""Two launchers, as on two nodes, meet over loopback: docs/how-to/multi-node.md as far as one machine goes."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path

import pytest

from tests.dist.started import WAIT_SECONDS, Started

TRAIN = ("rlspeed", "train", "quickstart", "run.steps=2", "run.save_hf=true")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def two_nodes(start, ranks: int, *words: str) -> list[Started]:
    """One run of two launchers with `ranks` processes each."""
    endpoint = f"127.0.0.1:{free_port()}"
    meet = ("--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "7", "--local-addr", "127.0.0.1")
    shape = ("--nnodes", "2", "--nproc-per-node", str(ranks))
    return [start("two", "torch.distributed.run", *shape, *meet, "-m", *words, node=node) for node in ("A", "B")]


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def files(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


def test_two_launchers_do_what_one_does(start) -> None:
    """dev-22: 2 x 2 ranks against 4: the same numbers, which gloo sums in another order from run to run, and the same
    files, written once.
    """
    nodes = two_nodes(start, 2, *TRAIN)
    for node in nodes:
        assert node.process.wait(WAIT_SECONDS) == 0, node.text()
    one = start("one", *TRAIN, "--nproc-per-node", "4")
    assert one.process.wait(WAIT_SECONDS) == 0, one.text()
    said = [node for node in nodes if "4 process(es) on cpu" in node.text()]
    assert len(said) == 1, "rank 0 alone talks"
    wanted, got = metrics(one.folder), metrics(nodes[0].folder)
    assert len(wanted) == 2
    assert got == [{k: pytest.approx(v, rel=1e-5, abs=1e-6) for k, v in row.items()} for row in wanted]
    assert files(nodes[0].folder) == files(one.folder)


def test_a_rank_that_dies_ends_the_other_node_too(start, tmp_path: Path) -> None:
    """life-20: the launcher of the other node hears nothing of it; its ranks do."""
    reward = tmp_path / "reward.py"
    reward.write_text(
        "import os, pathlib, time\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    if os.environ['RANK'] == '1':\n"
        f"        pathlib.Path({str(tmp_path)!r}, 'rank1').write_text(str(os.getpid()))\n"
        "        time.sleep(1000)\n"
        "    return 0.0\n"
    )
    function = f"reward.functions=[{{path: '{reward}:compute_score'}}]"
    nodes = two_nodes(start, 1, *TRAIN, function, "reward.timeout_seconds=1000", "run.startup_checks=false")
    asked = tmp_path / "rank1"
    nodes[0].until(lambda: asked.exists() and asked.read_text(), "a reward on rank 1")
    os.kill(int(asked.read_text()), signal.SIGKILL)
    for node in nodes:
        assert node.process.wait(30) != 0, node.text()
    text = "".join(node.text() for node in nodes)
    assert "rank 0: error" in text
    assert "step 1, phase reward" in text
