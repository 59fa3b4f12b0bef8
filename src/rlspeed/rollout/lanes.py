"""Lanes: the state of all sequences in flight, on the device, and steps that advance them without the host.

A lane is one sequence. Lanes 0..B-1 are in use. One step draws one token for each live lane; a lane that has drawn its
last token goes dead and stands still until the host takes it out. The host reads what was drawn a chunk of steps at a
time, so it never waits for a token.

On CUDA a step is one CUDA graph, captured once for each of a few lane counts; it reads the weights where they lie, so
an optimizer step in place needs no new capture.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlspeed.rollout.decode import Decoder
from rlspeed.rollout.paged import PagedCache, TorchOps
from rlspeed.rollout.sampling import draw, uniforms
from rlspeed.rollout.types import SamplingParams


def graph_sizes(limit: int) -> tuple[int, ...]:
    """Lane counts that graphs are captured for, up to the first that holds `limit`.

    Powers of two to 16, then steps of 16, then steps of 32: a step computes at most a quarter more lanes than live.
    """
    sizes = [1, 2, 4, 8, *range(16, 129, 16), *range(160, max(limit, 160) + 32, 32)]
    return tuple(sizes[: next(i for i, size in enumerate(sizes) if size >= limit) + 1])


class Lanes:
    """State of up to `count` sequences on the decoder's device.

    count: most lanes. pages: most pages of one sequence. chunk: steps between two looks of the host.
    """

    def __init__(self, decoder: Decoder, count: int, pages: int, chunk: int) -> None:
        self.decoder = decoder
        self.device = device = decoder.embed.device
        self.ops = make_ops(decoder)
        self.chunk = chunk
        self.sizes = graph_sizes(count) if self.ops.graphs else ()
        room = max(self.sizes, default=count)
        self.count, self.pages = count, pages
        self.table = torch.zeros(room, pages, dtype=torch.int32, device=device)
        # input token, its position, first position of the answer, position of the last token allowed, seed
        self.tokens, self.positions, self.starts, self.ends, self.seeds = (
            torch.zeros(room, dtype=torch.int64, device=device) for _ in range(5)
        )
        self.live = torch.zeros(room, dtype=torch.bool, device=device)
        self.drawn = torch.full((chunk, room), -1, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(chunk, room, dtype=torch.float32, device=device)
        self.cursor = torch.zeros(1, dtype=torch.int64, device=device)
        self.is_stop = torch.zeros(decoder.head.shape[0], dtype=torch.bool, device=device)
        self.sampling = SamplingParams(max_new_tokens=1)
        self._graphs: dict[tuple[object, ...], torch.cuda.CUDAGraph] = {}
        self._memory: Any = None
        self._addresses: tuple[int, ...] = ()

    def begin(self, cache: PagedCache, sampling: SamplingParams) -> None:
        """Start a call of generate: no lane is live, this cache, this sampling."""
        self.ops.bind(cache)
        self.live.zero_()
        self.table.zero_()
        self.positions.zero_()
        self.tokens.zero_()
        self.is_stop.zero_()
        if sampling.stop_token_ids:
            ids = [t for t in sampling.stop_token_ids if 0 <= t < self.is_stop.shape[0]]
            self.is_stop[torch.tensor(ids, device=self.device, dtype=torch.int64)] = True
        self.sampling = sampling
        if self._addresses != (addresses := self.decoder.addresses()):
            self._graphs.clear()
            self._addresses = addresses

    def end(self) -> None:
        """Give up the cache's memory; graphs stay, they look the cache's address up."""
        self.ops.bind(None)

    def place(self, order: Sequence[int], table: Sequence[Sequence[int]], host: Sequence[Sequence[int]]) -> None:
        """Lanes 0..B-1 from now on: what was lane order[i] becomes lane i (an entry past the old ones is set later).

        table: pages of each. host: starts, ends and seeds of each. Lanes from B on are dead and write to page 0.
        """
        count = len(order)
        rows = torch.zeros(self.table.shape, dtype=torch.int32)
        for row, pages in zip(rows, table):
            row[: len(pages)] = torch.tensor(pages, dtype=torch.int32)
        self.table.copy_(self._staged(rows), non_blocking=True)
        if list(order) != list(range(count)):
            index = self._staged(torch.tensor(order, dtype=torch.int64)).to(self.device, non_blocking=True)
            for state in (self.tokens, self.positions, self.live):
                state[:count] = state[index]
        values = self._staged(torch.tensor([list(h) for h in host], dtype=torch.int64).view(3, count))
        moved = values.to(self.device, non_blocking=True)
        for state, value in zip((self.starts, self.ends, self.seeds), moved):
            state[:count] = value
        self.live[count:] = False
        self.positions[count:] = 0

    def _staged(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory() if self.device.type == "cuda" else tensor

    def first_tokens(self, first: int, positions: Sequence[int], logits: Tensor) -> tuple[Tensor, Tensor]:
        """Start lanes first..first+n-1: draw their next tokens from logits [n, V]; returns tokens, log-probs [n]."""
        lanes = slice(first, first + len(positions))
        self.positions[lanes] = torch.tensor(positions, device=self.device)
        self.live[lanes] = True
        return self._advance(logits, lanes)

    def run(self, lanes: int) -> tuple[Tensor, Tensor]:
        """`chunk` steps of the first `lanes` lanes: tokens (-1: dead) and log-probs, each [chunk, lanes] on device."""
        self.cursor.zero_()
        size = next((s for s in self.sizes if s >= lanes), lanes)
        graph = self._graph(size) if self.ops.graphs else None
        for _ in range(self.chunk):
            if graph is not None:
                graph.replay()
            else:
                self._step(size)
        return self.drawn[:, :lanes], self.logprobs[:, :lanes]

    def _step(self, size: int) -> None:
        lanes = slice(0, size)
        logits = self.decoder.step(self.tokens[lanes], self.positions[lanes], self.table[lanes], self.ops)
        tokens, logprobs = self._advance(logits, lanes)
        self.drawn[:, lanes].index_copy_(0, self.cursor, tokens[None])
        self.logprobs[:, lanes].index_copy_(0, self.cursor, logprobs[None])
        self.cursor += 1

    def _advance(self, logits: Tensor, lanes: slice) -> tuple[Tensor, Tensor]:
        """Draw for each lane of the slice and move the live ones on; -1 for the dead."""
        positions, live = self.positions[lanes], self.live[lanes]  # views: both are moved on in place
        places = positions + 1 - self.starts[lanes]
        if self.ops.graphs:
            tokens, logprobs = self.ops.draw(logits, self.sampling, self.seeds[lanes], places)
        else:
            tokens, logprobs = draw(logits, self.sampling, uniforms(self.seeds[lanes], places))
        out = torch.where(live, tokens, -1)
        self.tokens[lanes] = torch.where(live, tokens, self.tokens[lanes])
        positions += live
        live &= ~(self.is_stop[tokens] | (positions >= self.ends[lanes]))
        return out, logprobs

    def _graph(self, size: int) -> torch.cuda.CUDAGraph:
        s = self.sampling
        key = (size, s.temperature, s.top_k, s.top_p, s.min_p)
        if key not in self._graphs:
            self._graphs[key] = self._capture(size)
        return self._graphs[key]

    def prepare(self, lanes: int) -> None:
        """Capture the graphs that up to `lanes` lanes will need; to be called while no lane is live."""
        if self.ops.graphs:
            for size in reversed(graph_sizes(lanes)):
                self._graph(size)
            self.cursor.zero_()

    def _capture(self, size: int) -> torch.cuda.CUDAGraph:
        """Run a step once (kernels compile, libraries take their workspaces), then record it."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        self.cursor.zero_()
        with torch.cuda.stream(stream):
            self._step(size)
            self.cursor.zero_()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        if self._memory is None:
            self._memory = torch.cuda.graph_pool_handle()
        # a reward thread may use the device while this records
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            self._step(size)
        return graph


def make_ops(decoder: Decoder) -> Any:
    """Kernels where Triton can run, torch operations elsewhere."""
    if decoder.embed.is_cuda:
        try:
            from rlspeed.rollout.fused import TritonOps
        except ImportError:
            return TorchOps(decoder)
        return TritonOps(decoder)
    return TorchOps(decoder)
