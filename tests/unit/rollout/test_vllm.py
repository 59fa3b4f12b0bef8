"""The vLLM adapter against a small stand-in for the parts of vLLM that it uses; the real one is a slow test."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from rlspeed.errors import ConfigError, DataError, RunError
from rlspeed.models.build import load_causal_lm
from rlspeed.rollout import vllm as adapter
from rlspeed.rollout.types import Prompt, SamplingParams

GREEDY = SamplingParams(max_new_tokens=5, temperature=0.0, stop_token_ids=(2,))
PLAIN = SamplingParams(max_new_tokens=5, stop_token_ids=(2,))
PROMPTS = [Prompt(prompt_id=i, sample_id=0, token_ids=(5 + i, 6, 7), seed=(1 << 64) - 1 - i) for i in range(3)]


class FakeLLM:
    """transformers behind vLLM's methods; like the CPU backend it keeps a copy of the head of its own."""

    made: list[FakeLLM] = []  # noqa: RUF012
    loses_head = False

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments
        self.model = load_causal_lm(arguments["model"], dtype=torch.float32, attention="sdpa").eval()
        self.head = self.model.lm_head.weight.detach().clone()
        self.calls: list[str] = []
        self.fail: str | None = None
        self.finish: str | None = None
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=lambda: self.calls.append("shutdown")))
        FakeLLM.made.append(self)

    def apply_model(self, function: Any) -> list[Any]:
        return [function(self.model)]

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        self.calls.append(method)
        if self.fail:
            raise ValueError(self.fail)
        with torch.no_grad():
            for name, tensor in kwargs["weights_iterator"]:
                if name == "lm_head.weight":
                    self.head.copy_(self.head if self.loses_head else tensor)
                else:
                    self.model.get_parameter(name).copy_(tensor)

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset_prefix_cache")
        return True

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(f"wake {tags[0]}")

    @torch.no_grad()
    def generate(self, inputs: list[dict[str, Any]], params: list[Any], use_tqdm: bool) -> list[Any]:
        if self.fail:
            raise ValueError(self.fail)
        return [self._one(i["prompt_token_ids"], p) for i, p in zip(inputs, params)]

    def _one(self, ids: list[int], params: Any) -> Any:
        assert 0 <= params.seed < 1 << 63
        tokens: list[int] = []
        rows = []
        reason = "length"
        stream = torch.Generator().manual_seed(params.seed)
        while len(tokens) < params.max_tokens:
            hidden = self.model.model(torch.tensor([ids + tokens])).last_hidden_state[0, -1]
            logprobs = (hidden @ self.head.T).log_softmax(-1)
            greedy = params.temperature == 0.0
            tokens.append(int(logprobs.argmax() if greedy else logprobs.exp().multinomial(1, generator=stream)))
            rows.append({tokens[-1]: SimpleNamespace(logprob=float(logprobs[tokens[-1]]))})
            if tokens[-1] in params.stop_token_ids:
                reason = "stop"
                break
        out = SimpleNamespace(token_ids=tokens, logprobs=rows, finish_reason=self.finish or reason)
        return SimpleNamespace(outputs=[out])


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("vllm")
    module.LLM, module.SamplingParams = FakeLLM, SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr(adapter, "installed_version", lambda: "0.32.0+cpu")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setattr(FakeLLM, "made", [])


def make(folder: Path, **more: Any) -> adapter.VllmGenerator:
    arguments: dict[str, Any] = {"dtype": "float32", "max_length": 16, "max_concurrent": 4, "sampling": PLAIN, **more}
    return adapter.VllmGenerator(str(folder), **arguments)


def engine() -> FakeLLM:
    return FakeLLM.made[-1]


def gap(model: Any, rollouts: Any) -> float:
    out = []
    for r in rollouts:
        with torch.no_grad():
            logits = model(torch.tensor([r.prompt_ids + r.response_ids])).logits[0, len(r.prompt_ids) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(r.response_ids)[:, None])[:, 0]
        out.append((expected - torch.tensor(r.logprobs)).abs())
    return float(torch.cat(out).mean())


@pytest.mark.parametrize("version", [None, "0.8.5", "0.21.9"])
def test_versions_out_of_range_are_refused_with_a_fix(version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "installed_version", lambda: version)
    with pytest.raises(ConfigError) as caught:
        adapter.import_vllm()
    assert caught.value.faults[0].found == (version or "not installed, and it is to generate")
    assert "pip install" in caught.value.faults[0].fix


