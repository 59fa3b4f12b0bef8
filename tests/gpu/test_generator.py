"""The built-in generator on CUDA: kernels, graphs and paging against transformers and against the torch operations."""

from __future__ import annotations

import pytest
import torch

from rlspeed.rollout.builtin import BuiltinGenerator
from rlspeed.rollout.types import Prompt, Rollout, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FAMILIES = ("llama", "qwen2", "qwen3")
SHAPE = {
    "vocab_size": 1000,
    "hidden_size": 192,
    "intermediate_size": 352,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def make(family: str, dtype: torch.dtype = torch.float32, **extra: object) -> torch.nn.Module:
    """A random model whose logits are far apart, on the device."""
    import transformers

    config = getattr(transformers, f"{family.capitalize()}Config")
    model_class = getattr(transformers, f"{family.capitalize()}ForCausalLM")
    torch.manual_seed(0)
    model = model_class(config(**{**SHAPE, **extra}))
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(1.0 if p.ndim == 1 else 0.0, 0.1 if p.ndim == 1 else 0.08)
    return model.to("cuda", dtype).eval()


def jobs(count: int, n: int = 1, longest: int = 150) -> list[Prompt]:
    """n answers to each of `count` prompts of 1 to `longest` tokens."""
    draw = torch.Generator().manual_seed(7)
    out = []
    for i in range(count):
        length = int(torch.randint(1, longest, (1,), generator=draw))
        ids = tuple(torch.randint(3, 999, (length,), generator=draw).tolist())
        out += [Prompt(prompt_id=i, sample_id=s, token_ids=ids, seed=100 * i + s) for s in range(n)]
    return out


def generator(model: torch.nn.Module, **extra: object) -> BuiltinGenerator:
    return BuiltinGenerator(model, **{"max_concurrent": 64, "max_length": 256, **extra})


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers(family: str) -> None:
    model = make(family, head_dim=32) if family == "qwen3" else make(family)
    prompts = jobs(20)
    got = generator(model).generate(prompts, SamplingParams(max_new_tokens=60, temperature=0.0, stop_token_ids=(2, 17)))
    for prompt, rollout in zip(prompts, got):
        ids = torch.tensor([prompt.token_ids], device="cuda")
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=60,
            do_sample=False,
            eos_token_id=[2, 17],
            pad_token_id=0,
        )
        assert list(rollout.response_ids) == out[0, len(prompt.token_ids) :].tolist()


def trainer_gap(model: torch.nn.Module, rollouts: list[Rollout], temperature: float) -> float:
    """Largest difference to a full forward in fp32."""
    worst = 0.0
    for r in rollouts:
        ids = torch.tensor([r.prompt_ids + r.response_ids], device="cuda")
        with torch.no_grad():
            logp = (model(ids).logits[0].float() / temperature).log_softmax(-1)
        at = torch.arange(len(r.response_ids), device="cuda") + len(r.prompt_ids) - 1
        want = logp[at, torch.tensor(r.response_ids, device="cuda")].cpu()
        worst = max(worst, float((want - torch.tensor(r.logprobs)).abs().max()))
    return worst


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("extra", [{}, {"top_k": 5, "top_p": 0.9}, {"min_p": 0.05}])
def test_logprobs_are_those_of_a_full_forward(family: str, extra: dict[str, float]) -> None:
    model = make(family)
    sampling = SamplingParams(max_new_tokens=50, temperature=0.8, stop_token_ids=(2,), **extra)  # type: ignore[arg-type]
    got = generator(model).generate(jobs(12, 3), sampling)
    # fp32: the same sums in another order
    assert trainer_gap(model, got, 0.8) < 2e-4


def test_bf16_is_closer_than_other_engines() -> None:
    model = make("qwen2", torch.bfloat16)
    got = generator(model).generate(jobs(12, 3), SamplingParams(max_new_tokens=50))
    differences = []
    for r in got:
        ids = torch.tensor([r.prompt_ids + r.response_ids], device="cuda")
        with torch.no_grad():
            logp = model(ids).logits[0].float().log_softmax(-1)
        at = torch.arange(len(r.response_ids), device="cuda") + len(r.prompt_ids) - 1
        differences.append(logp[at, torch.tensor(r.response_ids, device="cuda")].cpu() - torch.tensor(r.logprobs))
    assert float(torch.cat(differences).abs().mean()) < 0.02


