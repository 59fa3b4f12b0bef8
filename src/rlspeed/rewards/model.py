"""A Hugging Face sequence-classification model as reward: one number for each answer, read at its last real token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlspeed.errors import ConfigError, Fault, RewardError
from rlspeed.rewards.types import Sample

if TYPE_CHECKING:
    import torch

    from rlspeed.config.schema import RewardModel

BATCH_TOKENS = 16384
# transformers would load it where peft is installed, and leave it out where it is not
ADAPTER_FILE = "adapter_config.json"


class RewardModelScorer:
    """Scores answers with a frozen decoder that has one label.

    The score is taken where the attention mask ends, never where a padding id is found: in many tokenizers the padding
    and the end token are one, and then the library's own search reads a token of an earlier turn.
    Source of that fault: huggingface/transformers#35352.
    """

    def __init__(
        self, cfg: RewardModel, device: torch.device | str, dtype: torch.dtype, *, rests: bool = False
    ) -> None:
        """Load model and tokenizer. rests: the model is on the device only while it scores, else in host memory.

        Raises:
            ConfigError: nothing loadable at `cfg.path`, more than one label, no score head, no chat template.
        """
        if cfg.path is None:
            raise ConfigError(Fault(where="reward.model.path", found="null", allowed="a directory or hub name"))
        self._cfg = cfg
        self._path = cfg.path
        self._device = device
        self._where = "reward.model.path"
        self._tokenizer = self._load_tokenizer()
        self._rests = rests
        self._model = self._load_model(dtype).to("cpu" if rests else device).eval().requires_grad_(False)
        self._limit = int(getattr(self._model.config, "max_position_embeddings", 0) or 0)

    def score(self, samples: Sequence[Sample]) -> list[float]:
        """One finite number for each answer, in order.

        Batches hold texts of similar length, at most 16,384 padded tokens (one text may be longer).

        Raises:
            RewardError: a text that is empty or longer than the model allows, or a score that is not finite.
        """
        ids = [self._tokens(sample) for sample in samples]
        self._check_lengths(samples, ids)
        scores = [0.0] * len(samples)
        if self._rests:
            self._model.to(self._device)
        for batch in length_batches([len(x) for x in ids], BATCH_TOKENS):
            for position, value in zip(batch, self._forward([ids[i] for i in batch])):
                scores[position] = value
        if self._rests:
            self._model.to("cpu")
        faults = [
            Fault(where=f"reward model {self._path}, {s.label}", found=f"scored {x}", allowed="a finite number")
            for s, x in zip(samples, scores)
            if not math.isfinite(x)
        ]
        if faults:
            raise RewardError(faults)
        return scores

    def text(self, sample: Sample) -> str:
        """What the model reads: the conversation in its own chat template, or prompt text and answer text."""
        if not self._cfg.use_chat_template:
            return sample.prompt_text + sample.response_text
        before = sample.prompt
        messages = [{"role": "user", "content": before}] if isinstance(before, str) else list(before)
        messages = [*messages, {"role": "assistant", "content": sample.response_text}]
        rendered: str = self._tokenizer.apply_chat_template(messages, tokenize=False)
        return rendered

    def _tokens(self, sample: Sample) -> list[int]:
        # a chat template writes its own special tokens
        special = not self._cfg.use_chat_template
        ids: list[int] = self._tokenizer(self.text(sample), add_special_tokens=special)["input_ids"]
        return ids

    def _check_lengths(self, samples: Sequence[Sample], ids: Sequence[Sequence[int]]) -> None:
        faults = []
        for sample, tokens in zip(samples, ids):
            if not tokens or (self._limit and len(tokens) > self._limit):
                faults.append(
                    Fault(
                        where=f"reward model {self._path}, {sample.label}",
                        found=f"{len(tokens)} tokens",
                        allowed=f"1 to {self._limit}" if self._limit else "at least 1",
                        fix="lower data.max_length, or take a reward model with a longer context",
                    )
                )
        if faults:
            raise RewardError(faults)

    def _forward(self, ids: Sequence[Sequence[int]]) -> list[float]:
        """Scores of one batch, right-padded."""
        import torch

        lengths = torch.tensor([len(x) for x in ids])
        width = int(lengths.max())
        filler = 0  # any valid id does: the mask decides
        input_ids = torch.tensor([list(x) + [filler] * (width - len(x)) for x in ids], device=self._device)
        mask = (torch.arange(width)[None] < lengths[:, None]).to(self._device, torch.long)
        if mask.sum(dim=1).tolist() != lengths.tolist():
            raise AssertionError("the attention mask does not count the tokens")
        with torch.no_grad():
            hidden = self._backbone(input_ids=input_ids, attention_mask=mask, use_cache=False).last_hidden_state
            last = hidden[torch.arange(len(ids), device=hidden.device), lengths.to(hidden.device) - 1]
            scores: list[float] = self._model.score(last)[:, 0].float().tolist()
        return scores

    def _load_tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(self._path)
        except (OSError, ValueError) as error:
            raise self._not_loadable(error) from error
        if self._cfg.use_chat_template and not tokenizer.chat_template:
            raise ConfigError(
                Fault(
                    where="reward.model.use_chat_template",
                    found=f"true, and the tokenizer of {self._path!r} has no chat template",
                    fix="set reward.model.use_chat_template: false to score prompt text + answer text",
                )
            )
        return tokenizer

    def _load_model(self, dtype: torch.dtype) -> Any:
        from transformers import AutoConfig, AutoModelForSequenceClassification

        if (Path(self._path) / ADAPTER_FILE).is_file():
            raise ConfigError(
                Fault(
                    where=self._where,
                    found=f"{self._path!r} holds an adapter ({ADAPTER_FILE})",
                    allowed="a whole model",
                    fix="merge the adapter into its base model first; loaded apart its weights would be left out",
                )
            )
        try:
            config = AutoConfig.from_pretrained(self._path)
        except (OSError, ValueError) as error:
            raise self._not_loadable(error) from error
        if config.num_labels != 1:
            raise ConfigError(
                Fault(
                    where=self._where,
                    found=f"{self._path!r} has {config.num_labels} labels",
                    allowed="a model with one label (num_labels: 1), whose output is the reward",
                    fix="take a reward model; for a classifier write a reward function",
                )
            )
        try:
            model, report = AutoModelForSequenceClassification.from_pretrained(
                self._path, dtype=dtype, output_loading_info=True
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise self._not_loadable(error) from error
        missing = sorted(name for name in report["missing_keys"] if name.startswith("score"))
        if missing or not hasattr(model, "score"):
            what = f"no weights for {', '.join(missing)}" if missing else "no `score` head"
            raise ConfigError(
                Fault(
                    where=self._where,
                    found=f"{self._path!r} has {what}",
                    allowed="a decoder with a trained score head, e.g. LlamaForSequenceClassification",
                    fix="a plain language model is no reward model: its head would be random",
                )
            )
        self._backbone = getattr(model, model.base_model_prefix)
        return model

    def _not_loadable(self, error: Exception) -> ConfigError:
        return ConfigError(
            Fault(
                where=self._where,
                found=f"{self._path!r}: {str(error).splitlines()[0]}",
                allowed="a directory or hub name of a sequence-classification model with its tokenizer",
                fix="check the path; without network a hub name must be in the local cache",
            )
        )


def length_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Positions in batches of rising length, each at most `max_tokens` when padded (a longer text is alone)."""
    batches: list[list[int]] = []
    for position in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if batches and (len(batches[-1]) + 1) * lengths[position] <= max_tokens:
            batches[-1].append(position)
        else:
            batches.append([position])
    return batches