def test_a_broken_installation_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "installed_version", lambda: "0.26.0")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ConfigError, match="cannot be imported"):
        adapter.import_vllm()
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with pytest.raises(ConfigError, match="written in this process"):
        adapter.import_vllm()


def test_the_mode_of_logprobs_is_the_trainers() -> None:
    assert adapter.logprobs_mode(SamplingParams(max_new_tokens=1, temperature=0.7)) == "processed_logprobs"
    assert adapter.logprobs_mode(SamplingParams(max_new_tokens=1, top_p=0.9)) == "raw_logprobs"
    with pytest.raises(ConfigError, match="with both or with neither"):
        adapter.logprobs_mode(SamplingParams(max_new_tokens=1, temperature=0.7, top_k=5))


def test_arguments_pass_through_and_ours_are_refused(fake: None, tiny_models: dict[str, Path]) -> None:
    generator = make(tiny_models["llama"], engine_args={"gpu_memory_utilization": 0.3, "max_num_seqs": 7})
    given = engine().arguments
    assert (given["gpu_memory_utilization"], given["max_num_seqs"], given["max_model_len"]) == (0.3, 7, 16)
    assert "distributed_executor_backend" not in given
    generator.close()
    generator.close()
    assert engine().calls == ["shutdown"]
    with pytest.raises(ConfigError, match=r"vllm_config\.logprobs_mode"):
        make(tiny_models["llama"], engine_args={"logprobs_mode": "raw_logits"})


def test_every_update_reaches_the_tied_head_too(fake: None, tiny_models: dict[str, Path]) -> None:
    model = load_causal_lm(str(tiny_models["llama"]), dtype=torch.float32, attention="sdpa").eval()
    generator = make(tiny_models["llama"], weights=lambda: {n: p.detach() for n, p in model.named_parameters()})
    assert generator.how == "reload_weights"
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.3)
    assert gap(model, generator.generate(PROMPTS, GREEDY)) > 1e-3
    generator.load(None, 4)
    rollouts = generator.generate(PROMPTS, GREEDY)
    assert gap(model, rollouts) < 1e-5
    assert {r.policy_version for r in rollouts} == {4}
    assert engine().calls[-2:] == ["reload_weights", "reset_prefix_cache"]


def test_a_failed_update_leaves_the_version_and_ends_with_the_message(fake: None, tiny_models: dict[str, Path]) -> None:
    model = load_causal_lm(str(tiny_models["llama"]), dtype=torch.float32, attention="sdpa")
    generator = make(tiny_models["llama"], weights=lambda: dict(model.named_parameters()))
    engine().fail = "out of memory on this rank"
    with pytest.raises(RunError, match=r"vLLM on rank 0: could not take new weights.*out of memory on this rank"):
        generator.load(None, 9)
    assert generator.version == 0
    with pytest.raises(RunError, match=r"could not generate.*out of memory"):
        generator.generate(PROMPTS, PLAIN)


def test_limits_and_reasons(fake: None, tiny_models: dict[str, Path]) -> None:
    generator = make(tiny_models["llama"])
    edge = Prompt(prompt_id=0, sample_id=0, token_ids=(5,) * 15, seed=0)
    (answer,) = generator.generate([edge], GREEDY)
    assert (len(answer.response_ids), answer.finish) == (1, "length")
    over = Prompt(prompt_id=1, sample_id=0, token_ids=(5,) * 16, seed=0)
    none = Prompt(prompt_id=2, sample_id=0, token_ids=(5,), seed=0, max_new_tokens=0)
    with pytest.raises(DataError) as caught:
        generator.generate([edge, over, none], GREEDY)
    assert [f.where for f in caught.value.faults] == ["prompt 1", "prompt 2"]
    engine().finish = "abort"
    with pytest.raises(RunError, match="abort"):
        generator.generate([edge], GREEDY)
    with pytest.raises(ConfigError, match="started for processed_logprobs"):
        generator.generate([edge], SamplingParams(max_new_tokens=1, top_k=3))


