"""Hugging Face directories to the two modules that train: a policy and a value model, both over packed tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlspeed.engine.head import linear_logprob
from rlspeed.engine.packed import PackedBatch
from rlspeed.engine.padded import PaddedView, response_window
from rlspeed.engine.parallelize import Spread
from rlspeed.engine.tensor_parallel import local
from rlspeed.engine.ulysses import SequenceParallel, own_places
from rlspeed.errors import ConfigError, Fault
from rlspeed.models.attention_hook import PACKED_ATTENTION, packed_attention_kwargs, register_attention

SUPPORTED = ("llama", "qwen2", "qwen3")
QUICKSTART = "quickstart"
# transformers would load it into the model where peft is installed, and leave it out where it is not
ADAPTER_FILE = "adapter_config.json"


def resolve_model_path(path: str) -> str:
    """The directory of a packaged model for `quickstart`; any other name unchanged."""
    if path != QUICKSTART:
        return path
    from importlib.resources import files

    return str(files("rlspeed.profiles") / "quickstart" / "model")


def load_model_config(path: str, *, trust_remote_code: bool = False) -> Any:
    """The transformers config of a model whose layers rlspeed knows how to pack.

    Raises:
        ConfigError: nothing loadable at `path`, an architecture whose layers do not take sequence boundaries,
            quantised weights, or an adapter.
    """
    from transformers import AutoConfig

    real = resolve_model_path(path)
    try:
        config = AutoConfig.from_pretrained(real, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(
            Fault(
                where="model.path",
                found=f"{path!r}: {str(error).splitlines()[0]}",
                allowed="a directory with config.json and safetensors, or a hub name",
                fix="check the path; without network a hub name must be in the local cache",
            )
        ) from error
    faults = _cannot_train(path, real, config)
    if faults:
        raise ConfigError(faults)
    return config


def _cannot_train(path: str, folder: str, config: Any) -> list[Fault]:
    """What a model directory holds beside weights of a known architecture that all train."""
    faults = []
    if config.model_type not in SUPPORTED:
        faults.append(
            Fault(
                where="model.path",
                found=f"{path!r} is a {config.model_type!r} model",
                allowed=", ".join(SUPPORTED),
                fix="its layers are not known to keep packed sequences apart; take one of the allowed families",
            )
        )
    quantised = getattr(config, "quantization_config", None)
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else None
        faults.append(
            Fault(
                where="model.path",
                found=f"{path!r} holds weights quantised by {method or 'some method'}",
                allowed="bf16, fp16 or fp32 weights",
                fix="quantised weights cannot be trained or sent; take the checkpoint that it was made from",
            )
        )
    if (Path(folder) / ADAPTER_FILE).is_file():
        faults.append(
            Fault(
                where="model.path",
                found=f"{path!r} holds an adapter ({ADAPTER_FILE})",
                allowed="a whole model",
                fix="adapters are not offered, all weights train; merge it into its base model first",
            )
        )
    return faults


def load_causal_lm(path: str, *, dtype: torch.dtype, attention: str, trust_remote_code: bool = False) -> Any:
    """The causal language model at `path` in `dtype` on CPU, its attention replaced by rlspeed's packed one.

    attention: "packed", or "sdpa" for transformers' own (padded training).
    """
    from transformers import AutoModelForCausalLM

    config = load_model_config(path, trust_remote_code=trust_remote_code)
    register_attention()
    implementation = PACKED_ATTENTION if attention == "packed" else "sdpa"
    real = resolve_model_path(path)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            real, config=config, dtype=dtype, attn_implementation=implementation, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            Fault(where="model.path", found=f"{path!r}: {str(error).splitlines()[0]}", fix="check the weight files")
        ) from error
    model.config.use_cache = False
    return model


def hidden_states(
    backbone: nn.Module, batch: PackedBatch, *, backend: str, padded: bool, sp: SequenceParallel | None = None
) -> torch.Tensor:
    """Hidden states [T, H] of each token after the last norm; padded: the same, computed in rows of equal length.

    sp: of this rank's slice of the row alone, [T / P, H].
    """
    if padded:
        view = PaddedView.of(batch)
        out = backbone(
            input_ids=view.input_ids,
            attention_mask=view.attention_mask,
            position_ids=view.positions,
            use_cache=False,
        )
        return view.flatten(out.last_hidden_state)
    ids, positions = batch.input_ids, batch.positions
    if sp is not None:
        ids, positions = sp.slice(ids), sp.slice(positions)
    out = backbone(
        input_ids=ids[None],
        position_ids=positions[None],
        attention_mask=None,
        use_cache=False,
        **packed_attention_kwargs(batch.cu_seqlens, batch.lengths, batch.max_seqlen, backend, sp, batch.prefixes),
    )
    return out.last_hidden_state[0]


class PolicyModel(nn.Module):
    """A causal language model that answers with log-probs of the tokens that train, never with logits.

    spread: set by `engine.parallelize`; the ranks of a tensor or sequence parallel group get the same batch and give
    the same answer.
    """

    spread: Spread | None = None

    def __init__(self, causal_lm: Any, *, backend: str, padded: bool) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.backend = backend
        self.padded = padded

    def forward(
        self, batch: PackedBatch, temperature: float = 1.0, with_entropy: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probs [N] fp32 of the N tokens under batch.loss_mask, and the entropies [N] of their distributions."""
        sp, tp = (self.spread.sp, self.spread.tp) if self.spread else (None, None)
        hidden = hidden_states(self.causal_lm.model, batch, backend=self.backend, padded=self.padded, sp=sp)
        index, source, keep = batch.response_index(), batch.source_index(), None
        if self.padded:
            index, keep = response_window(batch)
            source = index - 1
        chosen, places = own_places(sp, source, batch.num_tokens)
        head = self.causal_lm.lm_head
        logprobs, entropy = linear_logprob(
            hidden[places],
            local(head.weight),
            batch.input_ids[index[chosen]],
            temperature=temperature or 1.0,
            bias=None if head.bias is None else local(head.bias),
            with_entropy=with_entropy,
            shard=tp.vocabulary(head.out_features) if tp else None,
        )
        if sp is not None:
            logprobs = sp.gather(logprobs, source, batch.num_tokens)
            entropy = None if entropy is None else sp.gather(entropy, source, batch.num_tokens)
        if keep is None:
            return logprobs, entropy
        return logprobs[keep], None if entropy is None else entropy[keep]


