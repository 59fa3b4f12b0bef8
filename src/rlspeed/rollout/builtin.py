"""The built-in generator: continuous batching over the actor's weights, one prefill for the answers of a prompt."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlspeed.engine.attention import choose_attention
from rlspeed.errors import DataError, Fault, RunError
from rlspeed.rollout.decode import Decoder, fuse_parameters, head_width
from rlspeed.rollout.lanes import Lanes
from rlspeed.rollout.pages import PagePool
from rlspeed.rollout.schedule import Enough, Lane, Schedule, enough_of, order_of
from rlspeed.rollout.stats import GenerationStats, StatsKeeper
from rlspeed.rollout.types import FinishReason, GenerationStopped, Prompt, Rollout, SamplingParams

WeightSource = Callable[[], dict[str, Tensor]]

PAGE = 64  # tokens; one block of the attention kernel, and half of it is wasted per sequence on average
CHUNK = 8  # steps between two looks of the host on a GPU; a finished answer computes at most two chunks in vain
PREFILL_TOKENS = 16384  # of one prefill; bounds its activations
SHARE_OF_FREE = 0.85  # of the device's free memory that the key-value cache may take when no size is given


@dataclass(slots=True)
class _Chunk:
    """Steps on their way: tokens and log-probs [steps, lanes] in host memory once `ready` has passed."""

    lanes: list[Lane]
    tokens: Tensor
    logprobs: Tensor
    ready: Any


class BuiltinGenerator:
    """Generates with the weights that `weights` names, read afresh at every `load`; a plain module's are used in place.

    max_concurrent: sequences in flight; further ones wait. max_length: prompt and answer together; an answer that
    reaches it ends with "length". should_stop: asked before every chunk of steps; True raises GenerationStopped.
    on_finished: called with each answer the moment it is known to be complete. cache_gib: size of the key-value cache;
    None takes what the requests can need, within the device's free memory. longest_first: start the answers first that
    were long the last time. page_size, chunk: tokens of a page and steps between two looks of the host; None picks by
    device.

    On a GPU q, k, v (gate, up) of a plain module become views into one tensor each (`decode.fuse_parameters`).
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
        cache_gib: float | None = None,
        longest_first: bool = False,
        page_size: int | None = None,
        chunk: int | None = None,
    ) -> None:
        if all(p.is_cuda and type(p.data) is Tensor for p in model.parameters()):
            fuse_parameters(model)
        self.decoder = Decoder(model, max_length)
        self.max_concurrent = max_concurrent
        self.max_length = max_length
        self.tokenizer = tokenizer
        self.should_stop = should_stop
        self.on_finished = on_finished
        self.cache_gib = cache_gib
        self.longest_first = longest_first
        self.version = version
        self.stats = GenerationStats()
        self._weights = weights or (lambda: {n: p.detach() for n, p in model.named_parameters()})
        self.load(None, version)
        self.device = self.decoder.embed.device
        self.backend, _ = choose_attention("auto", self.device, self.decoder.dtype, head_width(model.config))
        on_cpu = self.device.type == "cpu"
        self._page_size = page_size or (max_length if on_cpu else PAGE)
        self._chunk = chunk or (1 if on_cpu else CHUNK)
        self._seen: dict[tuple[int, ...], float] = {}
        self._lanes: Lanes | None = None

    def load(self, weights: Iterable[tuple[str, Tensor]] | None, version: int) -> None:
        """Point at new weights; nothing computed with the old ones is kept (there is no cache between calls)."""
        self.decoder.refresh(dict(weights) if weights is not None else self._weights())
        self.version = version

    def close(self) -> None:
        """Give captured graphs and their memory back; the next call makes new ones."""
        self._lanes = None

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Rollout]:
        """One Rollout per Prompt, in order.

        Raises:
            DataError: prompts at or over the context limit, or a limit of 0 new tokens; all are named.
            RunError: the key-value cache cannot hold one request; the model's log-probs are not finite.
            GenerationStopped: `should_stop` said so.
        """
        done = self._run(prompts, sampling, None)
        return [done[i] for i in range(len(prompts))]

    @torch.inference_mode()
    def generate_enough(self, prompts: Sequence[Prompt], sampling: SamplingParams, *, groups: int) -> list[Rollout]:
        """As `generate`, but ends when `groups` prompts (by prompt_id) have all their answers.

        Returns the answers of these, in the order of `prompts`; what else was generated is dropped. Of prompts that are
        complete at the same look of the host those with the lower id count first: no clock decides.
        """
        done = self._run(prompts, sampling, groups)
        return [done[i] for i in sorted(done)]

    def _run(self, prompts: Sequence[Prompt], sampling: SamplingParams, groups: int | None) -> dict[int, Rollout]:
        """Answers by place in `prompts`: all, or those of the first `groups` prompts that are complete."""
        self._check(prompts, sampling)
        if not prompts or groups == 0:
            self.stats = GenerationStats()
            return {}
        limits = [min(p.max_new_tokens or sampling.max_new_tokens, self.max_length - len(p.token_ids)) for p in prompts]
        slots = min(self.max_concurrent, len(prompts))
        expected = self._seen if self.longest_first and len(prompts) > slots else None
        queue = [Lane(order=i, prompt=prompts[i], limit=limits[i]) for i in order_of(prompts, expected)]
        if self._lanes is None or self._lanes.count < slots:
            self._lanes = Lanes(self.decoder, slots, -(-self.max_length // self._page_size), self._chunk)
        pages = self._pages(queue, slots)
        cache = self.decoder.cache(pages, self._page_size)
        self._lanes.begin(cache, sampling)
        self._lanes.prepare(slots)
        pool = PagePool(pages, self._page_size)
        schedule = Schedule(queue, pool, slots=slots, budget=PREFILL_TOKENS, chunk=self._chunk)
        try:
            run = _Run(self, self._lanes, schedule, cache, sampling, enough_of(prompts, groups))
            done = run.go()
        finally:
            self._lanes.end()
        self.stats = run.keeper.summary(sum(len(r.response_ids) for r in done.values()), schedule.preempted)
        self._remember(done)
        return done

    def _remember(self, done: dict[int, Rollout]) -> None:
        """Mean answer length per prompt, for `longest_first`."""
        lengths: dict[tuple[int, ...], list[int]] = {}
        for rollout in done.values():
            lengths.setdefault(rollout.prompt_ids, []).append(len(rollout.response_ids))
        self._seen.update({ids: sum(n) / len(n) for ids, n in lengths.items()})

    def _pages(self, queue: Sequence[Lane], slots: int) -> int:
        """Pages of the cache: what `slots` of the longest requests can need, within the memory allowed.

        Raises:
            RunError: that is not enough for the longest request alone.
        """
        size = self._page_size
        each = sorted((-(-(lane.end + 1) // size) for lane in queue), reverse=True)
        wanted = sum(each[:slots]) + 3  # scratch, and a prompt that is kept while answers to it wait
        page_bytes = self.decoder.page_bytes(size)
        if self.cache_gib is not None:
            allowed = int(self.cache_gib * 2**30)
        elif self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.device)
            idle = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
            allowed = int((free + idle) * SHARE_OF_FREE)
        else:
            return wanted
        pages = min(wanted, allowed // page_bytes)
        least = each[0] + 3
        if pages < least:
            raise RunError(
                Fault(
                    where="rollout.kv_cache_gib",
                    found=f"{allowed / 2**30:.2f} GiB for the key-value cache",
                    allowed=f"at least {least * page_bytes / 2**30:.2f} GiB, for the longest request alone",
                    fix="raise rollout.kv_cache_gib, free device memory, or lower data.max_length",
                )
            )
        return pages

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


class _Run:
    """One call of generate: launches chunks of steps, and accepts what they drew one chunk behind."""

    def __init__(
        self,
        owner: BuiltinGenerator,
        lanes: Lanes,
        schedule: Schedule,
        cache: Any,
        sampling: SamplingParams,
        enough: Enough,
    ) -> None:
        self.owner, self.lanes, self.schedule, self.cache, self.sampling = owner, lanes, schedule, cache, sampling
        self.stop_ids = frozenset(sampling.stop_token_ids)
        self.chunks: deque[_Chunk] = deque()
        self.behind = 1 if lanes.device.type == "cuda" else 0
        self.placed: list[Lane] = []
        self.done: dict[int, Rollout] = {}
        self.keeper = StatsKeeper()
        self.enough = enough

    def go(self) -> dict[int, Rollout]:
        """All answers by their place in the caller's list."""
        schedule, should_stop = self.schedule, self.owner.should_stop
        while (schedule.waiting or schedule.lanes or self.chunks) and not self.enough.reached:
            if should_stop is not None and should_stop():
                raise GenerationStopped
            self._admit()
            if schedule.runnable() and self._make_room():
                self._place()
                self._send(*self.lanes.run(len(schedule.lanes)))
            while len(self.chunks) > (self.behind if schedule.runnable() else 0):
                self._accept()
            schedule.retire()
        return self.enough.of(self.done)

    def _admit(self) -> None:
        """Prefill what the schedule lets in, and draw its first tokens."""
        while True:
            new = self.schedule.admit()
            if not new.lanes:
                return
            self.keeper.prefill(sum(map(len, new.sequences)))
            if new.sequences:
                pages = [p.pages or lane.pages for p, lane in self._owners(new)]
                logits = self.owner.decoder.prefill(
                    new.sequences, pages, self.cache.size, self.lanes.ops, self.owner.backend
                )
                for prefix, row in zip(new.prefixes, logits):
                    prefix.logits = row
            self.cache.copy_pages(new.copies)
            self._place()
            first = len(self.schedule.lanes) - len(new.lanes)
            rows = torch.stack([source.logits for source in new.sources])
            tokens, logprobs = self.lanes.first_tokens(first, [len(lane.known) - 1 for lane in new.lanes], rows)
            self._send(tokens[None], logprobs[None], new.lanes)

    @staticmethod
    def _owners(new: Any) -> list[tuple[Any, Lane]]:
        """Each computed prefix with a lane that started from it; the last of its lanes may have taken its pages."""
        by_prefix = {id(source): lane for source, lane in zip(new.sources, new.lanes)}
        return [(prefix, by_prefix[id(prefix)]) for prefix in new.prefixes]

    def _make_room(self) -> bool:
        """Pages for the next chunk; accepts all that is on its way before a lane has to give way."""
        while not self.schedule.grow():
            while self.chunks:
                self._accept()
            if not self.schedule.retire():
                self.schedule.give_way()
            if not self.schedule.runnable():
                return False
        return True

    def _place(self) -> None:
        """Tell the device which lane is where, and which pages it has."""
        lanes = self.schedule.lanes
        old = {id(lane): i for i, lane in enumerate(self.placed)}
        self.lanes.place(
            [old.get(id(lane), i) for i, lane in enumerate(lanes)],
            [lane.pages for lane in lanes],
            ([x.start for x in lanes], [x.end for x in lanes], [x.prompt.seed for x in lanes]),
        )
        self.placed = list(lanes)

    def _send(self, tokens: Tensor, logprobs: Tensor, lanes: list[Lane] | None = None) -> None:
        """Start the copy of what was drawn to the host."""
        lanes = list(self.schedule.lanes) if lanes is None else lanes
        if tokens.is_cuda:
            ready = torch.cuda.Event()
            held = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in (tokens, logprobs)]
            for target, source in zip(held, (tokens, logprobs)):
                target.copy_(source, non_blocking=True)
            ready.record()
            self.chunks.append(_Chunk(lanes, held[0], held[1], ready))
        else:
            self.chunks.append(_Chunk(lanes, tokens.clone(), logprobs.clone(), None))

    def _accept(self) -> None:
        """Give the oldest chunk's tokens to their lanes."""
        chunk = self.chunks.popleft()
        if chunk.ready is not None:
            chunk.ready.synchronize()
        before = sum(not lane.done for lane in chunk.lanes)
        tokens, logprobs = chunk.tokens.T.tolist(), chunk.logprobs.T.tolist()
        for lane, drawn, values in zip(chunk.lanes, tokens, logprobs):
            for token, logprob in zip(drawn, values):
                if lane.done or token < 0:
                    break
                lane.tokens.append(token)
                lane.logprobs.append(logprob)
                reason = self._finished(lane)
                if reason is not None:
                    self._finish(lane, reason)
        self.keeper.chunk(len(chunk.tokens), before, time.perf_counter())

    def _finish(self, lane: Lane, reason: FinishReason) -> None:
        lane.done = True
        if not all(x == x and abs(x) != float("inf") for x in lane.logprobs):
            raise RunError(
                Fault(
                    where=f"answer {lane.prompt.sample_id} to prompt {lane.prompt.prompt_id}",
                    found="a log-prob that is not a finite number",
                    allowed="finite log-probs",
                    fix="the policy's weights or logits hold NaN or infinity: lower optim.actor.lr, or take bf16 "
                    "instead of fp16, and resume from an earlier checkpoint",
                )
            )
        rollout = Rollout(
            prompt_id=lane.prompt.prompt_id,
            sample_id=lane.prompt.sample_id,
            prompt_ids=lane.prompt.token_ids,
            response_ids=tuple(lane.tokens),
            logprobs=tuple(lane.logprobs),
            finish=reason,
            policy_version=self.owner.version,
        )
        self.done[lane.order] = rollout
        self.enough.count(lane.prompt.prompt_id, len(self.keeper.chunks))
        if self.owner.on_finished is not None:
            self.owner.on_finished(rollout)

    def _finished(self, lane: Lane) -> FinishReason | None:
        if lane.tokens[-1] in self.stop_ids:
            return "stop"
        if self.sampling.stop:
            # the end of the text is enough: a stop string of n characters spans at most n tokens, plus one cut in the
            # middle
            longest = max(len(s) for s in self.sampling.stop) + 8
            text = self.owner.tokenizer.decode(lane.tokens[-longest:], skip_special_tokens=True)
            if any(s in text for s in self.sampling.stop):
                return "stop"
        return "length" if len(lane.tokens) >= lane.limit else None