def test_sleep_and_wake_weights_and_cache_apart(fake: None, tiny_models: dict[str, Path]) -> None:
    model = load_causal_lm(str(tiny_models["llama"]), dtype=torch.float32, attention="sdpa")
    generator = make(
        tiny_models["llama"], weights=lambda: dict(model.named_parameters()), engine_args={"enable_sleep_mode": True}
    )
    engine().calls.clear()
    generator.sleep()
    generator.sleep()
    generator.generate(PROMPTS, GREEDY)
    order = ["sleep 2", "wake weights", "reload_weights", "wake kv_cache", "reset_prefix_cache"]
    assert engine().calls == order


class Fused(torch.nn.Module):
    """Tensors as vLLM names and fuses them, the vocabulary filled up."""

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.tensors: dict[str, torch.nn.Parameter] = {}
        parts: dict[str, list[torch.Tensor]] = {}
        for name, p in model.named_parameters():
            for short in ("q_proj", "k_proj", "v_proj"):
                name = name.replace(f".{short}.", ".qkv_proj.")
            for short in ("gate_proj", "up_proj"):
                name = name.replace(f"mlp.{short}", "mlp.gate_up_proj")
            parts.setdefault(name, []).append(p.detach())
        parts["model.embed_tokens.weight"].append(torch.zeros(31, 48))
        for name, tensors in parts.items():
            self.tensors[name] = torch.nn.Parameter(torch.zeros_like(torch.cat(tensors), dtype=dtype))

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return iter(self.tensors.items())


def test_training_parameters_become_views(tiny_models: dict[str, Path]) -> None:
    model = load_causal_lm(str(tiny_models["qwen2"]), dtype=torch.float32, attention="sdpa")
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    held = list(model.parameters())
    engine_side = Fused(model, torch.float32)
    adapter.bind_views(model, engine_side)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert all(a is b for a, b in zip(held, model.parameters()))
    optimizer = torch.optim.SGD(held, lr=0.5)
    model(torch.tensor([[5, 6, 7, 8]]), labels=torch.tensor([[5, 6, 7, 8]])).loss.backward()
    optimizer.step()
    fused = engine_side.tensors["model.layers.1.self_attn.qkv_proj.weight"]
    q = model.get_parameter("model.layers.1.self_attn.q_proj.weight")
    k = model.get_parameter("model.layers.1.self_attn.k_proj.weight")
    assert torch.equal(fused[: len(q)], q)
    assert torch.equal(fused[len(q) : len(q) + len(k)], k)
    assert not torch.equal(q, before["model.layers.1.self_attn.q_proj.weight"])


def test_nothing_binds_when_one_does_not(tiny_models: dict[str, Path]) -> None:
    model = load_causal_lm(str(tiny_models["qwen2"]), dtype=torch.float32, attention="sdpa")
    places = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(adapter.LayoutError, match="bfloat16"):
        adapter.bind_views(model, Fused(model, torch.bfloat16))
    assert places == [p.data_ptr() for p in model.parameters()]


def run(folder: Path, *words: str) -> int:
    """Two GRPO steps of the quickstart model with vLLM and a learning rate that moves the weights."""
    from rlspeed.config.load import load_profile
    from rlspeed.training.loop import train

    settings = [
        "model.actor.use_vllm_for_generation=true",
        "algorithm.kind=grpo",
        "algorithm.kl.where=none",
        "rollout.n=4",
        "rollout.max_new_tokens=4",
        "data.batch_size=4",
        "data.val_files=null",
        "optim.actor.lr=0.01",
        "run.steps=3",
        "run.save_hf=false",
        "run.plots=false",
        f"run.dir={folder}",
        "devices.actor.device_mesh=[cpu]",
    ]
    return train(load_profile("quickstart", [*settings, *words]))


def test_a_run_with_vllm_keeps_parity(fake: None, tmp_path: Path) -> None:
    assert run(tmp_path / "run") == 0
    assert engine().calls.count("reload_weights") == engine().calls.count("reset_prefix_cache") == 3
    assert engine().calls[-1] == "shutdown"


def test_a_run_with_a_stale_head_is_stopped(fake: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeLLM, "loses_head", True)
    with pytest.raises(RunError, match=r"step \d, phase gen: generator and trainer log-probs"):
        run(tmp_path / "run", "rollout.parity_tolerance=0.0001")
    assert run(tmp_path / "warned", "rollout.parity_tolerance=0.0001", "rollout.parity_alarm=warn") == 0
