"""One form of benchmark record: what was measured, on what machine, with which versions, of which state of the code.

A record is a JSON object. Files of before this form (schema 1, each benchmark with keys of its own) are read as they
are, under `Record.extra`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rlspeed.data.atomic import write_text
from rlspeed.errors import DataError, Fault
from rlspeed.planning.probe import probe_machine

SCHEMA = 2
COMMIT_VARIABLE = "RLSPEED_COMMIT"
PACKAGES = ("torch", "transformers", "rlspeed")
ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """Repeats of one measured number, in the order in which they were taken.

    unit: "" for a plain number. samples: at least one, all finite.
    """

    unit: str
    samples: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.samples or not all(math.isfinite(s) for s in self.samples):
            raise ValueError("a value needs at least one sample, all finite")

    def as_json(self) -> dict[str, Any]:
        """n, min, median, max and (from two samples on) the sample standard deviation, beside the samples."""
        spread = statistics.stdev(self.samples) if len(self.samples) > 1 else None
        return {
            "unit": self.unit,
            "n": len(self.samples),
            "min": min(self.samples),
            "median": statistics.median(self.samples),
            "max": max(self.samples),
            "stdev": spread,
            "samples": list(self.samples),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One benchmark's result.

    machine, versions: as `describe_machine` and `describe_versions` give them. profile, data: digests (`digest`) of
    what ran and of what it ran on; None where there is none. extra: what belongs to this benchmark alone.
    """

    name: str
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    commit: str
    dirty: bool | None
    profile: str | None = None
    data: str | None = None
    values: Mapping[str, Value] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    schema: int = SCHEMA

    def as_json(self) -> dict[str, Any]:
        """The object that the file holds."""
        return {
            "schema": self.schema,
            "name": self.name,
            "commit": self.commit,
            "dirty": self.dirty,
            "machine": dict(self.machine),
            "versions": dict(self.versions),
            "profile": self.profile,
            "data": self.data,
            "values": {name: value.as_json() for name, value in self.values.items()},
            "extra": dict(self.extra),
        }


def new_record(
    name: str,
    values: Mapping[str, Value],
    *,
    profile: str | None = None,
    data: str | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Record:
    """A record of a measurement made here and now."""
    commit, dirty = code_state()
    return Record(
        name=name,
        machine=describe_machine(),
        versions=describe_versions(),
        commit=commit,
        dirty=dirty,
        profile=profile,
        data=data,
        values=values,
        extra=extra or {},
    )


def unplaced_record(name: str, values: Mapping[str, Value], extra: Mapping[str, Any]) -> Record:
    """A record made from a log, which does not say where and from what state of the code it comes."""
    machine: dict[str, Any] = {"cpu": "unknown", "cores": None, "host_memory_bytes": None, "gpus": []}
    return Record(name=name, machine=machine, versions={}, commit="unknown", dirty=None, values=values, extra=extra)


def environment(name: str, packages: Iterable[str] = PACKAGES) -> dict[str, Any]:
    """The head of a record whose results have a form of their own: schema, name, commit, machine and versions."""
    commit, dirty = code_state()
    return {
        "schema": SCHEMA,
        "name": name,
        "commit": commit,
        "dirty": dirty,
        "machine": describe_machine(),
        "versions": describe_versions(packages),
    }


def code_state(root: Path = ROOT) -> tuple[str, bool | None]:
    """(commit, whether tracked files differ from it) of the checkout at `root`.

    The variable RLSPEED_COMMIT stands in where there is no history (a copy on another machine); a "+" at its end says
    dirty. Without either: ("unknown", None). Records themselves do not count: a benchmark may have written one before.
    """
    given = os.environ.get(COMMIT_VARIABLE, "").strip()
    if given:
        return given.rstrip("+"), given.endswith("+")
    commit = _git(root, "rev-parse", "HEAD")
    if not commit:
        return "unknown", None
    return commit, bool(_git(root, "status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/records"))


def _git(root: Path, *words: str) -> str:
    """What git prints; empty where it cannot answer."""
    command = ["git", "-c", "safe.directory=*", "-C", str(root), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def describe_machine() -> dict[str, Any]:
    """CPU model, cores that this process may use, memory of the host, and name and memory of each visible GPU."""
    found = probe_machine()
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "host_memory_bytes": found.host_memory_bytes,
        "gpus": [{"name": d.name, "memory_bytes": d.memory_bytes} for d in found.devices],
    }


def _cpu_model() -> str:
    """As Linux names it; the architecture where it does not."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def describe_versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Python, the packages that are installed, and the CUDA that torch was built for."""
    out = {"python": platform.python_version()}
    for name in packages:
        try:
            out[name] = version(name)
        except PackageNotFoundError:
            continue
    if "torch" in out:
        import torch

        if torch.version.cuda:
            out["cuda"] = torch.version.cuda
    return out


def digest(value: Any) -> str:
    """First 16 hex digits of SHA-256 over `value` as JSON with sorted keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def digest_files(paths: Sequence[Path]) -> str:
    """First 16 hex digits of SHA-256 over the contents of the files, in this order."""
    total = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()[:16]


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object, whole or not at all; its folder is made.

    Raises:
        DataError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(content, indent=1) + "\n")


def write_record(path: Path, record: Record) -> None:
    """Write a record, whole or not at all.

    Raises:
        DataError: it cannot be written.
    """
    write_json(path, record.as_json())


def read_record(path: Path) -> Record:
    """Read a record of any schema up to this one.

    Raises:
        DataError: the file is not there, is not JSON, or is of a later schema.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(Fault(where=str(path), found=f"cannot be read: {error}")) from error
    if not isinstance(content, dict):
        raise DataError(Fault(where=str(path), found="not a JSON object", allowed="a benchmark record"))
    schema = content.get("schema", 1)
    if not isinstance(schema, int) or schema > SCHEMA:
        found, fix = f"schema {schema!r}", "read it with the rlspeed that wrote it, or a newer one"
        raise DataError(Fault(where=str(path), found=found, allowed=f"at most {SCHEMA}", fix=fix))
    try:
        return _parse(content) if "values" in content else _headed(content, path)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(Fault(where=str(path), found=f"not a benchmark record: {error!r}")) from error


def _parse(content: Mapping[str, Any]) -> Record:
    """A record of the present form."""
    values = {n: Value(unit=v["unit"], samples=tuple(v["samples"])) for n, v in content["values"].items()}
    keys = ("schema", "name", "commit", "dirty", "machine", "versions", "profile", "data", "extra")
    return Record(values=values, **{k: content[k] for k in keys})


def _headed(content: Mapping[str, Any], path: Path) -> Record:
    """A record whose results have a form of their own: of schema 1, or made by `environment`."""
    head = {"schema", "name", "benchmark", "commit", "dirty", "machine", "device", "versions"}
    machine = content.get("machine") or {"gpus": [], "cpu": content.get("device", "unknown")}
    versions = content.get("versions") or {}
    return Record(
        name=str(content.get("name") or content.get("benchmark") or path.stem),
        machine=machine,
        versions=versions,
        commit=str(content.get("commit") or versions.get("commit") or "unknown"),
        dirty=content.get("dirty"),
        extra={k: v for k, v in content.items() if k not in head},
        schema=int(content.get("schema", 1)),
    )
