"""The built-in generator against transformers, against itself in other batches, and at its limits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlspeed.errors import ConfigError, DataError, RunError
from rlspeed.models.build import load_causal_lm
from rlspeed.rollout.builtin import BuiltinGenerator
from rlspeed.rollout.decode import fuse_parameters
from rlspeed.rollout.types import GenerationStopped, Prompt, Rollout, SamplingParams

PROMPTS = [(5, 6, 7), (8, 9, 10, 11, 12, 13, 14), (15,), (20, 21, 22, 23), (5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)]
GREEDY = SamplingParams(max_new_tokens=16, temperature=0.0, stop_token_ids=(2,))
GREEDY_FREE = SamplingParams(max_new_tokens=40, temperature=0.0)


def requests(prompts: list[tuple[int, ...]], n: int = 1) -> list[Prompt]:
    """n answers to each prompt, each with a seed of its own."""
    return [
        Prompt(prompt_id=i, sample_id=s, token_ids=p, seed=1000 * i + s)
        for i, p in enumerate(prompts)
        for s in range(n)
    ]


@pytest.fixture(params=["llama", "qwen2", "qwen3"])
def model(request: pytest.FixtureRequest, tiny_models: dict[str, Path]) -> torch.nn.Module:
    """Tied and untied, with biases, with head norms, all with fewer KV heads than heads."""
    return load_causal_lm(str(tiny_models[request.param]), dtype=torch.float32, attention="sdpa").eval()


@pytest.fixture
def llama(tiny_models: dict[str, Path]) -> torch.nn.Module:
    """The smallest family."""
    return load_causal_lm(str(tiny_models["llama"]), dtype=torch.float32, attention="sdpa").eval()


def test_greedy_equals_transformers(model: torch.nn.Module) -> None:
    got = BuiltinGenerator(model, max_concurrent=8, max_length=64).generate(requests(PROMPTS), GREEDY)
    for prompt, rollout in zip(PROMPTS, got):
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=16,
            do_sample=False,
            eos_token_id=2,
            pad_token_id=0,
        )
        assert list(rollout.response_ids) == out[0, len(prompt) :].tolist()
        assert rollout.finish == ("stop" if rollout.response_ids[-1] == 2 else "length")


def test_logprobs_are_those_of_a_full_forward(model: torch.nn.Module) -> None:
    sampling = SamplingParams(max_new_tokens=12, temperature=0.7, top_k=20, stop_token_ids=(2,))
    for rollout in BuiltinGenerator(model, max_concurrent=3, max_length=64).generate(requests(PROMPTS, 2), sampling):
        ids = torch.tensor([rollout.prompt_ids + rollout.response_ids])
        with torch.no_grad():
            logp = (model(ids).logits[0] / 0.7).log_softmax(-1)
        start = len(rollout.prompt_ids)
        want = [float(logp[start + j - 1, t]) for j, t in enumerate(rollout.response_ids)]
        # fp32, two layers: the same sums in another order
        assert list(rollout.logprobs) == pytest.approx(want, abs=1e-5)


def test_batch_composition_does_not_matter(llama: torch.nn.Module) -> None:
    """The same requests alone, in one batch, and through two slots give the same answers."""
    sampling = SamplingParams(max_new_tokens=12, temperature=1.0, stop_token_ids=(2,))
    jobs = requests(PROMPTS, 3)
    wide = BuiltinGenerator(llama, max_concurrent=64, max_length=64)
    together = wide.generate(jobs, sampling)
    narrow = BuiltinGenerator(llama, max_concurrent=2, max_length=64).generate(jobs, sampling)
    alone = [wide.generate([job], sampling)[0] for job in jobs]
    for a, b, c in zip(together, narrow, alone):
        assert a.response_ids == b.response_ids == c.response_ids
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
    assert [(r.prompt_id, r.sample_id) for r in narrow] == [(p.prompt_id, p.sample_id) for p in jobs]
    assert len({r.response_ids for r in together}) > len(PROMPTS), "answers of a group differ"


def test_sampled_frequencies(llama: torch.nn.Module) -> None:
    """Chi-square of 4,000 first tokens against the model's distribution; seeds are fixed."""
    jobs = [Prompt(prompt_id=0, sample_id=i, token_ids=(5, 6, 7), seed=i) for i in range(4000)]
    generator = BuiltinGenerator(llama, max_concurrent=4000, max_length=8)
    drawn = [r.response_ids[0] for r in generator.generate(jobs, SamplingParams(max_new_tokens=1))]
    with torch.no_grad():
        probs = llama(torch.tensor([[5, 6, 7]])).logits[0, -1].softmax(-1)
    counts = torch.bincount(torch.tensor(drawn), minlength=probs.numel()).double()
    expected = probs.double() * len(jobs)
    statistic = float(((counts - expected).square() / expected).sum())
    degrees = probs.numel() - 1
    # normal approximation of the chi-square's 99.9 % point
    assert statistic < degrees + 3.1 * (2 * degrees) ** 0.5


