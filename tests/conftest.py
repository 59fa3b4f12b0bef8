"""One thread per process, before torch is imported: test processes run side by side, and sums have one order."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# helpers that several folders share are imported as tests.NAME
sys.path.append(str(Path(__file__).parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")
