"""Prompts shortened from the left, in their own form: a string stays a string, messages stay messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlspeed.data.render import PromptRenderer


def text_length(prompt: Any) -> int:
    """Characters of the prompt's texts: the string, or all contents."""
    return sum(len(t) for t in _texts(prompt))


def cut_left(prompt: Any, count: int) -> Any:
    """A copy without the first `count` characters of its texts; roles and everything else stay."""
    if isinstance(prompt, str):
        return prompt[count:]
    left = count
    out = []
    for message in prompt:
        content = message["content"]
        if isinstance(content, str):
            content, left = content[left:], max(0, left - len(content))
        elif content is not None:
            parts = []
            for part in content:
                text = part if isinstance(part, str) else part["text"]
                kept, left = text[left:], max(0, left - len(text))
                parts.append(kept if isinstance(part, str) else {**part, "text": kept})
            content = parts
        out.append({**message, "content": content})
    return out


def find_cuts(renderer: PromptRenderer, prompts: Sequence[Any], limit: int) -> list[tuple[int, int]]:
    """Fewest characters to cut from the left of each prompt so that it renders to at most `limit` tokens, with the
    tokens that are left; (-1, tokens) where even the empty template is too long.

    All prompts are halved together, so that each round is one call of the tokenizer.
    """
    low, high = [0] * len(prompts), [text_length(p) for p in prompts]
    least = _tokens(renderer, prompts, high)
    while True:
        open_rows = [i for i in range(len(prompts)) if least[i] <= limit and high[i] - low[i] > 1]
        if not open_rows:
            break
        middle = [(low[i] + high[i]) // 2 for i in open_rows]
        for i, at, tokens in zip(open_rows, middle, _tokens(renderer, [prompts[i] for i in open_rows], middle)):
            if tokens <= limit:
                high[i], least[i] = at, tokens
            else:
                low[i] = at
    return [(high[i] if least[i] <= limit else -1, least[i]) for i in range(len(prompts))]


def _tokens(renderer: PromptRenderer, prompts: Sequence[Any], counts: Sequence[int]) -> list[int]:
    return renderer.lengths(renderer.render([cut_left(p, n) for p, n in zip(prompts, counts)]))


def _texts(prompt: Any) -> list[str]:
    if isinstance(prompt, str):
        return [prompt]
    out: list[str] = []
    for message in prompt:
        content = message["content"]
        if isinstance(content, str):
            out.append(content)
        elif content is not None:
            out.extend(part if isinstance(part, str) else part["text"] for part in content)
    return out
