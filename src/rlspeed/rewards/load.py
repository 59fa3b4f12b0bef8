"""From the configuration to callables: finding the functions and reading their signatures."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rlspeed.errors import ConfigError, Fault
from rlspeed.rewards.rules import BUILTINS
from rlspeed.rewards.signature import (
    SIGNATURES,
    Kind,
    keyword_names,
    kind_of,
    parameter_faults,
    takes_any_keyword,
    unknown_kwarg,
)
from rlspeed.rewards.types import FunctionSpec
from rlspeed.rewards.values import trace

if TYPE_CHECKING:  # worker processes load functions without the schema
    from rlspeed.config.schema import Reward


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedFunction:
    """A callable and how to call it.

    accepts: the keyword names that it takes; None when it takes any (`**kwargs`).
    """

    spec: FunctionSpec
    function: Callable[..., Any]
    kind: Kind
    is_async: bool
    accepts: frozenset[str] | None

    @property
    def whole_batch(self) -> bool:
        """Called once for all answers of a step, not once for each."""
        return self.kind != "verl"

    def takes(self, name: str) -> bool:
        """The function has a parameter `name`, or takes any."""
        return self.accepts is None or name in self.accepts

    def close(self) -> None:
        """End what a built-in rule keeps running."""
        if self.spec.path.startswith("builtin:") and hasattr(self.function, "close"):
            self.function.close()


def specs_of(cfg: Reward) -> tuple[FunctionSpec, ...]:
    """The configured functions with their names filled in; with neither functions nor a reward model the built-in rule
    of each row's data_source.

    Raises:
        ConfigError: two functions with one name.
    """
    specs = tuple(
        FunctionSpec(
            path=f.path,
            name=f.name or f.path.rsplit(":", 1)[-1],
            weight=f.weight,
            signature=f.signature,
            kwargs=f.kwargs,
            where=f"reward.functions[{i}]",
        )
        for i, f in enumerate(cfg.functions)
    )
    if not specs and cfg.model.path is None:
        specs = (FunctionSpec(path="builtin:data_source", name="data_source", where="reward"),)
    faults = []
    seen: dict[str, FunctionSpec] = {"model": FunctionSpec(path="", name="model", where="reward.model")}
    for spec in specs:
        if spec.name in seen:
            faults.append(
                Fault(
                    where=f"{spec.where}.name",
                    found=f"{spec.name!r}, the name of {seen[spec.name].where} too",
                    fix="give each function its own name; metrics and sums are kept by name",
                )
            )
        seen.setdefault(spec.name, spec)
    if faults:
        raise ConfigError(faults)
    return specs


def load_functions(specs: Sequence[FunctionSpec]) -> list[LoadedFunction]:
    """Load all functions.

    Raises:
        ConfigError: everything that is wrong with any of them: file, module, name, callable, signature, kwargs.
    """
    loaded: list[LoadedFunction] = []
    faults: list[Fault] = []
    for spec in specs:
        try:
            loaded.append(load_function(spec))
        except ConfigError as error:
            faults.extend(error.faults)
    if faults:
        for function in loaded:
            function.close()
        raise ConfigError(faults)
    return loaded


def load_function(spec: FunctionSpec) -> LoadedFunction:
    """Load one function; see `load_functions`."""
    if spec.path.startswith("builtin:"):
        return _load_builtin(spec)
    function = _find(spec)
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        raise ConfigError(
            Fault(where=f"{spec.where}.path", found=f"{spec.path!r} has no readable signature", allowed=SIGNATURES)
        ) from None
    kind = kind_of(spec, parameters)
    faults = parameter_faults(spec, kind, parameters)
    if faults:
        raise ConfigError(faults)
    call = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
    return LoadedFunction(
        spec=spec,
        function=function,
        kind=kind,
        is_async=inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call),
        accepts=None if takes_any_keyword(parameters) else frozenset(keyword_names(parameters)),
    )


def _load_builtin(spec: FunctionSpec) -> LoadedFunction:
    name = spec.path.removeprefix("builtin:")
    if name not in BUILTINS:
        near = difflib.get_close_matches(name, BUILTINS, n=1)
        raise ConfigError(
            Fault(
                where=f"{spec.where}.path",
                found=f"{spec.path!r}: no such built-in rule",
                allowed=", ".join(f"builtin:{n}" for n in sorted(BUILTINS)),
                fix=f"did you mean builtin:{near[0]}?" if near else "",
            )
        )
    make = BUILTINS[name]
    parameters = inspect.signature(make).parameters
    where = f"{spec.where}.kwargs"
    faults = [unknown_kwarg(f"{where}.{key}", key, parameters) for key in spec.kwargs if key not in parameters]
    faults += [
        Fault(where=f"{where}.{key}", found="missing", fix=f"{spec.path} needs it")
        for key, p in parameters.items()
        if p.default is p.empty and key not in spec.kwargs
    ]
    if faults:
        raise ConfigError(faults)
    try:
        rule = make(**spec.kwargs)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            Fault(where=where, found=str(error), fix=f"see the keyword arguments of {spec.path}")
        ) from error
    kind: Kind = "trl" if "completions" in inspect.signature(rule).parameters else "verl"
    accepts = frozenset(inspect.signature(rule).parameters)
    return LoadedFunction(spec=spec, function=rule, kind=kind, is_async=False, accepts=accepts)


def _find(spec: FunctionSpec) -> Callable[..., Any]:
    where = f"{spec.where}.path"
    target, colon, name = spec.path.rpartition(":")
    if not colon or not target or not name:
        raise ConfigError(
            Fault(
                where=where,
                found=repr(spec.path),
                allowed="module:function, file.py:function or builtin:rule",
                fix="put the function's name after a colon",
            )
        )
    is_file = target.endswith(".py") or os.sep in target
    module = _load_file(where, target) if is_file else _load_module(where, target)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
            near = difflib.get_close_matches(part, names, n=1)
            raise ConfigError(
                Fault(
                    where=where,
                    found=f"{target} has no {name!r}",
                    allowed=", ".join(names[:12]),
                    fix=f"did you mean {near[0]}?" if near else "",
                )
            )
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(
            Fault(where=where, found=f"{spec.path!r} is of type {type(found).__name__}", allowed="a function")
        )
    function: Callable[..., Any] = found
    return function


def _load_file(where: str, target: str) -> ModuleType:
    path = Path(target).expanduser().resolve()
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.py")], n=1)
        raise ConfigError(
            Fault(
                where=where,
                found=f"no file {path}",
                allowed="a Python file; a relative path starts at the current directory",
                fix=f"did you mean {near[0]}?" if near else "",
            )
        )
    name = f"rlspeed_reward_{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(Fault(where=where, found=f"{path} is no Python source file", allowed="a .py file"))
    module = importlib.util.module_from_spec(spec)
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.append(folder)  # the file's own neighbours; last, so that they hide nothing
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        raise _import_fault(where, str(path), error) from error
    return module


def _load_module(where: str, target: str) -> ModuleType:
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(target)
    except ModuleNotFoundError as error:
        if error.name is not None and (target == error.name or target.startswith(error.name + ".")):
            raise ConfigError(
                Fault(
                    where=where,
                    found=f"no module {target!r}",
                    allowed="an importable module (the current directory is searched), or a path ending in .py",
                    fix="install it, or give the file's path",
                )
            ) from error
        raise _import_fault(where, target, error) from error
    except BaseException as error:
        raise _import_fault(where, target, error) from error


def _import_fault(where: str, target: str, error: BaseException) -> ConfigError:
    if isinstance(error, KeyboardInterrupt):
        raise error
    return ConfigError(Fault(where=where, found=f"importing {target} failed:\n{trace(error)}"))
