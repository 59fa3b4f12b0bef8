"""The page of a comparison: complete in itself, and as a browser shows it."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from rlspeed.bench.compare import Comparison, compare
from rlspeed.bench.page import page, scaling, write_page
from rlspeed.bench.record import Record, Value

Make = Callable[..., Record]
BROWSER = next((b for b in ("chromium", "chromium-browser", "google-chrome") if shutil.which(b)), None)


@pytest.fixture
def found(make_record: Make) -> Comparison:
    """Two profiles on one and two devices; a name that HTML would read as a tag."""

    def values(gen: float) -> dict[str, Value]:
        return {
            "phase/generation": Value(unit="s", samples=(gen,) * 3),
            "phase/actor update": Value(unit="s", samples=(1.0,) * 3),
            "peak_host_memory": Value(unit="GiB", samples=(gen / 2,) * 3),
        }

    records = [
        make_record(name, (rate, rate * 1.02, rate * 0.98), values=values(gen), extra={"processes": ranks})
        for name, rate, gen, ranks in (("<a&b>", 100, 4.0, 1), ("packed", 300, 2.0, 1), ("packed", 280, 1.0, 2))
    ]
    return compare(records, ["<a&b>", "packed", "packed-x2"])


def test_the_page_needs_nothing_beside_itself(found: Comparison) -> None:
    text = page(found)
    assert not re.search(r"<script|https?:|src=|url\(|@import|<link", text)
    assert "<a&b>" not in text
    assert "&lt;a&amp;b&gt;" in text
    body = re.search(r"<body>.*</body>", text, flags=re.S)
    assert body is not None
    root = ElementTree.fromstring(body[0])  # every tag is closed
    titles = [f.text for f in root.iter("figcaption")]
    assert len(titles) == 4
    assert [t.split()[0] for t in titles if t] == ["Tokens", "Phases", "Peak", "Scaling:"]
    assert "3.00 faster" in text
    widths = [float(r.get("width", 0)) for r in root.iter("rect") if "generation" in "".join(r.itertext())]
    assert widths[0] == pytest.approx(2 * widths[1], rel=0.01), "bars are as long as their seconds"


def test_scaling_is_of_all_devices_together(found: Comparison) -> None:
    assert scaling(found) == {"packed": [(1, 300.0), (2, 560.0)]}


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_a_browser_shows_the_bars(found: Comparison, tmp_path: Path) -> None:
    """Drawn with the colours of the style sheet: both phases, the table's verdict, no error page."""
    matplotlib_image = pytest.importorskip("matplotlib.image")
    write_page(tmp_path / "page.html", found)
    picture = tmp_path / "page.png"
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1000,2000"]
    command += [f"--user-data-dir={tmp_path / 'browser'}", f"--screenshot={picture}", (tmp_path / "page.html").as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    pixels = (matplotlib_image.imread(picture)[..., :3] * 255).round().astype(int)

    def count(colour: str) -> int:
        wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
        return int((abs(pixels - wanted).max(axis=-1) <= 2).sum())

    assert count("#33658a") > 3000, "generation"
    assert count("#f26419") > 3000, "actor update"
    assert count("#0a7a3f") > 20, "a verdict in the colour of better"
    assert count("#ffffff") > pixels.shape[0] * pixels.shape[1] // 2
