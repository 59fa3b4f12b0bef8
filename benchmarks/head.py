"""The head on one GPU: time, peak memory and error of every design beside naive, chunked and Liger's, in one run.

    python benchmarks/head.py OUT.json [--shapes main,1.5b,7b] [--sweep]

Writes one JSON record: for each shape and variant the time of forward and of forward+backward (CUDA events; n, min,
median, max in ms), the extra peak memory (GiB above what the inputs take), and the error against float64. A variant
that fails is recorded with its message and does not stop the run. FLOP/s count 2*T*H*V per product; recomputed logits
are not counted.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from rlspeed.bench.measure import device_ms
from rlspeed.bench.record import code_state, write_json
from rlspeed.engine.head import HeadPlan, Tile, linear_logprob

SHAPES = {
    "main": {"tokens": 8192, "width": 4096, "vocab": 151936},
    "1.5b": {"tokens": 16384, "width": 1536, "vocab": 151936},
    "7b": {"tokens": 8192, "width": 3584, "vocab": 151936},
}
# standard deviation of the logits: large enough that rounding them to bf16 shows
LOGIT_SCALE = 4.0
CHECKED_TOKENS = 256
TILES = {
    "128x256 s4": Tile(stages=4),
    "128x256 s4 persistent": Tile(stages=4, persistent=True),
    "128x128 w4 s3": Tile(words=128, warps=4),
}
CUTS = {
    "fp32 words 4224": HeadPlan(forward_words=4224, backward_words=4224),
    "fp32 words 8448": HeadPlan(forward_words=8448, backward_words=8448),
    "fp32 words 16896": HeadPlan(forward_words=16896, backward_words=16896),
    "fp32 words 33792": HeadPlan(forward_words=33792, backward_words=33792),
    "fp32 in L2": HeadPlan(forward_words=4224, tokens=2048),
    "fp32 row block 1024": HeadPlan(row_block=1024),
    "fp32 row block 8192": HeadPlan(row_block=8192),
    "bf16 words 4224": HeadPlan(forward="bf16", backward="bf16", forward_words=4224, backward_words=4224),
    "bf16 words 16896": HeadPlan(forward="bf16", backward="bf16", forward_words=16896, backward_words=16896),
}

Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]
# for the repeats of one measurement
BUDGET_SECONDS = 0.25


def ours(plan: HeadPlan, with_entropy: bool = True) -> Call:
    """The head with a plan."""
    return lambda h, w, t: linear_logprob(h, w, t, with_entropy=with_entropy, plan=plan)


def naive(h: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All logits, log_softmax in fp32."""
    log_p = (h @ w.T).float().log_softmax(-1)
    return log_p.gather(1, t[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def naive_no_entropy(h: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, None]:
    """All logits, cross entropy in bf16's kernel: the least memory that plain torch needs."""
    return -F.cross_entropy(h @ w.T, t, reduction="none"), None


def chunked(h: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch over 1,024 tokens at a time, each recomputed in the backward."""
    parts = [checkpoint(naive, a, w, b, use_reentrant=False) for a, b in zip(h.split(1024), t.split(1024))]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def variants(sweep: bool) -> dict[str, Call]:
    """Name to function; sweep adds widths of the cut and shapes of the tile."""
    base = HeadPlan()
    found: dict[str, Call] = {"default": ours(base), "default, no entropy": ours(base, with_entropy=False)}
    found["fused"] = ours(replace(base, forward="fused", backward="fused"))
    found["bf16"] = ours(replace(base, forward="bf16", backward="bf16"))
    if sweep:
        found |= {name: ours(plan) for name, plan in CUTS.items()}
        for name, tile in TILES.items():
            found[f"fused {name}"] = ours(HeadPlan(forward="fused", backward="fused", tile=tile))
    found["naive"] = naive
    found["naive cross entropy"] = naive_no_entropy
    found["torch chunked"] = chunked
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        found["liger cross entropy"] = lambda h, w, t: (-liger_fused_linear_cross_entropy(h, w, t), None)
    except ImportError:
        print("liger_kernel is not installed")
    return found


def make_inputs(tokens: int, width: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random hidden states, weight and targets, logits of standard deviation LOGIT_SCALE."""
    torch.manual_seed(0)
    h = torch.randn(tokens, width, device="cuda").bfloat16()
    w = (torch.randn(vocab, width, device="cuda") * (LOGIT_SCALE * width**-0.5)).bfloat16()
    return h.requires_grad_(), w.requires_grad_(), torch.randint(vocab, (tokens,), device="cuda")


def peak_gib(run: Callable[[], object]) -> float:
    """Peak device memory of `run` above what was allocated before it."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def measure(call: Call, h: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> dict[str, object]:
    """Time and peak memory of forward without gradients and of forward+backward, upstream gradients per token."""
    weights = torch.randn(t.shape[0], device="cuda")

    def forward() -> None:
        with torch.no_grad():
            call(h, w, t)

    def both() -> None:
        h.grad = w.grad = None
        logprobs, entropy = call(h, w, t)
        loss = (logprobs * weights).sum() if logprobs.ndim else logprobs * 1.5
        if entropy is not None:
            loss = loss - 0.01 * entropy.sum()
        loss.backward()

    result: dict[str, object] = {
        "forward_ms": device_ms(forward, budget_seconds=BUDGET_SECONDS),
        "forward_peak_gib": peak_gib(forward),
    }
    h.grad = w.grad = None
    result["forward_backward_ms"] = device_ms(both, budget_seconds=BUDGET_SECONDS)
    h.grad = w.grad = None
    result["forward_backward_peak_gib"] = peak_gib(both)
    h.grad = w.grad = None
    return result


def reference(h: torch.Tensor, w: torch.Tensor, t: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
    """Log-probs, entropies and both gradients in float64."""
    h64, w64 = h.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    log_p = (h64 @ w64.T).log_softmax(-1)
    logprobs, entropy = log_p.gather(1, t[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    ((logprobs * weights).sum() - 0.01 * entropy.sum()).backward()
    return [logprobs.detach(), entropy.detach(), h64.grad, w64.grad]


def errors(call: Call, h: torch.Tensor, w: torch.Tensor, t: torch.Tensor, want: list[torch.Tensor]) -> dict[str, float]:
    """Largest and mean absolute error of log-probs and entropies; relative error (2-norm) of the gradients."""
    weights = torch.linspace(-1, 1, t.shape[0], device="cuda")
    a, b = h.detach().clone().requires_grad_(), w.detach().clone().requires_grad_()
    logprobs, entropy = call(a, b, t)
    if entropy is None or logprobs.ndim == 0:
        return {}
    ((logprobs * weights).sum() - 0.01 * entropy.sum()).backward()
    with torch.no_grad():
        scored = call(a, b, t)[0]
    return {
        "logprob_max": (logprobs - want[0]).abs().max().item(),
        "logprob_mean": (logprobs - want[0]).abs().mean().item(),
        "entropy_max": (entropy - want[1]).abs().max().item(),
        "hidden_grad_relative": ((a.grad - want[2]).norm() / want[2].norm()).item(),
        "weight_grad_relative": ((b.grad - want[3]).norm() / want[3].norm()).item(),
        "no_grad_differs_in": int((scored != logprobs).sum()),
    }


def floor(h: torch.Tensor, w: torch.Tensor) -> dict[str, object]:
    """The bare products: one forward, and with both of the backward; and the forward with fp32 written out, in cuts."""
    h, w = h.detach(), w.detach()
    z = torch.empty(h.shape[0], w.shape[0], dtype=h.dtype, device="cuda")
    cut = torch.empty(h.shape[0], 8448, dtype=torch.float32, device="cuda")
    dh, dw = torch.empty_like(h), torch.empty_like(w)

    def three() -> None:
        torch.mm(h, w.T, out=z)
        torch.mm(z, w, out=dh)
        torch.mm(z.T, h, out=dw)

    def cuts() -> None:
        for v in range(0, w.shape[0] - 8447, 8448):
            torch.mm(h, w[v : v + 8448].T, out_dtype=torch.float32, out=cut)

    found: dict[str, object] = {
        "forward_ms": device_ms(lambda: torch.mm(h, w.T, out=z), budget_seconds=BUDGET_SECONDS),
        "forward_backward_ms": device_ms(three, budget_seconds=BUDGET_SECONDS),
        "fp32_cuts_share_of_vocabulary": (w.shape[0] // 8448) * 8448 / w.shape[0],
    }
    try:
        found["forward_fp32_cuts_ms"] = device_ms(cuts, budget_seconds=BUDGET_SECONDS)
    except (RuntimeError, NotImplementedError) as error:
        found["forward_fp32_cuts_ms"] = str(error)[:200]
    return found


def run_shape(name: str, sweep: bool) -> dict[str, object]:
    """All variants on one shape."""
    shape = SHAPES[name]
    h, w, t = make_inputs(**shape)
    flops = 2 * shape["tokens"] * shape["width"] * shape["vocab"]
    found: dict[str, object] = {"shape": shape, "product_flops": flops, "floor": floor(h, w), "variants": {}}
    part = slice(0, CHECKED_TOKENS)
    weights = torch.linspace(-1, 1, CHECKED_TOKENS, device="cuda")
    want = reference(h[part], w, t[part], weights)
    print(f"\n{name} {shape}; floor {found['floor']}")
    for label, call in variants(sweep).items():
        torch.cuda.empty_cache()
        try:
            row = measure(call, h, w, t) | {"error": errors(call, h[part], w, t[part], want)}
            ms, both = row["forward_ms"]["median"], row["forward_backward_ms"]["median"]
            row["forward_tflops"] = flops / ms * 1e-9
            row["forward_backward_tflops"] = 3 * flops / both * 1e-9
            print(
                f"{label:26s} fwd {ms:7.2f} ms {row['forward_tflops']:4.0f} TF/s {row['forward_peak_gib']:4.1f} GiB | "
                f"fwd+bwd {both:7.2f} ms {row['forward_backward_tflops']:4.0f} TF/s "
                f"{row['forward_backward_peak_gib']:6.2f} GiB | {row['error']}"
            )
        except Exception as error:
            h.grad = w.grad = None
            row = {"failed": f"{type(error).__name__}: {error}"[:500]}
            print(f"{label:28s} {row['failed']}")
        found["variants"][label] = row
    return found


def environment() -> dict[str, object]:
    """Commit, device and versions of a record."""

    commit, dirty = code_state()
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("triton", "liger_kernel"):
        try:
            versions[package] = __import__(package).__version__
        except (ImportError, AttributeError):
            continue
    return {
        "schema": 1,
        "benchmark": "head",
        "commit": commit,
        "dirty": dirty,
        "device": torch.cuda.get_device_name(),
        "versions": versions,
    }


def main() -> None:
    """Parse, run, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shapes", default="main,1.5b,7b")
    parser.add_argument("--sweep", action="store_true", help="all widths and tiles, on the first shape")
    options = parser.parse_args()
    record = environment()
    started = time.perf_counter()
    record["shapes"] = {
        name: run_shape(name, options.sweep and place == 0) for place, name in enumerate(options.shapes.split(","))
    }
    record["seconds"] = time.perf_counter() - started
    write_json(options.out, record)


if __name__ == "__main__":
    main()