def test_stop_ids_and_limits(llama: torch.nn.Module) -> None:
    """pack-19: any of several end ids ends an answer and is its last token; a length stop has no invented end."""
    sampling = SamplingParams(max_new_tokens=40, temperature=1.0, stop_token_ids=tuple(range(2, 30)))
    got = BuiltinGenerator(llama, max_concurrent=8, max_length=64).generate(requests(PROMPTS, 4), sampling)
    stopped = [r for r in got if r.finish == "stop"]
    assert stopped
    for r in stopped:
        assert r.response_ids[-1] in sampling.stop_token_ids
        assert not set(r.response_ids[:-1]) & set(sampling.stop_token_ids)
    short = [
        Prompt(prompt_id=0, sample_id=0, token_ids=(5,), seed=0, max_new_tokens=3),
        Prompt(prompt_id=1, sample_id=0, token_ids=tuple(range(5, 65))[:60], seed=0),
    ]
    a, b = BuiltinGenerator(llama, max_concurrent=8, max_length=64).generate(short, SamplingParams(max_new_tokens=9))
    assert (len(a.response_ids), a.finish) == (3, "length")
    assert (len(b.response_ids), b.finish) == (4, "length"), "the context limit ends an answer"


def test_stop_strings(llama: torch.nn.Module) -> None:
    class Words:
        """Decodes ids as space-separated numbers."""

        def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
            return " ".join(map(str, ids)) + " "

    free = BuiltinGenerator(llama, max_concurrent=8, max_length=64).generate(requests(PROMPTS), GREEDY)
    target = free[1].response_ids[2]
    sampling = SamplingParams(max_new_tokens=16, temperature=0.0, stop_token_ids=(2,), stop=(f" {target} ",))
    generator = BuiltinGenerator(llama, max_concurrent=8, max_length=64, tokenizer=Words())
    got = generator.generate(requests(PROMPTS)[1:2], sampling)[0]
    assert got.finish == "stop"
    assert got.response_ids[-1] == target
    assert len(got.response_ids) <= 3


def test_impossible_requests_are_named(llama: torch.nn.Module) -> None:
    generator = BuiltinGenerator(llama, max_concurrent=8, max_length=8)
    bad = [
        Prompt(prompt_id=3, sample_id=0, token_ids=tuple(range(5, 13)), seed=0),
        Prompt(prompt_id=4, sample_id=0, token_ids=(5,), seed=0, max_new_tokens=0),
    ]
    with pytest.raises(DataError) as caught:
        generator.generate(bad, GREEDY)
    assert "prompt 3" in str(caught.value)
    assert "prompt 4" in str(caught.value)


def test_weights_are_shared_and_nothing_stale_is_kept(llama: torch.nn.Module) -> None:
    """sync-06: after an update in place and `load`, answers are those of a fresh generator."""
    generator = BuiltinGenerator(llama, max_concurrent=8, max_length=64)
    assert generator.decoder.layers[0].q.data_ptr() == llama.model.layers[0].self_attn.q_proj.weight.data_ptr()
    before = generator.generate(requests(PROMPTS), GREEDY)
    with torch.no_grad():
        for p in llama.parameters():
            p.add_(0.3 * torch.randn_like(p))
    generator.load(None, 1)
    after = generator.generate(requests(PROMPTS), GREEDY)
    fresh = BuiltinGenerator(llama, max_concurrent=8, max_length=64).generate(requests(PROMPTS), GREEDY)
    assert [r.response_ids for r in after] == [r.response_ids for r in fresh]
    assert [r.response_ids for r in after] != [r.response_ids for r in before]
    assert {r.policy_version for r in after} == {1}


def test_stop_request_and_callback(llama: torch.nn.Module) -> None:
    seen: list[Rollout] = []
    asked = iter([False] * 5 + [True] * 100)
    generator = BuiltinGenerator(
        llama, max_concurrent=8, max_length=64, should_stop=lambda: next(asked), on_finished=seen.append
    )
    with pytest.raises(GenerationStopped):
        generator.generate(requests(PROMPTS), SamplingParams(max_new_tokens=30))
    generator.should_stop = None
    got = generator.generate(requests(PROMPTS), SamplingParams(max_new_tokens=3))
    assert sorted(r.prompt_id for r in seen) == sorted(r.prompt_id for r in got)


TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def tiny_llama(**extra: object) -> torch.nn.Module:
    """A random Llama with `extra` in its config; biases are not zero."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**TINY, **extra)).eval()  # type: ignore[arg-type]
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.3)
    return model


@pytest.mark.parametrize("extra", [{"attention_bias": True}, {"mlp_bias": True}, {"hidden_act": "gelu"}])
def test_biases_and_activation_of_the_config_are_used(extra: dict[str, object]) -> None:
    model = tiny_llama(**extra)
    job = Prompt(prompt_id=0, sample_id=0, token_ids=(5, 6, 7), seed=1)
    rollout = BuiltinGenerator(model, max_concurrent=1, max_length=64).generate([job], GREEDY)[0]
    with torch.no_grad():
        logp = model(torch.tensor([rollout.prompt_ids + rollout.response_ids])).logits[0].log_softmax(-1)
    want = [float(logp[2 + j, t]) for j, t in enumerate(rollout.response_ids)]
    # fp32, two layers: the same sums in another order
    assert list(rollout.logprobs) == pytest.approx(want, abs=1e-5)


def test_rope_that_changes_with_length_is_refused() -> None:
    model = tiny_llama(rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4})
    kept = model.model.rotary_emb.inv_freq.clone()
    with pytest.raises(ConfigError, match="dynamic"):
        BuiltinGenerator(model, max_concurrent=1, max_length=128)
    BuiltinGenerator(model, max_concurrent=1, max_length=64)
    assert torch.equal(kept, model.model.rotary_emb.inv_freq), "the trainer's own table is left alone"


def test_a_prompt_is_computed_once_though_its_answers_queue(llama: torch.nn.Module) -> None:
    """Eight answers through two slots that free one after the other: one prefill."""
    generator = BuiltinGenerator(llama, max_concurrent=2, max_length=64)
    computed: list[tuple[int, ...]] = []
    prefill = generator.decoder.prefill

    def counted(prompts: list[tuple[int, ...]], *rest: object) -> torch.Tensor:
        computed.extend(prompts)
        return prefill(prompts, *rest)  # type: ignore[arg-type]

    generator.decoder.prefill = counted  # type: ignore[method-assign, assignment]
    jobs = [Prompt(prompt_id=0, sample_id=i, token_ids=(5, 6, 7), seed=i, max_new_tokens=3 + i) for i in range(8)]
    got = generator.generate(jobs, SamplingParams(max_new_tokens=9))
    assert computed == [(5, 6, 7)]
    assert [len(r.response_ids) for r in got] == [3 + i for i in range(8)]
    alone = [generator.generate([job], SamplingParams(max_new_tokens=9))[0] for job in jobs]
    assert [r.response_ids for r in got] == [r.response_ids for r in alone]


def test_stop_strings_need_a_tokenizer(llama: torch.nn.Module) -> None:
    generator = BuiltinGenerator(llama, max_concurrent=2, max_length=64)
    with pytest.raises(DataError, match="tokenizer"):
        generator.generate(requests(PROMPTS), SamplingParams(max_new_tokens=4, stop=("x",)))


def test_pages_chunks_and_lack_of_memory_change_nothing(llama: torch.nn.Module) -> None:
    """Small pages, steps in chunks, and a cache that holds a part of the sequences: the same answers."""
    sampling = SamplingParams(max_new_tokens=20, temperature=1.0, stop_token_ids=(2, 3, 4))
    jobs = requests(PROMPTS, 4)
    want = BuiltinGenerator(llama, max_concurrent=16, max_length=64).generate(jobs, sampling)
    paged = BuiltinGenerator(llama, max_concurrent=16, max_length=64, page_size=4, chunk=3)
    got = paged.generate(jobs, sampling)
    page = paged.decoder.page_bytes(4)
    tight = BuiltinGenerator(llama, max_concurrent=16, max_length=64, page_size=4, chunk=3, cache_gib=24 * page / 2**30)
    squeezed = tight.generate(jobs, sampling)
    assert tight.stats.preempted > 0
    assert paged.stats.preempted == 0
    for a, b, c in zip(want, got, squeezed):
        assert a.response_ids == b.response_ids == c.response_ids
        assert a.finish == b.finish == c.finish
        # fp32, two layers: the same sums in another order
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
        assert a.logprobs == pytest.approx(c.logprobs, abs=1e-5)


def test_a_cache_too_small_for_one_request_is_refused(llama: torch.nn.Module) -> None:
    generator = BuiltinGenerator(llama, max_concurrent=4, max_length=64, page_size=4, cache_gib=1e-9)
    with pytest.raises(RunError, match="kv_cache_gib"):
        generator.generate(requests(PROMPTS), GREEDY)


def test_a_log_prob_that_is_no_number_names_its_prompt(llama: torch.nn.Module) -> None:
    with torch.no_grad():
        llama.model.norm.weight[3] = torch.nan
    with pytest.raises(RunError, match="prompt 0") as caught:
        BuiltinGenerator(llama, max_concurrent=4, max_length=64).generate(requests(PROMPTS), GREEDY)
    assert "not a finite number" in str(caught.value)


def test_stats_count_what_was_generated(llama: torch.nn.Module) -> None:
    generator = BuiltinGenerator(llama, max_concurrent=8, max_length=64)
    got = generator.generate(requests(PROMPTS, 2), SamplingParams(max_new_tokens=5))
    assert generator.stats.tokens == sum(len(r.response_ids) for r in got) == 50
    assert generator.stats.prefill_tokens == sum(map(len, PROMPTS)), "the two answers to a prompt share it"
    assert generator.stats.latency_p99 >= generator.stats.latency_mean > 0
    assert generator.generate([], GREEDY) == []
    assert generator.stats.tokens == 0


def test_longest_first_starts_what_was_long(llama: torch.nn.Module) -> None:
    """The order of admission changes, the answers do not."""
    jobs = requests(PROMPTS, 1)
    sampling = SamplingParams(max_new_tokens=20, stop_token_ids=tuple(range(2, 12)))
    plain = BuiltinGenerator(llama, max_concurrent=2, max_length=64)
    eager = BuiltinGenerator(llama, max_concurrent=2, max_length=64, longest_first=True)
    want = plain.generate(jobs, sampling)
    first, started = eager.generate(jobs, sampling), []
    prefill = eager.decoder.prefill

    def seen(sequences: list[tuple[int, ...]], *rest: object) -> torch.Tensor:
        started.extend(sequences)
        return prefill(sequences, *rest)  # type: ignore[arg-type]

    eager.decoder.prefill = seen  # type: ignore[method-assign, assignment]
    second = eager.generate(jobs, sampling)
    lengths = {r.prompt_ids: len(r.response_ids) for r in want}
    assert [r.response_ids for r in want] == [r.response_ids for r in first] == [r.response_ids for r in second]
    assert [lengths[s] for s in started] == sorted(lengths.values(), reverse=True)


def test_fused_parameters_are_the_same_parameters(model: torch.nn.Module) -> None:
    """One matrix product for q, k and v: the same answers, and an update of one is an update of the whole."""
    want = BuiltinGenerator(model, max_concurrent=8, max_length=64).generate(requests(PROMPTS), GREEDY)
    before = {name: p.clone() for name, p in model.named_parameters()}
    fuse_parameters(model)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    generator = BuiltinGenerator(model, max_concurrent=8, max_length=64)
    whole = generator.decoder.layers[0].qkv
    assert whole is not None
    assert [r.response_ids for r in generator.generate(requests(PROMPTS), GREEDY)] == [r.response_ids for r in want]
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.fill_(3.0)
    start = model.model.layers[0].self_attn.q_proj.weight.shape[0]
    rows = model.model.layers[0].self_attn.k_proj.weight.shape[0]
    assert (whole[start : start + rows] == 3.0).all()


def test_enough_prompts_end_the_call(llama: torch.nn.Module) -> None:
    """Prompts whose answers are short come back whole; the others are dropped, and the call ends early."""
    limits = {0: (30, 4), 1: (3, 5), 2: (9, 9), 3: (5, 5), 4: (30, 30)}  # prompt: limits of its two answers
    jobs = [
        Prompt(prompt_id=i, sample_id=s, token_ids=PROMPTS[i], seed=10 * i + s, max_new_tokens=limits[i][s])
        for i in limits
        for s in range(2)
    ]
    generator = BuiltinGenerator(llama, max_concurrent=16, max_length=64)
    whole = {(r.prompt_id, r.sample_id): r for r in generator.generate(jobs, GREEDY_FREE)}
    got = generator.generate_enough(jobs, GREEDY_FREE, groups=2)
    assert [(r.prompt_id, r.sample_id) for r in got] == [(1, 0), (1, 1), (3, 0), (3, 1)]
    assert all(r == whole[(r.prompt_id, r.sample_id)] for r in got)
    assert generator.stats.latency_mean > 0
    three = generator.generate_enough(jobs, GREEDY_FREE, groups=3)
    assert [r.prompt_id for r in three] == [1, 1, 2, 2, 3, 3]
    assert generator.generate_enough(jobs, GREEDY_FREE, groups=0) == []
    assert len(generator.generate_enough(jobs, GREEDY_FREE, groups=9)) == len(jobs)
    narrow = BuiltinGenerator(llama, max_concurrent=2, max_length=64).generate_enough(jobs, GREEDY_FREE, groups=2)
    assert [r.prompt_id for r in narrow] == [1, 1, 2, 2], "a lane that is held does not hold the others up"
