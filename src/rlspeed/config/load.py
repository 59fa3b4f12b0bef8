"""YAML files and key.path=value words to a Profile, with the origin of every value and all faults in one error.

Layers, later ones win: defaults of the schema, a packaged profile, the user's file (with its device mapping),
overrides.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from rlspeed.config.device_schema import DeviceMapping
from rlspeed.config.names import nearest
from rlspeed.config.schema import Profile
from rlspeed.config.yaml_lines import Document, read_document, read_value
from rlspeed.errors import ConfigError, Fault

Key = tuple[str, ...]
RESOLVED = "resolved.yaml"


@dataclass(frozen=True, slots=True)
class LoadedProfile:
    """A validated run and where each of its values comes from (`default`, `profile NAME`, `FILE:LINE`, `override`)."""

    profile: Profile
    origins: Mapping[str, str]

    def dump(self) -> str:
        """YAML that loads back equal."""
        data = self.profile.model_dump(mode="json")
        return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)

    def leaves(self) -> Iterator[tuple[str, Any, str]]:
        """(dotted key, value, origin) of every value, in schema order."""
        for key, value in _leaves(self.profile.model_dump(mode="json"), ()):
            yield ".".join(key), value, self.origin(".".join(key))

    def origin(self, dotted: str) -> str:
        """Where the value of `dotted` comes from."""
        key = dotted
        while key:
            if key in self.origins:
                return self.origins[key]
            key = key.rpartition(".")[0]
        return "default"


def packaged_profiles() -> list[str]:
    """Names of the profiles that ship in the package."""
    folder = resources.files("rlspeed.profiles")
    return sorted(p.name.removesuffix(".yaml") for p in folder.iterdir() if p.name.endswith(".yaml"))


def load_profile(name_or_file: str, overrides: Sequence[str] = ()) -> LoadedProfile:
    """Load a packaged profile, a YAML file, or the resolved.yaml of a run folder, with overrides on top.

    Raises:
        ConfigError: every fault of every file and word.
    """
    layers: list[tuple[Document, str]] = []
    faults: list[Fault] = []
    document = _first(name_or_file, layers, faults)
    data: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for layer, label in layers:
        _merge(data, layer.data, (), origins, layer, label)
    words = _words(overrides, data, origins, faults)
    _device_mapping(data, origins, words, document, layers, faults)
    data.setdefault("name", Path(name_or_file).resolve().stem if document is not None else name_or_file)
    try:
        profile = Profile.model_validate(data)
    except ValidationError as error:
        faults.extend(_faults(error, origins))
    if faults:
        raise ConfigError(faults)
    return LoadedProfile(profile, origins)


def load_device_mapping(file: str | Path) -> DeviceMapping:
    """Load a device mapping on its own, without a run.

    Raises:
        ConfigError: every fault of the file.
    """
    document = read_document(Path(file))
    origins = {f"devices.{'.'.join(key)}": document.where(key) for key, _ in _leaves(document.data, ())}
    whole = {"model": {"path": "-"}, "data": {"train_files": "-"}, "devices": document.data}
    try:
        return Profile.model_validate(whole).devices
    except ValidationError as error:
        raise ConfigError(_faults(error, origins)) from error


def _first(name: str, layers: list[tuple[Document, str]], faults: list[Fault]) -> Document | None:
    """Put the packaged profile and the user's file into `layers`; returns the user's file."""
    path = Path(name)
    if path.is_dir() and (path / RESOLVED).is_file():
        path = path / RESOLVED
    if not path.is_file():
        if name in packaged_profiles():
            layers.append((_packaged(name), f"profile {name}"))
            return None
        near = nearest(name, packaged_profiles())
        raise ConfigError(
            Fault(
                where="configuration",
                found=f"{name!r} is no file, no run folder and no profile",
                allowed=f"a YAML file, a run folder, or one of {', '.join(packaged_profiles())}",
                fix=f"did you mean {near}?" if near else "check the path",
            )
        )
    document = read_document(path)
    base = document.data.pop("profile", None)
    if base is not None:
        if base in packaged_profiles():
            layers.append((_packaged(str(base)), f"profile {base}"))
        else:
            found = f"profile: {base!r}"
            allowed = ", ".join(packaged_profiles())
            faults.append(Fault(where=document.where(("profile",)), found=found, allowed=allowed))
    layers.append((document, "file"))
    return document


def _packaged(name: str) -> Document:
    with resources.as_file(resources.files("rlspeed.profiles") / f"{name}.yaml") as path:
        return read_document(path)


def _merge(
    into: dict[str, Any], new: Mapping[Any, Any], key: Key, origins: dict[str, str], layer: Document, label: str
) -> None:
    """Mappings are merged, everything else replaces what was there."""
    for name, value in new.items():
        here = (*key, str(name))
        if isinstance(value, Mapping) and isinstance(into.get(str(name)), dict):
            _merge(into[str(name)], value, here, origins, layer, label)
            continue
        into[str(name)] = copy.deepcopy(value)
        for leaf, _ in _leaves(value, here):
            origins[".".join(leaf)] = layer.where(leaf) if label == "file" else label


def _leaves(value: Any, key: Key) -> Iterator[tuple[Key, Any]]:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _leaves(inner, (*key, str(name)))
    else:
        yield key, value


def _words(
    overrides: Sequence[str], data: dict[str, Any], origins: dict[str, str], faults: list[Fault]
) -> dict[str, str]:
    """Apply key.path=value words in order; returns them by key."""
    seen: dict[str, str] = {}
    for word in overrides:
        dotted, equals, text = word.partition("=")
        if not equals or not dotted or "" in dotted.split("."):
            found = f"{word!r}"
            faults.append(Fault(where="override", found=found, allowed="key.path=value", fix="write one word per key"))
            continue
        try:
            value = read_value(text)
        except ValueError as error:
            faults.append(Fault(where=f"override {dotted}", found=f"{text!r} is not YAML: {error}", fix="quote it"))
            continue
        problem = _put(data, dotted.split("."), value)
        if problem:
            faults.append(Fault(where=f"override {dotted}", found=problem))
            continue
        for stale in [k for k in origins if k == dotted or k.startswith(f"{dotted}.")]:
            del origins[stale]
        origins[dotted] = "override"
        seen[dotted] = text
    return seen


def _put(data: Any, key: list[str], value: Any) -> str | None:
    """Set one value; list items by number. Returns what is wrong, None when done."""
    for i, name in enumerate(key[:-1]):
        if isinstance(data, list):
            if not name.isdigit() or int(name) >= len(data):
                return f"{'.'.join(key[:i])} has {len(data)} items, no {name!r}"
            data = data[int(name)]
        elif isinstance(data, dict):
            if data.get(name) is None:
                data[name] = {}
            data = data[name]
        if not isinstance(data, (dict, list)):
            return f"{'.'.join(key[: i + 1])} is a plain value and has no {key[i + 1]!r}"
    last = key[-1]
    if isinstance(data, list):
        if not last.isdigit() or int(last) > len(data):
            return f"{'.'.join(key[:-1])} has {len(data)} items, no {last!r}"
        data[int(last) : int(last) + 1] = [value]
    else:
        data[last] = value
    return None


def _device_mapping(
    data: dict[str, Any],
    origins: dict[str, str],
    words: Mapping[str, str],
    document: Document | None,
    layers: Sequence[tuple[Document, str]],
    faults: list[Fault],
) -> None:
    """Read device_mapping_file into `devices`, below what stands there inline or as an override."""
    name = data.get("device_mapping_file")
    if not isinstance(name, str):
        return
    path = Path(name)
    if not path.is_file() and document is not None and not path.is_absolute():
        beside = document.path.parent / name
        path = beside if beside.is_file() else path
    try:
        mapping = read_document(path)
    except ConfigError as error:
        faults.extend(error.faults)
        return
    inline = data.get("devices") or {}
    kept = {k: v for k, v in origins.items() if k.startswith("devices")}
    merged: dict[str, Any] = {}
    fresh: dict[str, str] = {}
    _merge(merged, mapping.data, (), fresh, mapping, "file")
    origins.update({f"devices.{k}": v for k, v in fresh.items()})
    if isinstance(inline, Mapping):
        _merge(merged, inline, (), {}, mapping, "file")
    origins.update(kept)
    data["devices"] = merged


def _faults(error: ValidationError, origins: Mapping[str, str]) -> list[Fault]:
    """pydantic's findings in the words of a user."""
    out: list[Fault] = []
    for item in error.errors(include_url=False):
        loc = [str(part) for part in item["loc"]]
        dotted = _known_path(loc)
        where = _origin_of(dotted, origins)
        if item["type"] == "extra_forbidden":
            near = nearest(dotted, all_keys())
            fix = f"did you mean {near}?" if near else "remove it"
            out.append(Fault(where=where, found=f"unknown key {dotted}", fix=fix))
        elif item["type"] == "missing":
            out.append(Fault(where="configuration", found=f"{dotted} is not set", fix=f"set it: {dotted}=..."))
        else:
            found = f"{dotted} is {_short(item['input'])}"
            fault = Fault(where=where, found=found, allowed=_allowed(item["msg"]))
            if all(f.where != where or f.found != found for f in out):
                out.append(fault)
    return out


