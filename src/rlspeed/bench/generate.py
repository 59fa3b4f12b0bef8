"""How fast a generator is on a model and a file of prompts: what `rlspeed bench generate` measures."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlspeed.bench.record import Record, Value, digest, new_record
from rlspeed.errors import ConfigError, DataError, Fault
from rlspeed.planning.probe import probe_machine, read_shape
from rlspeed.rollout.generator import Generator
from rlspeed.rollout.types import Prompt, Rollout, SamplingParams

Engine = Literal["builtin", "vllm"]
Progress = Callable[[int, int, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """What to generate.

    prompts: files as `data.train_files` takes them, or a .txt file with a prompt a line. limit: use the first so many
    prompts; None: all. n: answers to each. concurrent: most sequences in flight. repeats: measured runs after one that
    warms up. whole: no end token, so that every answer has max_new_tokens.
    """

    model: str
    prompts: tuple[str, ...]
    engine: Engine = "builtin"
    prompt_key: str = "prompt"
    limit: int | None = None
    n: int = 1
    concurrent: int = 256
    max_new_tokens: int = 256
    temperature: float = 1.0
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    repeats: int = 3
    seed: int = 0
    whole: bool = False
    trust_remote_code: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One measured run. tokens: answer tokens. steps: tokens of the longest answer."""

    seconds: float
    tokens: int
    steps: int
    latency: tuple[float, float, float] | None
    tail_seconds: float | None


def measure_generate(options: GenerateOptions, progress: Progress = lambda *_: None) -> Record:
    """Load, warm up, measure `repeats` runs with other seeds each.

    Raises:
        ConfigError: a model or an engine that cannot be had, or a number out of range.
        DataError: prompts that cannot be read or are too long.
    """
    _check(options)
    model, tokens, sampling, generator = _load(options)
    jobs = [
        Prompt(prompt_id=i, sample_id=s, token_ids=ids, seed=0)
        for i, ids in enumerate(tokens)
        for s in range(options.n)
    ]
    runs: list[Run] = []
    try:
        for number in range(options.repeats + 1):
            seeds = range(options.seed + number * len(jobs), options.seed + (number + 1) * len(jobs))
            run = _run(generator, [dataclasses.replace(j, seed=s) for j, s in zip(jobs, seeds)], sampling)
            progress(number, options.repeats, run.tokens / run.seconds)
            if number:
                runs.append(run)
    finally:
        generator.close()
    return new_record(
        f"generate-{options.engine}",
        summarise(runs),
        profile=digest(dataclasses.asdict(options)),
        data=digest([list(ids) for ids in tokens]),
        extra={
            "options": dataclasses.asdict(options),
            "prompt_tokens": sum(map(len, tokens)),
            "requests": len(jobs),
            **_floor(model, runs, tokens, options),
        },
    )


def _check(options: GenerateOptions) -> None:
    least = {"n": 1, "concurrent": 1, "max_new_tokens": 1, "repeats": 1}
    faults = [
        Fault(where=f"--{name.replace('_', '-')}", found=str(getattr(options, name)), allowed=f"at least {low}")
        for name, low in least.items()
        if getattr(options, name) < low
    ]
    if options.limit is not None and options.limit < 1:
        faults.append(Fault(where="--limit", found=str(options.limit), allowed="at least 1"))
    if not 0.0 <= options.temperature < float("inf"):
        faults.append(Fault(where="--temperature", found=str(options.temperature), allowed="0 or more"))
    if faults:
        raise ConfigError(faults)


def _load(options: GenerateOptions) -> tuple[Any, list[tuple[int, ...]], SamplingParams, Generator]:
    """Model, prompts, sampling and the generator."""
    import torch

    from rlspeed.data.render import load_tokenizer
    from rlspeed.engine.precision import resolve
    from rlspeed.models.build import end_token_ids, load_causal_lm, resolve_model_path

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    dtype = resolve(options.dtype, device).compute
    folder = resolve_model_path(options.model)
    tokenizer = load_tokenizer(folder, trust_remote_code=options.trust_remote_code)
    tokens = read_prompts(options, tokenizer)
    longest = max(map(len, tokens)) + options.max_new_tokens
    model = load_causal_lm(
        options.model, dtype=dtype, attention="sdpa", trust_remote_code=options.trust_remote_code
    ).eval()
    stops = () if options.whole else end_token_ids(model, tokenizer, [])
    sampling = SamplingParams(
        max_new_tokens=options.max_new_tokens, temperature=options.temperature, stop_token_ids=stops
    )
    if options.engine == "vllm":
        from rlspeed.rollout.vllm import VllmGenerator

        name = str(dtype).removeprefix("torch.")
        vllm = VllmGenerator(
            folder, dtype=name, max_length=longest, max_concurrent=options.concurrent, sampling=sampling
        )
        return model, tokens, sampling, vllm
    from rlspeed.rollout.builtin import BuiltinGenerator

    builtin = BuiltinGenerator(
        model.to(device), max_concurrent=options.concurrent, max_length=longest, tokenizer=tokenizer
    )
    return model, tokens, sampling, builtin


