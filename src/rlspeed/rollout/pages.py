"""Pages of the key-value cache: who holds which, and which prompts are shared. Pure bookkeeping, no tensors.

A page holds `size` consecutive tokens of one sequence, in all layers. Page 0 belongs to nobody: lanes that wait to be
taken out write there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

SCRATCH = 0


class PagePool:
    """Reference-counted pages 1..count-1; page 0 is the scratch page."""

    def __init__(self, count: int, size: int) -> None:
        if count < 2 or size < 1:
            raise ValueError(f"{count} pages of {size} tokens; at least 2 of 1 are needed")
        self.size = size
        self.count = count
        self._free = list(range(count - 1, SCRATCH, -1))
        self._holders = [0] * count

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def needed(self, tokens: int) -> int:
        """Pages for a sequence of so many tokens."""
        return -(-tokens // self.size)

    def take(self, count: int) -> list[int]:
        """Pages for a new holder.

        Raises:
            ValueError: fewer are free.
        """
        if count > len(self._free):
            raise ValueError(f"{count} pages wanted, {len(self._free)} free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """One more holder of each."""
        for page in pages:
            if not self._holders[page]:
                raise ValueError(f"page {page} is free; it cannot be shared")
            self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One holder less of each; a page without holders is free."""
        for page in pages:
            if not self._holders[page]:
                raise ValueError(f"page {page} is free already")
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)


@dataclass(slots=True)
class Prefix:
    """A computed prompt that further answers wait for: its pages, and whatever the next token is drawn from."""

    length: int
    pages: list[int]
    waiting: int
    logits: Any = field(default=None, repr=False)


def fork(pool: PagePool, prefix: Prefix) -> tuple[list[int], tuple[int, int] | None]:
    """Pages for one more answer to a computed prompt, and the copy (source, target) that its last page needs.

    Full pages are shared, since nobody writes to them again. A page that is filled in part is copied, but the last
    answer that waits takes the prefix's own. The caller makes sure that a page is free.
    """
    prefix.waiting -= 1
    if prefix.waiting == 0:
        pages, prefix.pages = prefix.pages, []
        return pages, None
    full = prefix.length // pool.size
    pool.share(prefix.pages[:full])
    if full == len(prefix.pages):
        return prefix.pages[:full], None
    own = pool.take(1)
    return prefix.pages[:full] + own, (prefix.pages[full], own[0])
