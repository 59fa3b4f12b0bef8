"""Prompts to token ids: the one way that training, sorting, packing and statistics share."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from rlspeed.data.skeleton import Skeletons
from rlspeed.errors import ConfigError, Fault

Mode = Literal["auto", "always", "never"]
_RESERVED = ("conversation", "tokenize", "add_generation_prompt", "padding", "truncation", "return_tensors")
_PROBE = "a"
_SLICE_CHARS = 2 << 20


def load_tokenizer(path: str, *, trust_remote_code: bool = False, without_torch: bool = False, where: str = "") -> Any:
    """The Hugging Face tokenizer of a directory or hub name.

    without_torch: keep transformers from importing torch, which saves seconds and memory where no model is needed;
    for processes that never load a model (it does nothing when torch or transformers is there already).
    where: the configuration key or argument that messages name.

    Raises:
        ConfigError: nothing loadable there.
    """
    try:
        with _torch_hidden() if without_torch else _nothing():
            from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise ConfigError(
            Fault(
                where=where or "tokenizer",
                found=f"{path!r}: {(str(error) or type(error).__name__).splitlines()[0]}",
                allowed="a directory with tokenizer.json and tokenizer_config.json, or a hub name",
                fix="check the path; without network a hub name must be in the local cache",
            )
        ) from error


def tokenizer_digest(tokenizer: Any) -> str:
    """sha256 over what decides about ids: vocabulary, merges, added tokens and chat template."""
    parts: dict[str, Any] = {"vocab": sorted(tokenizer.get_vocab().items()), "template": tokenizer.chat_template}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        whole = json.loads(backend.to_str())
        parts["model"] = {k: v for k, v in whole["model"].items() if k != "vocab"}
        parts["steps"] = [whole.get(k) for k in ("normalizer", "pre_tokenizer")]
        parts["added"] = sorted((t["id"], t["content"]) for t in whole.get("added_tokens") or [])
    return hashlib.sha256(json.dumps(parts, sort_keys=True, ensure_ascii=False).encode("utf-8")).hexdigest()


@dataclass(slots=True)
class Rendered:
    """One prompt as the model sees it; `fault` says why there is none. blank: it holds no visible content of its own.

    text is without the special tokens in `num_prefix` (a begin token that the tokenizer puts before plain strings).
    """

    text: str = ""
    add_prefix: bool = False
    blank: bool = False
    fault: str = ""


class PromptRenderer:
    """Renders prompts through a tokenizer's chat template and tokenises them.

    apply_chat_template: auto renders message lists; always strings too, as one user message; never takes strings
    only, as they are. system_prompt goes as a system message before message lists that have none.

    Rendered text is tokenised without further special tokens, so a template that writes the begin token yields exactly
    one. A plain string gets the tokenizer's own begin token, unless it starts with it.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        apply_chat_template: Mode = "auto",
        system_prompt: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.mode = apply_chat_template
        self.system_prompt = system_prompt
        self.kwargs = dict(chat_template_kwargs or {})
        reserved = [k for k in self.kwargs if k in _RESERVED]
        if reserved:
            where = f"data.chat_template_kwargs.{reserved[0]}"
            raise ConfigError(Fault(where=where, found="set by rlspeed itself", fix="leave it out"))
        self.has_template = bool(getattr(tokenizer, "chat_template", None)) or "chat_template" in self.kwargs
        self.prefix_ids = _prefix_ids(tokenizer)
        self.prefix_text = "".join(tokenizer.convert_ids_to_tokens(list(self.prefix_ids)))
        self.skeletons = Skeletons(tokenizer, self.kwargs, self._template)
        self.backend = getattr(tokenizer, "backend_tokenizer", None)
        if self.backend is not None:  # a tokenizer.json may come with a cut or padding of its own
            self.backend.no_truncation()
            self.backend.no_padding()

    def render(self, prompts: Sequence[Any]) -> list[Rendered]:
        """Each prompt as text, or the reason why not; a fault in one row leaves the others alone."""
        out: list[Rendered] = [Rendered()] * len(prompts)
        chats: list[tuple[int, list[dict[str, Any]]]] = []
        for i, prompt in enumerate(prompts):
            try:
                read = self._read(prompt)
            except _BadPrompt as error:
                out[i] = Rendered(fault=str(error))
                continue
            if isinstance(read, str):
                prefix = bool(self.prefix_ids) and not read.startswith(self.prefix_text)
                out[i] = Rendered(text=read, add_prefix=prefix, blank=not read.strip())
            else:
                chats.append((i, read))
        if chats:
            for (i, chat), text in zip(chats, self._apply([c for _, c in chats])):
                out[i] = text if isinstance(text, Rendered) else Rendered(text=text, blank=_is_blank(chat))
        return out

    def token_ids(self, rendered: Sequence[Rendered]) -> list[list[int]]:
        """Token ids of each rendered prompt; an empty list where there is a fault or a text of no tokens."""
        ids = self._encode([r.text for r in rendered])
        return [self._with_prefix(r, row) for r, row in zip(rendered, ids)]

    def lengths(self, rendered: Sequence[Rendered]) -> list[int]:
        """Number of token ids of each rendered prompt, without listing them."""
        texts = [r.text for r in rendered]
        if self.backend is None:
            counts = [len(ids) for ids in self._encode(texts)]
        else:
            counts = [len(e) for part in _slices(texts) for e in self._fast(part)]
        extra = len(self.prefix_ids)
        return [n + extra if r.add_prefix and n else n for r, n in zip(rendered, counts)]

    def _with_prefix(self, rendered: Rendered, ids: list[int]) -> list[int]:
        return [*self.prefix_ids, *ids] if rendered.add_prefix and ids else ids

    def _encode(self, texts: list[str]) -> list[list[int]]:
        if self.backend is not None:
            return [e.ids for part in _slices(texts) for e in self._fast(part)]
        return [list(self.tokenizer(t, add_special_tokens=False)["input_ids"]) for t in texts]

    def _fast(self, texts: list[str]) -> list[Any]:
        encode = getattr(self.backend, "encode_batch_fast", None) or self.backend.encode_batch  # type: ignore[union-attr]
        return list(encode(texts, add_special_tokens=False))

    def _read(self, prompt: Any) -> str | list[dict[str, Any]]:
        """A prompt of the data as a string or as messages; raises _BadPrompt."""
        if hasattr(prompt, "tolist"):
            prompt = prompt.tolist()
        if prompt is None:
            raise _BadPrompt("the prompt is null")
        if isinstance(prompt, str):
            if self.mode != "always":
                return prompt
            messages = [{"role": "user", "content": prompt}]
        elif not isinstance(prompt, (list, tuple)):
            raise _BadPrompt(f"the prompt is of type {type(prompt).__name__}, not a string or a list of messages")
        elif self.mode == "never":
            raise _BadPrompt("the prompt is a message list, but apply_chat_template is never")
        else:
            messages = [read_message(m, i) for i, m in enumerate(prompt)]
        if self.system_prompt is not None and not any(m["role"] == "system" for m in messages):
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        if not self.has_template:
            raise _BadPrompt("the prompt needs a chat template and the tokenizer has none")
        return messages

    def _apply(self, chats: list[list[dict[str, Any]]]) -> list[str | Rendered]:
        """The chats through the template: by its skeleton where it has one, else through Jinja."""
        out: list[str | Rendered | None] = list(self.skeletons.render(chats))
        slow = [i for i, text in enumerate(out) if text is None]
        for i, text in zip(slow, self._slowly([chats[i] for i in slow])):
            out[i] = text
        return [text for text in out if text is not None]

    def _slowly(self, chats: list[list[dict[str, Any]]]) -> list[str | Rendered]:
        """The chats through Jinja: all at once, and one by one when one of them is refused."""
        if not chats:
            return []
        try:
            return list(self._template(chats))
        except Exception:
            out: list[str | Rendered] = []
            for chat in chats:
                try:
                    out.extend(self._template([chat]))
                except Exception as error:  # a template may raise whatever it likes
                    why = str(error).splitlines()[0] if str(error) else ""
                    out.append(Rendered(fault=f"the chat template refuses it: {why or type(error).__name__}"))
            return out

    def _template(self, chats: Sequence[Sequence[Mapping[str, Any]]]) -> list[str]:
        return list(
            self.tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True, **self.kwargs)
        )


