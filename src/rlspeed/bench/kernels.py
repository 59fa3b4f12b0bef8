"""How much of a profile is spent on moving numbers about: casts, padding and concatenation of tensors over tokens.

Works on the events of torch's trace file (`measure.trace_events`), so it needs no device: kernels are brought back to
the operations that launched them, operations tell shapes and dtypes. In a trace without a device the operations
themselves count, each with the time that its parts do not take.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Event = Mapping[str, Any]

DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
FLOATS = ("float", "double", "c10::BFloat16", "c10::Half")
# a narrower tensor over tokens is per-token scalars or the like
LEAST_WIDTH = 64
# parts of the name of a kernel that torch.compile fused out of moves alone
MOVES: tuple[str, ...] = (
    "_to_copy",
    "constant_pad_nd",
    "cat",
    "clone",
    "copy",
    "copy_",
    "_unsafe_view",
    "view",
    "permute",
    "transpose",
)
MOVES += ("t", "expand", "slice", "unsqueeze", "squeeze", "select", "as_strided")
TRITON = re.compile(r"^triton_[a-z]{3}_fused_(.*?)_?\d*$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A piece of work: its own name, the operations around it from the innermost out, its duration in seconds."""

    name: str
    seconds: float
    operations: tuple[Event, ...]


@dataclass(slots=True, kw_only=True)
class Moves:
    """Seconds of a profile by kind of work, and the ten moves that took longest.

    cast: a change of dtype over tokens. pad, cat: over tokens. weight_cast: changes of dtype of anything else (rounding
    masters into parameters, gradients into their sums). total: everything that ran.
    """

    cast: float = 0.0
    pad: float = 0.0
    cat: float = 0.0
    weight_cast: float = 0.0
    total: float = 0.0
    longest: list[tuple[str, float]] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Part of the whole that moves tensors over tokens about."""
        return (self.cast + self.pad + self.cat) / self.total if self.total else 0.0


def classify(events: Iterable[Event], token_sizes: Sequence[tuple[int, ...]]) -> Moves:
    """Add up the work of a trace by kind.

    token_sizes: what the shape of a tensor over tokens holds: (T,) for a packed row of T tokens or N chosen ones,
    (rows, width) for a padded batch; with at least 64 numbers to each token.
    """
    out = Moves()
    by_name: dict[str, float] = {}
    for work in device_work(list(events)):
        out.total += work.seconds
        kind = kind_of(work, token_sizes)
        if kind is not None:
            setattr(out, kind, getattr(out, kind) + work.seconds)
            if kind != "weight_cast":
                label = f"{kind}: {_label(work)}"
                by_name[label] = by_name.get(label, 0.0) + work.seconds
    out.longest = sorted(by_name.items(), key=lambda item: -item[1])[:10]
    return out


def kind_of(work: Work, token_sizes: Sequence[tuple[int, ...]]) -> str | None:
    """cast, pad, cat, weight_cast, or None for everything else."""
    fused = TRITON.match(work.name)
    if fused:
        return _fused_kind(fused[1])
    for operation in work.operations:
        name = operation["name"]
        over = any(over_tokens(shape, token_sizes) for shape in _shapes(operation))
        # a change of dtype is always carried out by copy_, inside of _to_copy or not
        if name == "aten::copy_" and _changes_dtype(operation):
            return "cast" if over else "weight_cast"
        if name in ("aten::constant_pad_nd", "aten::pad") and over:
            return "pad"
        if name == "aten::cat" and over:
            return "cat"
    return None


def over_tokens(shape: Sequence[int], token_sizes: Sequence[tuple[int, ...]]) -> bool:
    """Whether a tensor of this shape has LEAST_WIDTH numbers or more for each token."""
    for sizes in token_sizes:
        left = list(shape)
        for size in sizes:
            if size not in left:
                break
            left.remove(size)
        else:
            width = 1
            for n in left:
                width *= n
            if width >= LEAST_WIDTH:
                return True
    return False


def device_work(events: Sequence[Event]) -> Iterator[Work]:
    """Kernels and copies of the device with the operations that launched them; without any, the operations."""
    parents = _parents([e for e in events if e.get("ph") == "X" and e.get("cat") == "cpu_op"])
    by_id = {op["args"]["External id"]: i for i, (op, _) in enumerate(parents) if "External id" in op.get("args", {})}
    device = [e for e in events if e.get("ph") == "X" and e.get("cat") in DEVICE_CATEGORIES]
    for event in device:
        place = by_id.get(event.get("args", {}).get("External id"))
        chain = () if place is None else _chain(parents, place)
        yield Work(name=event["name"], seconds=event["dur"] / 1e6, operations=chain)
    if device:
        return
    own = [op["dur"] for op, _ in parents]
    for op, parent in parents:
        if parent is not None:
            own[parent] -= op["dur"]
    for i, (op, _) in enumerate(parents):
        yield Work(name=op["name"], seconds=max(own[i], 0.0) / 1e6, operations=_chain(parents, i))


def _parents(operations: Sequence[Event]) -> list[tuple[Event, int | None]]:
    """Each operation with the place of the one that it runs inside, by thread."""
    out: list[tuple[Event, int | None]] = []
    stacks: dict[Any, list[int]] = {}
    for op in sorted(operations, key=lambda e: (e["ts"], -e["dur"])):
        stack = stacks.setdefault(op.get("tid"), [])
        while stack and out[stack[-1]][0]["ts"] + out[stack[-1]][0]["dur"] <= op["ts"]:
            stack.pop()
        out.append((op, stack[-1] if stack else None))
        stack.append(len(out) - 1)
    return out


def _chain(parents: Sequence[tuple[Event, int | None]], place: int) -> tuple[Event, ...]:
    chain = []
    at: int | None = place
    while at is not None:
        op, at = parents[at]
        chain.append(op)
    return tuple(chain)


def _fused_kind(name: str) -> str | None:
    """A fused kernel is a move when nothing but moves was fused into it; its first kind in this order counts."""
    left = f"_{name}_"
    for part in sorted(MOVES, key=len, reverse=True):
        while f"_{part}_" in left:
            left = left.replace(f"_{part}_", "_", 1)
    if left.strip("_"):
        return None
    for part, kind in (("_to_copy", "cast"), ("constant_pad_nd", "pad"), ("cat", "cat")):
        if f"_{part}_" in f"_{name}_":
            return kind
    return None


def _shapes(operation: Event) -> list[list[int]]:
    """Shapes of its tensors; a list of tensors (cat) stands as a list of shapes."""
    out = []
    for dims in operation.get("args", {}).get("Input Dims", []):
        if dims and isinstance(dims[0], list):
            out.extend(dims)
        elif dims:
            out.append(dims)
    return out


def _changes_dtype(operation: Event) -> bool:
    """Destination and source of a copy differ in dtype, both being floating point."""
    types = operation.get("args", {}).get("Input type", [])
    return len(types) >= 2 and types[0] != types[1] and types[0] in FLOATS and types[1] in FLOATS


def _label(work: Work) -> str:
    """Operation with its largest shape, or the fused kernel's name."""
    if TRITON.match(work.name) or not work.operations:
        return work.name
    shapes = max(([s for s in _shapes(op) if s] for op in work.operations), key=len, default=[])
    outer = " in ".join(dict.fromkeys(op["name"] for op in work.operations[:3]))
    return f"{outer} {max(shapes, key=len) if shapes else ''}"
