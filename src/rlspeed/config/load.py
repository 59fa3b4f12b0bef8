"""YAML files and key.path=value words to a Profile, with the origin of every value and all faults in one error.

Layers, later ones win: defaults of the schema, a packaged profile, the user's file, overrides. The device mapping file
lies below what the user's file or an override says under `devices`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rlspeed.config.device_schema import DeviceMapping
from rlspeed.config.findings import faults_of
from rlspeed.config.layers import KeyPath, Label, Origins, leaves, merge
from rlspeed.config.names import nearest
from rlspeed.config.overrides import OVERRIDE, apply_overrides
from rlspeed.config.schema import Profile
from rlspeed.config.yaml_lines import Document, dump_yaml, is_file, read_document
from rlspeed.errors import ConfigError, Fault

RESOLVED = "resolved.yaml"
BASE_KEY = "profile"
MAPPING_KEY = "device_mapping_file"


@dataclass(frozen=True, slots=True)
class LoadedProfile:
    """A validated run and where each of its values comes from (`default`, `profile NAME`, `FILE:LINE`, `override`)."""

    profile: Profile
    origins: Mapping[str, str]

    def dump(self) -> str:
        """YAML that loads back equal, the device mapping inside."""
        data = self.profile.model_dump(mode="json")
        return dump_yaml(data)

    def leaves(self) -> Iterator[tuple[str, Any, str]]:
        """(dotted key, value, origin) of every value, in schema order."""
        for key, value in leaves(self.profile.model_dump(mode="json"), ()):
            yield ".".join(key), value, self.origin(".".join(key))

    def origin(self, dotted: str) -> str:
        """Where the value of `dotted` comes from; several places when items of a list were set one by one."""
        origins = Origins(self.origins)
        below = [o for k, o in origins.items() if k.startswith(f"{dotted}.")]
        own = [origins.of_value(dotted)] if dotted in origins or not below else []
        return ", ".join(dict.fromkeys([*own, *below]))

    def where(self, dotted: str) -> str:
        """The one place to look at for a fault of `dotted`."""
        return Origins(self.origins).where(dotted)


def packaged_profiles() -> list[str]:
    """Names of the profiles that ship in the package."""
    folder = resources.files("rlspeed.profiles")
    return sorted(p.name.removesuffix(".yaml") for p in folder.iterdir() if p.name.endswith(".yaml"))


def run_folder(name: str) -> Path | None:
    """The run folder that `name` means: one with a resolved.yaml; a bare profile's name means the profile."""
    if name in packaged_profiles():
        return None
    path = Path(name)
    return path if is_file(path / RESOLVED) else None


def load_profile(name_or_file: str, overrides: Sequence[str] = ()) -> LoadedProfile:
    """Load a packaged profile, a YAML file, or the resolved.yaml of a run folder, with overrides on top.

    `profile: NAME` in the file, or `profile=NAME` as a word, puts a packaged profile below it.

    Raises:
        ConfigError: every fault of every file and word.
    """
    faults: list[Fault] = []
    data: dict[str, Any] = {}
    origins = Origins()
    document, label = _main_document(name_or_file, faults)
    base: tuple[Any, str] = (document.data.pop(BASE_KEY, None), label((BASE_KEY,)))
    words = [w for w in overrides if not w.startswith(f"{BASE_KEY}=")]
    for word in overrides:
        if word.startswith(f"{BASE_KEY}="):
            base = (word.partition("=")[2], OVERRIDE)
    _lay_base(*base, data, origins, faults)
    merge(data, document.data, (), origins, label)
    faults.extend(apply_overrides(words, data, origins))
    _device_mapping(data, origins, document, faults)
    data.setdefault("name", document.name)
    try:
        profile = Profile.model_validate(data)
    except ValidationError as error:
        # a file that cannot be read may hold what seems to be missing
        faults.extend(faults_of(error, data, origins.where, tell_missing=document.readable))
    if faults:
        raise ConfigError(faults)
    return LoadedProfile(profile, origins)


