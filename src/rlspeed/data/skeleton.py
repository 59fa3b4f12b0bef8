"""A chat template worked out once for each sequence of roles, when it only copies the messages' texts.

Rendering through Jinja costs as much as tokenising. Most templates put texts between fixed pieces, so the pieces of
one sequence of roles serve for all chats with these roles. To know that a template is of this kind it is rendered with
opaque texts: strings that can be joined, stripped and put out, and that refuse everything else. Simple questions
about a text (is it empty, does it begin with, contain or equal some words) are answered no and noted as conditions;
a chat whose texts would answer yes goes through Jinja.

Only templates made of known harmless constructs are tried, every new skeleton is compared with the tokenizer's own
rendering, and so is one chat of each batch afterwards. Everything else takes the slow way, which is always right.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_OPEN, _CLOSE = "\ue000", "\ue001"
_MARK = re.compile(f"{_OPEN}(\\d+){_CLOSE}")
_FILTERS = {"trim", "string", "length", "count", "default", "d", "first", "last", "list"}
_TESTS = {"defined", "undefined", "none", "string", "mapping", "boolean", "true", "false", "odd", "even", "divisibleby"}
_FUNCTIONS = {"raise_exception", "namespace", "range", "strftime_now"}
_NODES = {
    *("Template", "Output", "TemplateData", "For", "If", "CondExpr", "Assign", "NSRef", "Name", "Const", "Getattr"),
    *(
        "Getitem",
        "Slice",
        "List",
        "Tuple",
        "Dict",
        "Pair",
        "Keyword",
        "Operand",
        "And",
        "Or",
        "Not",
        "Neg",
        "Add",
        "Sub",
    ),
    *("Filter", "Test"),
}
_KEYS = {"role", "content"}

Chat = Sequence[Mapping[str, Any]]
Render = Callable[[Sequence[Chat]], list[str]]


class _Opaque(Exception):
    """The template looked into a text."""


@dataclass(frozen=True, slots=True)
class _Use:
    """One place where a text goes: which message's, after which strip calls."""

    message: int
    strips: tuple[tuple[str, str | None], ...] = ()

    def of(self, text: str) -> str:
        """The text as it goes there."""
        for method, chars in self.strips:
            text = getattr(text, method)(chars)
        return text


class _Table:
    """The uses and the conditions of one rendering. conditions: (message, question, words) that were answered no."""

    def __init__(self) -> None:
        self.uses: list[_Use] = []
        self.conditions: set[tuple[int, str, str]] = set()

    def text(self, use: _Use) -> Text:
        """A new opaque text for a use."""
        self.uses.append(use)
        return Text.make(f"{_OPEN}{len(self.uses) - 1}{_CLOSE}", self, use)


class Text(str):
    """A message's text, or something joined from one, that says nothing about what it holds."""

    table: _Table
    use: _Use | None  # None: joined with something else

    @staticmethod
    def make(value: str, table: _Table, use: _Use | None) -> Text:
        """A text whose characters are a mark, or marks among fixed pieces."""
        out = Text(value)
        out.table, out.use = table, use
        return out

    def _ask(self, question: str, words: Any) -> bool:
        if self.use is None or self.use.strips or type(words) is not str:
            raise _Opaque
        self.table.conditions.add((self.use.message, question, words))
        return False

    def _strip(self, method: str, chars: Any) -> Text:
        if self.use is None or not (chars is None or type(chars) is str):
            raise _Opaque
        return self.table.text(_Use(self.use.message, (*self.use.strips, (method, chars))))

    def strip(self, chars: Any = None) -> Text:
        """Done to the value when it is put in."""
        return self._strip("strip", chars)

    def lstrip(self, chars: Any = None) -> Text:
        """As strip."""
        return self._strip("lstrip", chars)

    def rstrip(self, chars: Any = None) -> Text:
        """As strip."""
        return self._strip("rstrip", chars)

    def startswith(self, words: Any) -> bool:  # type: ignore[override]
        """Noted and answered no; a text that answers yes cannot be put in."""
        return self._ask("startswith", words)

    def endswith(self, words: Any) -> bool:  # type: ignore[override]
        """As startswith."""
        return self._ask("endswith", words)

    def __contains__(self, words: Any) -> bool:
        return self._ask("__contains__", words)

    def __eq__(self, other: Any) -> bool:
        return self._ask("__eq__", other)

    def __ne__(self, other: Any) -> bool:
        return not self._ask("__eq__", other)

    def __bool__(self) -> bool:
        if self.use is None or any(chars is not None and chars.strip() for _, chars in self.use.strips):
            raise _Opaque
        return True  # blank texts always go the slow way, and stripping space leaves something of the others

    def __add__(self, other: Any) -> Text:
        if not isinstance(other, str):
            raise _Opaque
        return Text.make("".join((self, other)), self.table, None)

    def __radd__(self, other: Any) -> Text:
        if not isinstance(other, str):
            raise _Opaque
        return Text.make("".join((other, self)), self.table, None)

    def __str__(self) -> Text:
        return self

    __hash__ = None  # type: ignore[assignment]


def _refuse(self: Any, *_: Any, **__: Any) -> Any:
    raise _Opaque