def read_prompts(options: GenerateOptions, tokenizer: Any) -> list[tuple[int, ...]]:
    """Token ids of the prompts: rendered as `train` renders them; lines of a .txt file as they are.

    Raises:
        DataError: nothing to read.
    """
    texts = [Path(p) for p in options.prompts if p.endswith(".txt")]
    if texts and len(texts) != len(options.prompts):
        raise DataError(Fault(where="prompts", found=".txt beside other files", allowed="one kind of file"))
    if texts:
        lines: list[str] = []
        for path in texts:
            try:
                lines += [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
            except (OSError, UnicodeDecodeError) as error:
                raise DataError(Fault(where=str(path), found=f"cannot be read: {error}")) from error
        out = [tuple(tokenizer(line)["input_ids"]) for line in lines[: options.limit]]
    else:
        from rlspeed.config.schema import Data
        from rlspeed.config.schema import Rollout as RolloutConfig
        from rlspeed.data.prompts import load_prompts

        data = Data(train_files=list(options.prompts), prompt_key=options.prompt_key, max_length=1 << 20)
        table = load_prompts(data, RolloutConfig(max_new_tokens=options.max_new_tokens), tokenizer, "train")
        out = [tuple(table[i].token_ids) for i in range(len(table))][: options.limit]
    if not out:
        raise DataError(Fault(where=", ".join(options.prompts), found="no prompts", allowed="at least one"))
    return out


def _run(generator: Generator, jobs: Sequence[Prompt], sampling: SamplingParams) -> Run:
    """One call of generate; the answers are on the host when it returns, so the clock needs no more."""
    start = time.perf_counter()
    rollouts: list[Rollout] = generator.generate(jobs, sampling)
    seconds = time.perf_counter() - start
    stats = getattr(generator, "stats", None)
    return Run(
        seconds=seconds,
        tokens=sum(len(r.response_ids) for r in rollouts),
        steps=max(len(r.response_ids) for r in rollouts),
        latency=None if stats is None else (stats.latency_mean, stats.latency_std, stats.latency_p99),
        tail_seconds=None if stats is None else stats.tail_seconds,
    )


def summarise(runs: Sequence[Run]) -> dict[str, Value]:
    """The record's values."""
    values = {
        "answer_tokens_per_second": Value(unit="tokens/s", samples=tuple(r.tokens / r.seconds for r in runs)),
        "seconds": Value(unit="s", samples=tuple(r.seconds for r in runs)),
        "answer_tokens": Value(unit="tokens", samples=tuple(float(r.tokens) for r in runs)),
    }
    latencies = [r.latency for r in runs if r.latency is not None]
    if len(latencies) == len(runs):
        for place, name in enumerate(("mean", "std", "p99")):
            samples = tuple(1e3 * latency[place] for latency in latencies)
            values[f"token_latency_{name}"] = Value(unit="ms", samples=samples)
    tails = tuple(r.tail_seconds for r in runs if r.tail_seconds is not None)
    if len(tails) == len(runs):
        values["tail_seconds"] = Value(unit="s", samples=tails)
    return values


def _floor(
    model: Any, runs: Sequence[Run], tokens: Sequence[Sequence[int]], options: GenerateOptions
) -> dict[str, Any]:
    """The share of the decode floor: the weights read once per step of the longest answer, and every key and value that
    a token looks at, at the device's bandwidth. Empty for a device without public data.
    """
    machine = probe_machine()
    device = machine.device(0)
    kind = None if device is None else device.kind
    shape = read_shape(options.model)
    if kind is None or shape is None:
        return {}
    item = next(model.parameters()).element_size()
    shares = []
    for run in runs:
        rounds = max(1.0, len(tokens) * options.n / options.concurrent)
        mean = run.tokens / (len(tokens) * options.n)
        context = statistics.fmean(map(len, tokens)) + mean / 2
        weights = rounds * run.steps * shape.matmul_params * item
        cache = run.tokens * context * shape.kv_elements_per_token * item
        shares.append((weights + cache) / kind.memory_bytes_per_second / run.seconds)
    return {"share_of_decode_floor": statistics.median(shares)}