class ValueModel(nn.Module):
    """A decoder with a scalar head: the value of the state before each token that trains. spread: as in PolicyModel."""

    spread: Spread | None = None

    def __init__(self, causal_lm: Any, *, backend: str, padded: bool) -> None:
        super().__init__()
        self.backbone = causal_lm.model
        dtype = next(self.backbone.parameters()).dtype
        self.value_head = nn.Linear(causal_lm.config.hidden_size, 1, bias=True, dtype=dtype)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        self.config = causal_lm.config
        self.backend = backend
        self.padded = padded

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """Values [N] fp32 of the N tokens under batch.loss_mask."""
        sp = self.spread.sp if self.spread else None
        hidden = hidden_states(self.backbone, batch, backend=self.backend, padded=self.padded, sp=sp)
        index = batch.source_index()
        _, places = own_places(sp, index, batch.num_tokens)
        values = self.value_head(hidden[places])[:, 0].to(torch.float32, copy=True)  # FSDP2 wants no view
        return values if sp is None else sp.gather(values, index, batch.num_tokens)


def end_token_ids(causal_lm: Any, tokenizer: Any, extra: list[int]) -> tuple[int, ...]:
    """All token ids that end an answer: the generation config's, the model config's, the tokenizer's, and `extra`."""
    ids: set[int] = set(extra)
    for source in (getattr(causal_lm, "generation_config", None), causal_lm.config):
        value = getattr(source, "eos_token_id", None)
        ids.update([value] if isinstance(value, int) else value or [])
    if tokenizer.eos_token_id is not None:
        ids.add(int(tokenizer.eos_token_id))
    return tuple(sorted(ids))


def vocabulary_faults(config: Any, tokenizer: Any) -> list[Fault]:
    """A tokenizer that can produce ids which the model has no embedding for."""
    largest = max(tokenizer.get_vocab().values(), default=0)
    if largest < config.vocab_size:
        return []
    return [
        Fault(
            where="model.path",
            found=f"tokenizer with ids up to {largest}",
            allowed=f"ids below the model's vocab_size {config.vocab_size}",
            fix="use the tokenizer that belongs to the model, or resize the model's embedding",
        )
    ]


def save_hf(causal_lm: Any, state: dict[str, torch.Tensor], tokenizer: Any, folder: Path, dtype: torch.dtype) -> None:
    """Write `state` (full tensors by Hugging Face name) as a directory that from_pretrained loads."""
    tensors = {k: v.to(dtype).contiguous().cpu() for k, v in state.items()}
    if causal_lm.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    causal_lm.config.dtype = dtype
    # the rank that is here writes: transformers 5 would on rank 0 of the run alone, whatever is_main_process says
    causal_lm.should_save_on_this_rank = lambda is_main_process: is_main_process
    causal_lm.save_pretrained(folder, state_dict=tensors)
    tokenizer.save_pretrained(folder)