_ALLOWED = {*Text.__dict__, "__new__", "__init__", "__class__", "__getattribute__", "__setattr__", "__init_subclass__"}
for _name in dir(str):
    if _name not in _ALLOWED and _name not in ("__subclasshook__", "__delattr__", "__dir__", "__doc__"):
        setattr(Text, _name, _refuse)


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A template for one sequence of roles. pieces: fixed text and uses of texts, in order."""

    pieces: tuple[str | _Use, ...]
    conditions: tuple[tuple[int, str, str], ...]

    def render(self, texts: Sequence[str]) -> str | None:
        """The chat with these texts; None when they have to go the slow way."""
        for text in texts:
            if not text or text.isspace():
                return None
        for message, question, words in self.conditions:
            if getattr(texts[message], question)(words):
                return None
        return "".join([p if type(p) is str else p.of(texts[p.message]) for p in self.pieces])  # type: ignore[union-attr]


class Skeletons:
    """The skeletons of one tokenizer's template, worked out as sequences of roles turn up.

    render: the slow way, for chats in a batch.
    """

    def __init__(self, tokenizer: Any, kwargs: Mapping[str, Any], render: Render) -> None:
        self.slow = render
        self.known: dict[tuple[str, ...], Skeleton | None] = {}
        self.template: Any = None
        self.variables: dict[str, Any] = {}
        source = getattr(tokenizer, "chat_template", None)
        plain = all(v is None or type(v) in (str, int, float, bool) for v in kwargs.values())
        named = not {"chat_template", "tools", "documents", "continue_final_message"} & set(kwargs)
        if isinstance(source, str) and plain and named:
            self.template = _compiled(source)
            self.variables = {"tools": None, "documents": None, **tokenizer.special_tokens_map, **kwargs}

    def render(self, chats: Sequence[Chat]) -> list[str | None]:
        """Each chat as text; None for those that have to go the slow way."""
        out: list[str | None] = [None] * len(chats)
        if self.template is None:
            return out
        checked: set[tuple[str, ...]] = set()
        for i, chat in enumerate(chats):
            if any(m.keys() != _KEYS for m in chat):
                continue
            roles = tuple([m["role"] for m in chat])
            if roles not in self.known:
                self.known[roles] = self._work_out(roles)
            skeleton = self.known[roles]
            if skeleton is None:
                continue
            text = skeleton.render([m["content"] for m in chat])
            if text is not None and roles not in checked:
                checked.add(roles)
                if self.slow([chat]) != [text]:
                    self.template = None  # not as harmless as it looked: nothing of this batch is trusted
                    return [None] * len(chats)
            out[i] = text
        return out

    def _work_out(self, roles: tuple[str, ...]) -> Skeleton | None:
        """The skeleton of a sequence of roles; None when the template looks into texts or refuses the roles."""
        table = _Table()
        messages = [{"role": role, "content": table.text(_Use(i))} for i, role in enumerate(roles)]
        try:
            text = self.template.render(messages=messages, add_generation_prompt=True, **self.variables)
        except Exception:  # a template may raise whatever it likes; the slow way says why
            return None
        pieces: list[str | _Use] = []
        for i, piece in enumerate(_MARK.split(str.__str__(text))):
            pieces.append(table.uses[int(piece)] if i % 2 else piece)
        if any(_OPEN in p or _CLOSE in p for p in pieces if isinstance(p, str)):
            return None
        return Skeleton(tuple(p for p in pieces if p != ""), tuple(sorted(table.conditions)))


def _compiled(source: str) -> Any:
    """The template as transformers compiles it, when nothing in it can read a text unseen; else None.

    Filters and tests that are not known to be harmless are refused when they run, not when they are only there.
    """
    try:
        from transformers.utils.chat_template_utils import _compile_jinja_template

        environment = _compile_jinja_template(source).environment.overlay()
        environment.filters = {n: f if n in _FILTERS else _refuse for n, f in environment.filters.items()}
        environment.tests = {n: f if n in _TESTS else _refuse for n, f in environment.tests.items()}
        harmless = _OPEN not in source and all(_harmless(node) for node in _walk(environment.parse(source)))
        return environment.from_string(source) if harmless else None
    except Exception:  # whatever is wrong with it, the slow way reports it
        return None


def _walk(node: Any) -> list[Any]:
    found = [node]
    for child in node.iter_child_nodes():
        found.extend(_walk(child))
    return found


def _harmless(node: Any) -> bool:
    """Whether a construct hands no text to code that reads strings without asking them."""
    kind = type(node).__name__
    if kind == "Call":
        fixed = all(_is_const(a) for a in node.args) and all(_is_const(k.value) for k in node.kwargs)
        if type(node.node).__name__ == "Name":
            return node.node.name in _FUNCTIONS
        return type(node.node).__name__ == "Getattr" and (fixed or node.node.attr == "get") and not node.dyn_args
    if kind == "Compare":
        sides = [node.expr, *(o.expr for o in node.ops)]
        member = [i for i, o in enumerate(node.ops) if o.op in ("in", "notin")]
        return all(_is_const(sides[i]) or type(sides[i + 1]).__name__ in ("List", "Tuple") for i in member)
    if kind == "Mod":
        return _is_const(node.right)
    return kind in _NODES


def _is_const(node: Any) -> bool:
    return type(node).__name__ == "Const"