def own_words(name_or_file: str) -> list[str]:
    """What a packaged profile or a file sets itself, as key.path=value words that lay it over another configuration.

    Raises:
        ConfigError: it cannot be found or read.
    """
    faults: list[Fault] = []
    document, _ = _main_document(name_or_file, faults)
    if faults:
        raise ConfigError(faults)
    return list(_words(document.data, ()))


def _words(value: Any, key: KeyPath) -> Iterator[str]:
    """Lists are one value, as they replace what was there."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _words(inner, (*key, str(name)))
    else:
        yield f"{'.'.join(key)}={json.dumps(value)}"


def load_device_mapping(file: str | Path) -> DeviceMapping:
    """Load a device mapping on its own, without a run.

    Raises:
        ConfigError: every fault of the file.
    """
    faults: list[Fault] = []
    document = read_document(Path(file), faults)
    data: dict[str, Any] = {"model": {"path": "-"}, "data": {"train_files": "-"}, "devices": {}}
    origins = Origins()
    merge(data, {"devices": document.data}, (), origins, _without_first(document))
    try:
        devices = Profile.model_validate(data).devices
    except ValidationError as error:
        faults.extend(faults_of(error, data, origins.where))
    if faults:
        raise ConfigError(faults)
    return devices


def _main_document(name: str, faults: list[Fault]) -> tuple[Document, Label]:
    """The file or packaged profile that `name` means, and how to name places in it."""
    folder = run_folder(name)
    path = folder / RESOLVED if folder is not None else Path(name)
    if is_file(path):
        document = read_document(path, faults)
        return document, document.where
    names = packaged_profiles()
    if name in names:
        return _packaged(name, faults), lambda _: f"profile {name}"
    near = nearest(name, names)
    raise ConfigError(
        Fault(
            where="configuration",
            found=f"{name!r} is no file, no run folder and no profile",
            allowed=f"a YAML file, a run folder, or one of {', '.join(names)}",
            fix=f"did you mean {near}?" if near else "check the path",
        )
    )


def _lay_base(name: Any, where: str, data: dict[str, Any], origins: Origins, faults: list[Fault]) -> None:
    """Lay the packaged profile that the user's file builds on, if it names one."""
    names = packaged_profiles()
    if name in names:
        merge(data, _packaged(name, faults).data, (), origins, lambda _: f"profile {name}")
    elif name is not None:
        near = nearest(name, names) if isinstance(name, str) else None
        fix = f"did you mean {near}?" if near else ""
        faults.append(Fault(where=where, found=f"{BASE_KEY} is {name!r}", allowed=", ".join(names), fix=fix))


def _packaged(name: str, faults: list[Fault]) -> Document:
    with resources.as_file(resources.files("rlspeed.profiles") / f"{name}.yaml") as path:
        return read_document(path, faults)


def _device_mapping(data: dict[str, Any], origins: Origins, document: Document, faults: list[Fault]) -> None:
    """Move the content of device_mapping_file into `devices`, below what stands there.

    The key itself is emptied then: the run's own record holds the devices and needs no second file.
    """
    name = data.get(MAPPING_KEY)
    if not isinstance(name, str):
        return
    path = Path(name)
    beside = document.path.parent / name
    if not is_file(path) and not is_file(beside):
        places = dict.fromkeys((os.getcwd(), str(document.path.resolve().parent)))
        fault = Fault(
            where=origins.where(MAPPING_KEY),
            found=f"{MAPPING_KEY} is {name!r}, which is not there",
            allowed=f"a YAML file, relative to {' or '.join(places)}",
        )
        faults.append(fault)
        return
    mapping = read_document(path if is_file(path) else beside, faults)
    inline, inline_origins = data.pop("devices", None), Origins(origins)
    origins.forget(("devices",))
    merge(data, {"devices": mapping.data}, (), origins, _without_first(mapping))
    if isinstance(inline, Mapping):
        merge(data, {"devices": inline}, (), origins, lambda key: inline_origins.where(".".join(key)))
    elif inline is not None:
        data["devices"] = inline
    data[MAPPING_KEY] = None
    origins[MAPPING_KEY] = f"{mapping.path}, read into devices"


def _without_first(document: Document) -> Label:
    """Places in a document whose content stands one level deeper in the profile."""

    def label(key: KeyPath) -> str:
        return document.where(key[1:])

    return label
