"""Every dotted key of the schema, for suggestions, the reference and the loader."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import BaseModel

from rlspeed.config.schema import Profile


@cache
def all_keys() -> tuple[str, ...]:
    """Every dotted key, sections included, in the schema's order; items of lists of sections carry the number 0."""
    return tuple(_keys(Profile, ""))


@cache
def section_keys() -> frozenset[str]:
    """Keys that hold a section and cannot be null: with nothing under them they say nothing."""
    return frozenset(_sections(Profile, ""))


def models_in(annotation: Any) -> list[tuple[str, type[BaseModel]]]:
    """Sections that a field holds, directly, optionally or in a list, with what goes between their keys ("" or "0.")"""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [("", annotation)]
    number = "0." if getattr(annotation, "__origin__", None) is list else ""
    return [(number + more, m) for part in getattr(annotation, "__args__", ()) for more, m in models_in(part)]


def _keys(model: type[BaseModel], prefix: str) -> list[str]:
    out: list[str] = []
    for name, field in model.model_fields.items():
        out.append(f"{prefix}{name}")
        for number, kind in models_in(field.annotation):
            out.extend(_keys(kind, f"{prefix}{name}.{number}"))
    return out


def _sections(model: type[BaseModel], prefix: str) -> list[str]:
    out: list[str] = []
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            out.append(f"{prefix}{name}")
        for number, inner in models_in(kind):
            if not number:
                out.extend(_sections(inner, f"{prefix}{name}."))
    return out
