"""Compare the memory that check-devices predicts with the peaks that benchmarks/update.py measured.

    python benchmarks/memory_forecast.py benchmarks/records/h200/memory_forecast.json
    benchmarks/records/h200/update_*.json

Needs no GPU: it reads the records and asks the planner for the same shapes, capacities and answers. Compiled variants
are left out (the planner knows nothing of torch.compile, which saves memory).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from update import SHAPE_KEYS, SHAPES, VOCABULARY

from rlspeed.config.schema import Profile
from rlspeed.planning.devices import Role
from rlspeed.planning.machine import assume
from rlspeed.planning.report import inspect_run
from rlspeed.planning.shape import ModelShape


def predicted_gb(size: str, options: dict[str, Any], variant: str) -> float:
    """Peak of the actor's update as check-devices would print it, GB."""
    padded = not variant.startswith("packed")
    config = dict(zip(SHAPE_KEYS, SHAPES[size])) | {"model_type": "qwen2", "vocab_size": VOCABULARY}
    shape = ModelShape.from_config(config | {"tie_word_embeddings": True, "max_position_embeddings": 32768})
    profile = Profile.model_validate(
        {
            "model": {
                "path": size,
                "model_dtype": "bf16",
                "use_remove_padding": not padded,
                "activation_checkpointing": padded or "recompute" in variant,
            },
            "data": {"train_files": "none", "max_length": 200 + 1024, "batch_size": options["answers"] // 8},
            "rollout": {"n": 8, "max_new_tokens": 1024},
            "algorithm": {"kind": "grpo"},
            "packing": {"micro_batch_size": options["micro"]} if padded else {"capacity": options["capacity"]},
        }
    )
    report = inspect_run(
        profile.devices, assume("1x H200"), profile=profile, shapes={Role.ACTOR: shape, Role.ROLLOUT: shape}
    )
    (update,) = [p for p in report.forecasts[0].phases if p.phase == "update actor"]
    return update.peak / 1e9


def main() -> None:
    """One row per measured variant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("records", type=Path, nargs="+")
    options = parser.parse_args()
    rows = []
    for path in options.records:
        record = json.loads(path.read_text())
        size = record["options"]["size"]
        for variant, result in record["variants"].items():
            if "compile" in variant or "error" in result:
                continue
            predicted, measured = predicted_gb(size, record["options"], variant), result["peak_gb"]
            row = {"record": path.name, "size": size, "variant": variant, "capacity": record["options"]["capacity"]}
            rows.append(row | {"predicted_gb": predicted, "measured_gb": measured, "ratio": predicted / measured})
            ratio = predicted / measured
            print(f"{size:>5} {variant:<18} predicted {predicted:6.1f}, measured {measured:6.1f} GB, ratio {ratio:.3f}")
    options.out.write_text(json.dumps({"schema": 1, "benchmark": "memory_forecast", "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
