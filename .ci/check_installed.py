"""Run by the Python of the environment that has the wheel: the installed package is whole and its help is instant."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from importlib import resources
from pathlib import Path

HELP_SECONDS = 0.5
HEAVY = ("torch", "transformers", "vllm")


def main() -> None:
    """Exit with a message at the first thing that is wrong."""
    environment = Path(sys.argv[1]).resolve()
    import rlspeed.commands

    where = Path(rlspeed.__file__).resolve()
    if not where.is_relative_to(environment):
        sys.exit(f"rlspeed is {where}, not the wheel's")
    if not Path(rlspeed.commands.__file__).resolve().is_relative_to(environment):
        sys.exit(f"rlspeed.commands is {rlspeed.commands.__file__}, not the wheel's")
    heavy = [name for name in HEAVY if name in sys.modules]
    if heavy:
        sys.exit(f"import rlspeed.commands imports {', '.join(heavy)}")
    for name in ("quickstart.yaml", "quickstart/train.parquet", "quickstart/model/model.safetensors"):
        if not (resources.files("rlspeed.profiles") / name).is_file():
            sys.exit(f"the wheel has no profiles/{name}")
    cpu, wall = min(_help_seconds(environment / "bin" / "rlspeed") for _ in range(5))
    print(f"rlspeed --help: {wall:.2f} s, {cpu:.2f} s of them on a processor")
    if cpu >= HELP_SECONDS:
        sys.exit(f"rlspeed --help computed {cpu:.2f} s, the limit is {HELP_SECONDS} s")


def _help_seconds(script: Path) -> tuple[float, float]:
    """Processor and wall seconds; the limit is on the former, which other programs do not lengthen."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([str(script), "--help"], check=True, stdout=subprocess.DEVNULL)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


if __name__ == "__main__":
    main()
