"""How a reward function wants to be called, read from the names of its arguments."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping
from typing import Literal

from rlspeed.errors import ConfigError, Fault
from rlspeed.rewards.types import FunctionSpec

Kind = Literal["verl", "verl_batch", "trl", "openrlhf"]
Parameters = Mapping[str, inspect.Parameter]

STANDARD: dict[Kind, tuple[str, ...]] = {
    "verl": ("data_source", "solution_str", "ground_truth", "extra_info"),
    "verl_batch": ("data_sources", "solution_strs", "ground_truths", "extra_infos"),
    "trl": ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"),
    "openrlhf": ("queries", "prompts", "labels"),
}
ANSWERS: dict[Kind, str] = {"verl": "solution_str", "verl_batch": "solution_strs", "trl": "completions"}
SIGNATURES = (
    "verl: compute_score(data_source, solution_str, ground_truth, extra_info=None); "
    "verl batch: compute_score(data_sources, solution_strs, ground_truths, extra_infos); "
    "TRL: f(prompts, completions, **columns); OpenRLHF: reward_func(queries, prompts, labels)"
)


def kind_of(spec: FunctionSpec, parameters: Parameters) -> Kind:
    """The signature asked for, or the one that the argument names tell.

    Raises:
        ConfigError: the names tell none, or two.
    """
    if spec.signature == "verl":
        return "verl_batch" if "solution_strs" in parameters else "verl"
    if spec.signature == "trl":
        return "trl"
    if spec.signature == "openrlhf":
        return "openrlhf"
    marks: list[Kind] = [kind for kind, name in ANSWERS.items() if name in parameters]
    if not marks and "queries" in parameters:
        return "openrlhf"
    if len(marks) == 1:
        return marks[0]
    names = ", ".join(ANSWERS[kind] for kind in marks)
    what = f"arguments of two signatures ({names})" if marks else "a signature that is not recognised"
    raise ConfigError(
        Fault(
            where=f"{spec.where}.path",
            found=f"{what}: {shown(spec, parameters)}",
            allowed=SIGNATURES,
            fix="rename the arguments, or set signature: verl, trl or openrlhf",
        )
    )


def shown(spec: FunctionSpec, parameters: Parameters) -> str:
    """The function's head as its author wrote it."""
    return f"{spec.path.rsplit(':', 1)[-1]}({', '.join(str(p) for p in parameters.values())})"


def keyword_names(parameters: Parameters) -> list[str]:
    """Arguments that can be given by name."""
    return [n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def takes_any_keyword(parameters: Parameters) -> bool:
    """Whether there is a `**kwargs`."""
    return any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def parameter_faults(spec: FunctionSpec, kind: Kind, parameters: Parameters) -> list[Fault]:
    """Arguments that the function needs and nothing gives, and configured kwargs that it does not take."""
    names, any_keyword = keyword_names(parameters), takes_any_keyword(parameters)
    faults = []
    if not any_keyword:
        faults += [unknown_kwarg(f"{spec.where}.kwargs.{k}", k, names) for k in spec.kwargs if k not in names]
    if kind == "openrlhf":
        return faults or _positional_faults(spec, parameters)
    where, head = f"{spec.where}.path", shown(spec, parameters)
    faults += [
        Fault(where=where, found=f"{head}: {name!r} is positional-only", allowed="arguments given by name")
        for name, p in parameters.items()
        if p.kind is p.POSITIONAL_ONLY and p.default is p.empty
    ]
    if ANSWERS[kind] not in names and not any_keyword:
        faults.append(Fault(where=where, found=f"{head} does not take {ANSWERS[kind]!r}", allowed=SIGNATURES))
    if kind == "trl":  # further arguments are columns, known only with the data
        return faults
    given = {*STANDARD[kind], *spec.kwargs}
    faults += [
        Fault(
            where=where,
            found=f"{head} needs {name!r}, which nothing gives",
            allowed=", ".join(STANDARD[kind]),
            fix=f"give it a default, or set {spec.where}.kwargs.{name}",
        )
        for name in names
        if parameters[name].default is inspect.Parameter.empty and name not in given
    ]
    return faults


def unknown_kwarg(where: str, key: str, names: Iterable[str]) -> Fault:
    """A configured keyword argument that the function does not take."""
    names = list(names)
    near = difflib.get_close_matches(key, names, n=1)
    return Fault(
        where=where,
        found="the function does not take this argument",
        allowed=", ".join(names),
        fix=f"did you mean {near[0]}?" if near else "",
    )


def _positional_faults(spec: FunctionSpec, parameters: Parameters) -> list[Fault]:
    """OpenRLHF calls with three arguments by position."""
    try:
        inspect.Signature(list(parameters.values())).bind(None, None, None, **spec.kwargs)
    except TypeError as error:
        found = f"{shown(spec, parameters)} cannot be called with three arguments by position: {error}"
        return [Fault(where=f"{spec.where}.path", found=found, allowed=", ".join(STANDARD["openrlhf"]))]
    return []