def test_batch_composition_and_lack_of_memory_do_not_matter() -> None:
    """Alone, together, through four lanes, and with a cache that holds a part: the same answers, nothing lost."""
    model = make("llama")
    prompts = jobs(10, 4)
    sampling = SamplingParams(max_new_tokens=90, stop_token_ids=(2,))
    together = generator(model).generate(prompts, sampling)
    narrow = generator(model, max_concurrent=4).generate(prompts, sampling)
    page = generator(model).decoder.page_bytes(64)
    tight = generator(model, cache_gib=14 * page / 2**30)
    squeezed = tight.generate(prompts, sampling)
    alone = [generator(model).generate([p], sampling)[0] for p in prompts[:6]]
    assert [r.response_ids for r in together] == [r.response_ids for r in narrow]
    assert [r.response_ids for r in together] == [r.response_ids for r in squeezed]
    assert [r.response_ids for r in together[:6]] == [r.response_ids for r in alone]
    assert tight.stats.preempted > 0
    assert len({r.response_ids for r in together}) == len(prompts)


@pytest.mark.parametrize("extra", [{}, {"top_k": 8}])
def test_sampled_frequencies(extra: dict[str, int]) -> None:
    """Chi-square of 20,000 first and second tokens against the model; seeds are fixed."""
    model = make("llama", vocab_size=64)
    prompts = [Prompt(prompt_id=0, sample_id=i, token_ids=(5, 6, 7), seed=i) for i in range(20000)]
    sampling = SamplingParams(max_new_tokens=2, temperature=1.5, **extra)  # type: ignore[arg-type]
    got = generator(model, max_concurrent=256).generate(prompts, sampling)
    first = torch.tensor([r.response_ids[0] for r in got])
    with torch.no_grad():
        logits = model(torch.tensor([[5, 6, 7]], device="cuda")).logits[0, -1].float().cpu() / 1.5
    if extra:
        logits[logits < logits.topk(8).values[-1]] = -torch.inf
    probs = logits.softmax(-1).double()
    counts = torch.bincount(first, minlength=64).double()
    assert float(counts[probs == 0].sum()) == 0
    counts, expected = counts[probs > 0], probs[probs > 0] * len(got)
    rare = expected < 5
    if rare.any():
        counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
        expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    statistic, degrees = float(((counts - expected).square() / expected).sum()), len(counts) - 1
    assert statistic < degrees + 3.1 * (2 * degrees) ** 0.5
    top = int(first.mode().values)
    second = torch.tensor([r.response_ids[1] for r in got if r.response_ids[0] == top])
    assert len(second.unique()) > 3, "the noise of a position is its own"


def test_weights_are_read_in_place_and_graphs_stay() -> None:
    model = make("qwen2", torch.bfloat16)
    g = generator(model)
    prompts = jobs(6, 2)
    sampling = SamplingParams(max_new_tokens=30, temperature=0.0)
    before = g.generate(prompts, sampling)
    graphs = dict(g._lanes._graphs)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    g.load(None, 1)
    after = g.generate(prompts, sampling)
    assert g._lanes._graphs == graphs, "nothing was captured again"
    assert [r.response_ids for r in after] == [r.response_ids for r in generator(model).generate(prompts, sampling)]
    assert [r.response_ids for r in after] != [r.response_ids for r in before]


def test_parameters_stay_the_models_own() -> None:
    """Fused storage changes neither values nor names, and an update of a parameter is an update of the whole."""
    model, plain = make("qwen2"), make("qwen2")
    g = generator(model)
    for (name, p), (other, q) in zip(model.named_parameters(), plain.named_parameters()):
        assert name == other
        assert torch.equal(p, q)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight.fill_(3.0)
    rows = g.decoder.layers[1].qkv[192 : 192 + 64]
    assert (rows == 3.0).all()
