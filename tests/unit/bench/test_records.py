"""What benchmarks/README.md tells stands in records that can be read, and its table is theirs."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

import pytest

from rlspeed.bench.compare import compare
from rlspeed.bench.record import read_record
from rlspeed.bench.sources import load_all

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
TEXT = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
PROFILES = ("baseline", "hybrid", "packed", "full")


def test_links_lead_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", TEXT) if "://" not in link]
    assert len(links) > 15
    assert [link for link in links if not (BENCHMARKS / link).exists()] == []


def test_every_record_can_be_read() -> None:
    files = sorted((BENCHMARKS / "records").rglob("*.json"))
    assert len(files) > 10
    for file in files:
        assert read_record(file).name


@pytest.mark.parametrize(
    ("row", "value", "digits"),
    [
        ("prompt and answer tokens/s", "tokens_per_second", 0),
        ("step, s", "step_seconds", 2),
        ("update of the critic, s", "phase/critic update", 2),
        ("resident memory, GiB", "peak_host_memory", 2),
        ("padding tokens of an update", "padding_tokens", 0),
    ],
)
def test_the_table_is_the_records(row: str, value: str, digits: int) -> None:
    """The first number of each cell is the median of the record's samples."""
    line = next(x for x in TEXT.splitlines() if x.startswith(f"| {row} "))
    shown = [float(re.match(r"[\d,.]+\d|\d", cell.strip())[0].replace(",", "")) for cell in line.split("|")[2:6]]  # type: ignore[index]
    for number, name in zip(shown, PROFILES):
        record = read_record(BENCHMARKS / "records" / "cpu_profiles" / f"{name}.json")
        assert number == pytest.approx(statistics.median(record.values[value].samples), abs=0.51 * 10**-digits)
        assert record.dirty is False


def test_packing_is_told_to_be_faster() -> None:
    records, names = load_all([str(BENCHMARKS / "records" / "cpu_profiles")], warm_up=0)
    assert tuple(names) == PROFILES
    row = compare(records, names).row("tokens_per_second")
    assert row is not None
    assert [row.words(place) for place in range(4)] == ["", "cannot tell", "faster", "faster"]