def _known_path(loc: list[str]) -> str:
    """The key path without the names that pydantic adds for the members of a union."""
    kept: list[str] = []
    for part in loc:
        if part in ("str", "int", "bool", "float") or "[" in part:
            continue
        kept.append(part)
    return ".".join(kept)


def _origin_of(dotted: str, origins: Mapping[str, str]) -> str:
    for key, origin in origins.items():
        if key == dotted or key.startswith(f"{dotted}."):
            return origin
    while "." in dotted:
        dotted = dotted.rpartition(".")[0]
        if dotted in origins:
            return origins[dotted]
    return "configuration"


def _allowed(message: str) -> str:
    text = message.removeprefix("Input should be ").removeprefix("Value error, ")
    return text[:1].lower() + text[1:]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def all_keys(model: type[BaseModel] = Profile, prefix: str = "") -> list[str]:
    """Every dotted key of the schema, sections included."""
    out: list[str] = []
    for name, field in model.model_fields.items():
        dotted = f"{prefix}{name}"
        out.append(dotted)
        for kind in _models_in(field.annotation):
            out.extend(all_keys(kind, f"{dotted}."))
    return out


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """Sections that a field holds, directly or optionally; lists of sections are left out (their items have
    numbers).
    """
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if getattr(annotation, "__origin__", None) in (list, dict, tuple):
        return []
    return [m for part in getattr(annotation, "__args__", ()) for m in _models_in(part)]