class _BadPrompt(Exception):
    """Why a prompt cannot be rendered."""


def read_message(message: Any, index: int) -> dict[str, Any]:
    """One message with its content as one string; keys that are null (parquet fills them in) are left out.

    Text parts are joined in order.
    """
    if not isinstance(message, Mapping):
        raise _BadPrompt(f"message {index} is of type {type(message).__name__}, not an object with role and content")
    kept = {k: v for k, v in message.items() if v is not None or k == "content"}
    role = kept.get("role")
    if not isinstance(role, str) or not role:
        keys = ", ".join(sorted(str(k) for k in message)) or "none"
        raise _BadPrompt(f"message {index} has no role (its keys: {keys})")
    content = kept.get("content")
    if content is not None and hasattr(content, "tolist"):
        content = content.tolist()
    if content is None:
        if not kept.get("tool_calls"):
            raise _BadPrompt(f"message {index} ({role}) has no content")
        content = ""
    elif isinstance(content, (list, tuple)):
        content = "".join(_part_text(part, index, i) for i, part in enumerate(content))
    elif not isinstance(content, str):
        raise _BadPrompt(f"the content of message {index} ({role}) is of type {type(content).__name__}, not text")
    return {**kept, "content": content}


def _part_text(part: Any, message: int, index: int) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise _BadPrompt(f"content part {index} of message {message} is of type {kind!r}; only text parts can be used")


def _slices(texts: list[str]) -> Iterator[list[str]]:
    """Texts of together about _SLICE_CHARS: what the library makes of them takes some hundred bytes per token."""
    start = held = 0
    for at, text in enumerate(texts):
        held += len(text)
        if held >= _SLICE_CHARS:
            yield texts[start : at + 1]
            start, held = at + 1, 0
    if start < len(texts):
        yield texts[start:]


def _is_blank(chat: list[dict[str, Any]]) -> bool:
    """No message other than the system's says anything, or one of them is empty."""
    said = False
    for message in chat:
        if message["role"] != "system":
            said = True
            text = message["content"]
            if (not text or text.isspace()) and not message.get("tool_calls"):
                return True
    return not said


def _prefix_ids(tokenizer: Any) -> tuple[int, ...]:
    """Special tokens that the tokenizer puts before a text of its own accord (a begin token, or none)."""
    bare = list(tokenizer(_PROBE, add_special_tokens=False)["input_ids"])
    full = list(tokenizer(_PROBE)["input_ids"])
    for at in range(len(full) - len(bare) + 1):
        if full[at : at + len(bare)] == bare:
            return tuple(full[:at])
    return ()


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def _torch_hidden() -> Iterator[None]:
    """Make `import torch` fail inside the block, so that transformers starts in its mode for tokenizers alone."""
    if "torch" in sys.modules or "transformers" in sys.modules or importlib.util.find_spec("torch") is None:
        yield
        return
    quiet = os.environ.get("TRANSFORMERS_NO_ADVISORY_WARNINGS")
    sys.modules["torch"] = None  # type: ignore[assignment]
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    try:
        yield
    finally:
        del sys.modules["torch"]
        if quiet is None:
            del os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"]
        else:
            os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = quiet
