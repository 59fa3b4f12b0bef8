"""The built-in generator: continuous batching over the actor's weights, one prefill for the answers of a prompt."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlspeed.engine.attention import choose_attention
from rlspeed.errors import DataError, Fault
from rlspeed.rollout.decode import Cache, Decoder, head_width
from rlspeed.rollout.sampling import draw, uniforms
from rlspeed.rollout.types import FinishReason, GenerationStopped, Prompt, Rollout, SamplingParams

WeightSource = Callable[[], dict[str, Tensor]]


@dataclass(slots=True)
class _Active:
    """One sequence in flight."""

    order: int
    prompt: Prompt
    limit: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.prompt.token_ids) + len(self.tokens)


class BuiltinGenerator:
    """Generates with the weights that `weights` names, read afresh at every `load`; a plain module's are used in place.

    max_concurrent: sequences in flight; further ones wait. max_length: prompt and answer together; an answer that
    reaches it ends with "length". should_stop: asked before every token; True raises GenerationStopped. on_finished:
    called with each answer the moment it is complete.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_concurrent: int,
        max_length: int,
        weights: WeightSource | None = None,
        tokenizer: Any = None,
        version: int = 0,
        should_stop: Callable[[], bool] | None = None,
        on_finished: Callable[[Rollout], None] | None = None,
    ) -> None:
        self.decoder = Decoder(model, max_length)
        self.max_concurrent = max_concurrent
        self.max_length = max_length
        self.tokenizer = tokenizer
        self.should_stop = should_stop
        self.on_finished = on_finished
        self.version = version
        self._weights = weights or (lambda: {n: p.detach() for n, p in model.named_parameters()})
        self.load(None, version)
        self.device = self.decoder.embed.device
        self.backend, _ = choose_attention("auto", self.device, self.decoder.dtype, head_width(model.config))

    def load(self, weights: Iterable[tuple[str, Tensor]] | None, version: int) -> None:
        """Point at new weights; nothing computed with the old ones is kept (there is no cache between calls)."""
        self.decoder.refresh(dict(weights) if weights is not None else self._weights())
        self.version = version

    def close(self) -> None:
        """Nothing is held between calls."""

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Rollout]:
        """One Rollout per Prompt, in order.

        Raises:
            DataError: prompts at or over the context limit, or a limit of 0 new tokens; all are named.
            GenerationStopped: `should_stop` said so.
        """
        self._check(prompts, sampling)
        waiting = deque(sorted(range(len(prompts)), key=lambda i: (prompts[i].prompt_id, i)))
        limits = [min(p.max_new_tokens or sampling.max_new_tokens, self.max_length - len(p.token_ids)) for p in prompts]
        longest = max((len(p.token_ids) + n for p, n in zip(prompts, limits)), default=0)
        slots = min(self.max_concurrent, len(prompts))
        cache = Cache(self.decoder.config, slots, longest, self.decoder.dtype, self.device)
        active: list[_Active] = []
        after: dict[tuple[int, ...], Tensor] = {}  # logits after a prompt, while answers to it wait
        done: dict[int, Rollout] = {}
        while waiting or active:
            if self.should_stop is not None and self.should_stop():
                raise GenerationStopped
            fresh: list[_Active] = []
            while waiting and len(active) + len(fresh) < slots:
                i = waiting.popleft()
                fresh.append(_Active(order=i, prompt=prompts[i], limit=limits[i]))
            if fresh:
                first = len(active)
                active.extend(fresh)
                wanted = {prompts[i].token_ids for i in waiting}
                logits = self._prefill(active, first, cache, after, wanted)
                self._accept(fresh, logits, sampling)
                self._retire(active, cache, sampling, done)
                continue
            tokens = torch.tensor([a.tokens[-1] for a in active], device=self.device)
            positions = torch.tensor([a.length - 1 for a in active], device=self.device)
            logits = self.decoder.step(tokens, positions, cache, max(a.length for a in active))
            self._accept(active, logits, sampling)
            self._retire(active, cache, sampling, done)
        return [done[i] for i in range(len(prompts))]

    def _check(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> None:
        faults = [
            Fault(
                where=f"prompt {p.prompt_id}",
                found=f"{len(p.token_ids)} tokens",
                allowed=f"fewer than max_length {self.max_length}, so that one token can follow",
                fix="raise data.max_length, or shorten or drop the prompt",
            )
            for p in prompts
            if len(p.token_ids) >= self.max_length
        ]
        faults += [
            Fault(where=f"prompt {p.prompt_id}", found="a limit of 0 new tokens", allowed="at least 1")
            for p in prompts
            if (sampling.max_new_tokens if p.max_new_tokens is None else p.max_new_tokens) < 1
        ]
        if sampling.stop and self.tokenizer is None:
            faults.append(
                Fault(
                    where="rollout.stop",
                    found="stop strings and no tokenizer",
                    allowed="a tokenizer, which decodes the answers that are searched",
                    fix="give the generator the tokenizer, or use rollout.stop_token_ids",
                )
            )
        if faults:
            raise DataError(faults)

    def _prefill(
        self,
        active: list[_Active],
        first: int,
        cache: Cache,
        after: dict[tuple[int, ...], Tensor],
        wanted: set[tuple[int, ...]],
    ) -> Tensor:
        """Logits [len(active) - first, V] for the sequences from slot `first` on.

        Equal prompts are computed once and copied, also from a slot admitted earlier: `after` holds the logits [V]
        after each prompt in `wanted`, those that further answers wait for. It lives as long as one call of generate.
        """
        leader: dict[tuple[int, ...], int] = {}
        for slot, a in enumerate(active):
            ids = a.prompt.token_ids
            if slot >= first or ids in after:
                leader.setdefault(ids, slot)
        computed = [(ids, slot) for ids, slot in leader.items() if slot >= first]
        if computed:
            logits = self.decoder.prefill([c[0] for c in computed], cache, [c[1] for c in computed], self.backend)
            after.update((ids, logits[r]) for r, (ids, _) in enumerate(computed))
        for slot in range(first, len(active)):
            ids = active[slot].prompt.token_ids
            if leader[ids] != slot:
                cache.copy_slot(leader[ids], slot, len(ids))
        out = torch.stack([after[a.prompt.token_ids] for a in active[first:]])
        for ids in after.keys() - wanted:
            del after[ids]
        return out

    def _accept(self, rows: list[_Active], logits: Tensor, sampling: SamplingParams) -> None:
        """Draw one token for each row."""
        seeds = torch.tensor([a.prompt.seed for a in rows], dtype=torch.int64, device=self.device)
        places = torch.tensor([len(a.tokens) for a in rows], dtype=torch.int64, device=self.device)
        tokens, logprobs = draw(logits, sampling, uniforms(seeds, places))
        for a, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist()):
            a.tokens.append(token)
            a.logprobs.append(logprob)

    def _retire(self, active: list[_Active], cache: Cache, sampling: SamplingParams, done: dict[int, Rollout]) -> None:
        """Take finished sequences out; the last slot moves into each gap, so that slots 0..B-1 stay the live ones."""
        slot = 0
        while slot < len(active):
            a = active[slot]
            reason = self._finished(a, sampling)
            if reason is None:
                slot += 1
                continue
            done[a.order] = Rollout(
                prompt_id=a.prompt.prompt_id,
                sample_id=a.prompt.sample_id,
                prompt_ids=a.prompt.token_ids,
                response_ids=tuple(a.tokens),
                logprobs=tuple(a.logprobs),
                finish=reason,
                policy_version=self.version,
            )
            if self.on_finished is not None:
                self.on_finished(done[a.order])
            last = active.pop()
            if last is not a:
                cache.copy_slot(len(active), slot, last.length - 1)
                active[slot] = last

    def _finished(self, a: _Active, sampling: SamplingParams) -> FinishReason | None:
        if a.tokens[-1] in sampling.stop_token_ids:
            return "stop"
        if sampling.stop:
            # the end of the text is enough: a stop string of n characters spans at most n tokens, plus one cut in the
            # middle
            longest = max(len(s) for s in sampling.stop) + 8
            text = self.tokenizer.decode(a.tokens[-longest:], skip_special_tokens=True)
            if any(s in text for s in sampling.stop):
                return "stop"
        return "length" if len(a.tokens) >= a.limit else None
