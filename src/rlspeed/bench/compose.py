"""What `rlspeed bench run` runs: a profile's switches over the common work, the same lengths, nothing written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlspeed.bench.record import digest, digest_files
from rlspeed.config.load import LoadedProfile, load_profile, own_words
from rlspeed.config.not_yet import roles_in_use
from rlspeed.config.rules import check
from rlspeed.config.schema import Profile
from rlspeed.data.files import expand
from rlspeed.errors import ConfigError, Fault
from rlspeed.training.lengths import FixedLengths

# nothing but steps: no validation, no checkpoint, no pictures; keys that then have no effect stand at their defaults
QUIET: dict[str, Any] = {
    "data.val_files": None,
    "data.max_val_samples": None,
    "rollout.parity_alarm": "warn",
    "run.epochs": 1,
    "run.resume": False,
    "run.save_every": 0,
    "run.save_last": False,
    "run.save_hf": False,
    "run.validate_every": 0,
    "run.validation_temperature": 0.0,
    "run.validation_n": 1,
    "run.log_rollouts": 0,
    "run.loggers": [],
    "run.plots": False,
    "run.profile_steps": [],
}
# what decides the work of a step, whatever the profile switches on
WORK = (
    "data.prompt_key",
    "data.system_prompt",
    "data.chat_template_kwargs",
    "data.apply_chat_template",
    "data.max_length",
    "data.max_prompt_length",
    "data.overlong",
    "data.batch_size",
    "data.shuffle",
    "rollout.n",
    "rollout.max_new_tokens",
    "rollout.fix_lengths",
    "rollout.overprovision",
    "algorithm.kind",
    "algorithm.epochs",
    "algorithm.mini_batch_size",
    "algorithm.kl.where",
    "run.seed",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A profile ready to be measured. name: as the user wrote it, a file by its stem. switches: what it sets itself."""

    name: str
    profile: Profile
    switches: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Of every value but the run's folder and length, and devices of roles that the run does not have."""
        values = self.profile.model_dump(mode="json")
        values["run"] = {k: v for k, v in values["run"].items() if k not in ("name", "dir", "steps")}
        used = roles_in_use(self.profile)
        values["devices"] = {role: place for role, place in values["devices"].items() if role in used}
        return digest({k: v for k, v in values.items() if k != "name"})

    @property
    def data(self) -> str:
        """Digest of the work: the files' bytes, the model's configuration, and the keys in WORK."""
        files = [f.path for f in expand(self.profile.data.train_files, "data.train_files")]
        return digest([digest_files(files), model_digest(self.profile.model.path), work(self.profile)])


def work(profile: Profile) -> dict[str, Any]:
    """The keys in WORK with their values."""
    return {key: _at(profile.model_dump(mode="json"), key) for key in WORK}


def model_digest(path: str) -> str:
    """Of a directory's config.json; of the name where there is none."""
    file = Path(path) / "config.json"
    return digest_files([file]) if file.is_file() else digest(path)


def compose_all(
    names: Sequence[str], words: Sequence[str], *, on: str | None, lengths: FixedLengths, steps: int, world_size: int
) -> list[Candidate]:
    """One candidate for each name.

    words: `key=value` for all, `NAME:key=value` for the profile NAME alone. on: a profile or file with model, data and
    algorithm, over which each name's own values are laid; None: the names are whole configurations.

    Raises:
        ConfigError: faults of any of them, each with the profile's name; a word for a profile that is not measured.
    """
    out, faults = [], list(_strange(names, words))
    for name in names:
        try:
            out.append(compose(name, words, on=on, lengths=lengths, steps=steps, world_size=world_size))
        except ConfigError as error:
            faults += [
                Fault(where=f"{name}: {f.where}", found=f.found, allowed=f.allowed, fix=f.fix) for f in error.faults
            ]
    if faults:
        raise ConfigError(faults)
    return out


def compose(
    name: str, words: Sequence[str], *, on: str | None, lengths: FixedLengths, steps: int, world_size: int
) -> Candidate:
    """As `compose_all`, for one name."""
    mine = [w for w in (_word_for(name, word) for word in words) if w is not None]
    own = own_words(name)
    loaded = load_profile(name, mine) if on is None else load_profile(on, [*own, *mine])
    faults = check(loaded, world_size)
    if faults:
        raise ConfigError(faults)
    values = loaded.profile.model_dump(mode="json")
    for key, value in {**QUIET, "rollout.fix_lengths": lengths, "run.steps": steps}.items():
        _put(values, key, value)
    if lengths != "none":
        _put(values, "rollout.stop", [])
        _put(values, "rollout.stop_token_ids", [])
    profile = Profile.model_validate(values | {"name": short_name(name)}, strict=False)
    return Candidate(name=short_name(name), profile=profile, switches=tuple(own))


def write_config(candidate: Candidate, folder: Path) -> Path:
    """The YAML file that the measured process reads; its run goes to `folder`/run.

    Raises:
        ConfigError: the file does not say what the candidate is.
    """
    run = candidate.profile.run.model_copy(update={"dir": str(folder / "run")})
    profile = candidate.profile.model_copy(update={"run": run})
    path = folder / "bench.yaml"
    path.write_text(LoadedProfile(profile, {}).dump(), encoding="utf-8")
    if load_profile(str(path)).profile != profile:
        raise ConfigError(Fault(where=str(path), found="the written configuration reads back otherwise"))
    return path


def short_name(name: str) -> str:
    """A file by its stem."""
    return Path(name).stem if name.endswith((".yaml", ".yml")) else name


def _word_for(name: str, word: str) -> str | None:
    """The word without its profile's name; None when it is for another one."""
    target, colon, rest = word.partition(":")
    if not colon or "=" in target:
        return word
    return rest if target in (name, short_name(name)) else None


def _strange(names: Sequence[str], words: Iterable[str]) -> Iterable[Fault]:
    """Words for profiles that are not there, and names that stand twice."""
    known = {n for name in names for n in (name, short_name(name))}
    for word in words:
        target, colon, _ = word.partition(":")
        if colon and "=" not in target and target not in known:
            yield Fault(where=word, found=f"{target} is not measured", allowed=", ".join(names))
    shorts = [short_name(n) for n in names]
    for name in sorted({n for n in shorts if shorts.count(n) > 1}):
        yield Fault(
            where="PROFILE", found=f"{name} stands twice", fix="name each profile once; --repeats measures again"
        )


def _at(values: dict[str, Any], dotted: str) -> Any:
    found: Any = values
    for part in dotted.split("."):
        found = found[part]
    return found


def _put(values: dict[str, Any], dotted: str, value: Any) -> None:
    *above, last = dotted.split(".")
    for part in above:
        values = values[part]
    values[last] = value
