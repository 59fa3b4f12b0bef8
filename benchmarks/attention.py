"""Packed attention on one GPU: every backend that runs there, forward and backward, over packs of real length variance.

    python benchmarks/attention.py OUT.json [--backends flash4,flash2,varlen,sdpa] [--windows]

Writes one JSON record: for each pack and backend the times (CUDA events; n, min, median, max in ms), TFLOP/s and the
relative error against a float64 reference on the first sequences. FLOP/s count the causal half: 2*D*Hq*sum(s*(s+1))
for the forward (two products), 2.5 times that for the backward. A backend that fails is recorded with its message.
"""

from __future__ import annotations

import argparse
import platform
import time
from pathlib import Path

import torch

from rlspeed.bench.measure import device_ms
from rlspeed.bench.record import code_state, write_json
from rlspeed.engine.attention import BACKENDS, choose_attention, varlen_attention

# query heads, KV heads, head size
SHAPES = {"1.5b": (12, 2, 128), "7b": (28, 4, 128), "8b": (32, 8, 128)}
TOKENS = 16384
# for the repeats of one measurement
BUDGET_SECONDS = 0.3


def packs() -> dict[str, tuple[int, ...]]:
    """Lengths of packs of TOKENS tokens: answers of mixed length, one long sequence, and many short ones."""
    generator = torch.Generator().manual_seed(0)
    mixed: list[int] = []
    while sum(mixed) < TOKENS:
        length = int(torch.randint(232, 1225, (1,), generator=generator))
        mixed.append(min(length, TOKENS - sum(mixed)))
    return {"mixed": tuple(mixed), "one": (TOKENS,), "short": (64,) * (TOKENS // 64)}


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    """One sequence [T, H, D] in float64."""
    q, k, v = (x.detach().double() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[2] ** -0.5
    place = torch.arange(q.shape[0], device=q.device)
    distance = place[:, None] - place[None]
    allowed = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~allowed, -torch.inf).softmax(-1), v)


def measure(
    backend: str, heads: tuple[int, int, int], lengths: tuple[int, ...], window: int | None = None
) -> dict[str, object]:
    """Forward and backward of one backend on one pack."""
    query_heads, kv_heads, dim = heads
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(sum(lengths), n, dim, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for n in (query_heads, kv_heads, kv_heads)
    )
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda")

    def forward() -> torch.Tensor:
        return varlen_attention(q, k, v, bounds, lengths, max_seqlen=max(lengths), window=window, backend=backend)

    out = forward()
    upstream = torch.randn_like(out)
    first = slice(0, min(lengths[0], 2048))
    want = reference(q[first], k[first], v[first], window)
    error = ((out[first] - want).norm() / want.norm()).item()

    def backward() -> None:
        torch.autograd.grad(out, (q, k, v), upstream, retain_graph=True)

    with torch.no_grad():
        ahead = device_ms(forward, budget_seconds=BUDGET_SECONDS)
    back = device_ms(backward, budget_seconds=BUDGET_SECONDS)
    reach = sum(sum(min(i + 1, window or i + 1) for i in range(n)) for n in lengths)
    flops = 4 * dim * query_heads * reach
    return {
        "forward_ms": ahead,
        "backward_ms": back,
        "forward_tflops": flops / ahead["median"] * 1e-9,
        "backward_tflops": 2.5 * flops / back["median"] * 1e-9,
        "relative_error": error,
    }


def environment() -> dict[str, object]:
    """Commit, device and versions of a record."""

    commit, dirty = code_state()
    return {
        "schema": 1,
        "benchmark": "attention",
        "commit": commit,
        "dirty": dirty,
        "device": torch.cuda.get_device_name(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "choice": choose_attention("auto", "cuda", torch.bfloat16, 128)[1],
    }


def main() -> None:
    """Parse, run, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--backends", default=",".join(BACKENDS))
    parser.add_argument("--shapes", default="7b,1.5b")
    parser.add_argument("--windows", action="store_true", help="also a sliding window of 256 on the mixed pack")
    options = parser.parse_args()
    record = environment()
    print(record["choice"])
    rows: dict[str, object] = {}
    record["rows"] = rows
    started = time.perf_counter()
    for shape in options.shapes.split(","):
        cases = [(name, lengths, None) for name, lengths in packs().items()]
        if options.windows:
            cases.append(("mixed window 256", packs()["mixed"], 256))
        for backend in options.backends.split(","):
            for name, lengths, window in cases:
                key = f"{shape} {name} {backend}"
                try:
                    rows[key] = row = measure(backend, SHAPES[shape], lengths, window)
                    print(
                        f"{key:32s} fwd {row['forward_ms']['median']:7.2f} ms {row['forward_tflops']:5.0f} TFLOP/s | "
                        f"bwd {row['backward_ms']['median']:7.2f} ms {row['backward_tflops']:5.0f} TFLOP/s | "
                        f"error {row['relative_error']:.1e}"
                    )
                except Exception as error:
                    rows[key] = {"failed": f"{type(error).__name__}: {error}"[:500]}
                    print(f"{key:32s} {rows[key]['failed']}")
    record["seconds"] = time.perf_counter() - started
    write_json(options.out, record)


if __name__ == "__main__":
    main()
