"""One thread per process, before torch is imported: test processes run side by side, and sums have one order."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
