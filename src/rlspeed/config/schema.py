"""The users' YAML as pydantic models: every key, its type, its default and one sentence; defaults live nowhere else.

`Profile` is the root. `docs/reference/config.md` is generated from this file. Unknown keys are errors. Rules that touch
more than one key are in `config/rules.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, Strict

from rlspeed.config.device_schema import DeviceMapping


def _whole(value: Any) -> Any:
    """1e4 is a whole number too; true is none."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


PositiveInt = Annotated[int, BeforeValidator(_whole), Field(ge=1)]
NonNegativeInt = Annotated[int, BeforeValidator(_whole), Field(ge=0)]
NonNegativeFloat = Annotated[float, Field(ge=0.0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


LossAgg = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


class Section(BaseModel):
    """Base of all sections: unknown keys are refused, types are not guessed, values are frozen after validation."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )


class ActorModel(Section):
    """The policy that is trained."""

    use_3d_hybrid_engine: bool = True
    """One set of actor weights, resharded between generation and training; false: a second full copy."""
    use_lightweight_sharding_for_generation: bool = True
    """Generation holds inference weights only; gradients and optimizer state are freed or offloaded meanwhile."""
    enable_auto_repartition_for_training: bool = True
    """Back to the training layout without a call in user code."""
    sync_bucket_mb: PositiveInt = 256
    """MiB of one flat buffer in which weights travel between ranks; two to send, two to receive."""
    verify_sync: Literal["none", "checksum"] = "none"
    """checksum: both ends of each transfer sum the bits of every piece, and the run stops where they differ."""
    use_vllm_for_generation: bool = False
    """true: vLLM generates; false: the built-in generator."""


class CriticModel(Section):
    """The value model of PPO."""

    path: str | None = None
    """Directory or hub name of the critic's backbone; null: the actor's starting model."""


class ReferenceModel(Section):
    """The frozen policy of the KL term."""

    path: str | None = None
    """Directory or hub name; null: the actor's starting model."""


class Model(Section):
    """Which models, in which precision, packed or padded."""

    path: str
    """A hub name or a directory; `quickstart` is the small model that ships in the package."""
    model_dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Precision of the whole pipeline; auto picks by what the device can do and prints why."""
    use_remove_padding: bool = True
    """Packed sequences, no padding token computed; false: padded batches, for comparison."""
    shared_prefixes: bool = False
    """Store and compute each prompt once for all its answers in a bin; pays with long prompts and rollout.n above 1."""
    attention: Literal["auto", "sdpa", "varlen", "flash2", "flash4"] = "auto"
    """Attention over packed sequences; auto picks by device and installed kernels and prints why."""
    activation_checkpointing: bool | Literal["auto"] = False
    """Recompute blocks in the backward pass, up to a third more time; auto: as few as the device's memory asks for."""
    compile: bool = False
    """torch.compile each block of actor and critic: a faster update on GPUs after about a minute of compiling."""
    trust_remote_code: bool = False
    """Let a model directory run its own Python code."""
    actor: ActorModel = ActorModel()
    critic: CriticModel = CriticModel()
    reference: ReferenceModel = ReferenceModel()


class Data(Section):
    """Prompts: files, columns, lengths, order."""

    train_files: str | list[str]
    """Parquet or JSONL: a file, a list of files, a directory or a glob; `quickstart:train` ships in the package."""
    val_files: str | list[str] | None = None
    """Held-out prompts for validation, the same formats."""
    prompt_key: str = "prompt"
    """Column with the prompt: a string or a list of {role, content} messages."""
    system_prompt: str | None = None
    """Put as a system message before message lists that have none."""
    chat_template_kwargs: dict[str, JsonValue] = {}
    """Further arguments for the tokenizer's chat template."""
    apply_chat_template: Literal["auto", "always", "never"] = "auto"
    """auto: message lists only; always: strings too, as one user message; never: strings only, as they are."""
    max_length: PositiveInt = 1536
    """Prompt and response together, in tokens; the P95 of the data is a good value."""
    max_prompt_length: PositiveInt | None = None
    """Longest prompt in tokens; null: max_length minus rollout.max_new_tokens."""
    overlong: Literal["error", "drop", "truncate_left"] = "error"
    """A prompt that is too long: error names the rows; drop counts them; truncate_left keeps its end."""
    batch_size: PositiveInt = 32
    """Prompts in one training step, over all ranks."""
    shuffle: bool = True
    """A new order in every epoch, drawn from run.seed."""
    balance_dp_token: bool = True
    """Even work per data-parallel rank (sequences are dealt by cost); false: sequences stay in order."""
    max_val_samples: PositiveInt | None = None
    """Use only the first so many validation rows."""


class Rollout(Section):
    """How answers are generated."""

    n: PositiveInt = 1
    """Answers to each prompt; GRPO, Dr.GRPO, RLOO and the REINFORCE++ baseline need at least 2."""
    max_new_tokens: PositiveInt = 512
    """Longest answer in tokens."""
    temperature: NonNegativeFloat = 1.0
    """Sampling temperature; training uses the same one when it recomputes log-probs."""
    top_k: NonNegativeInt = 0
    """Keep the k most likely tokens; 0: all."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Keep the smallest set of tokens with this probability; 1: all."""
    min_p: Fraction = 0.0
    """Drop tokens less likely than this share of the likeliest; 0: none."""
    stop: list[str] = []
    """Strings that end an answer."""
    stop_token_ids: list[int] = []
    """Token ids that end an answer, beside the model's own end tokens."""
    fix_lengths: Literal["none", "whole", "uniform", "long_tail"] = "none"
    """For benchmarks: in training no token ends an answer, its length is drawn from run.seed, step, row and number, not
    from the weights. whole: max_new_tokens; uniform: 1 to that; long_tail: log-normal, median a sixth of it."""
    max_concurrent: PositiveInt = 256
    """Most sequences in flight in the built-in generator, per rank."""
    kv_cache_gib: PositiveFloat | None = None
    """Key-value cache of the built-in generator, per rank; sequences wait or are computed again when it is full. null:
    what the requests can need, within 85 % of the GPU's free memory."""
    longest_first: bool = False
    """Start prompts first whose answers were long the last time, when more wait than run at once: a shorter tail. The
    order is not part of a checkpoint, so a resumed run may round differently."""
    overprovision: Annotated[float, Field(ge=1.0, le=4.0)] = 1.0
    """Ask for so many times data.batch_size prompts and go on when data.batch_size of them have all their answers; the
    rest is dropped. A shorter tail, but prompts with long answers train less often. 1: off."""
    correction: Literal["none", "token_tis", "sequence_tis", "token_mask", "sequence_mask"] = "none"
    """Correct the gap between generator and trainer log-probs: truncated importance weights, or masks."""
    correction_threshold: PositiveFloat = 2.0
    """Upper end of the weights of `correction`."""
    correction_lower: NonNegativeFloat = 0.5
    """Lower end of the band of the mask corrections."""
    one_step_off: bool = False
    """Generate the next step's answers before this step's update, with weights that are one update old when the answers
    train: the critic is updated meanwhile on devices of its own. Needs a correction."""
    parity_tolerance: PositiveFloat = 0.05
    """Largest mean |log-prob difference| between generator and trainer that start-up and each step accept."""
    parity_alarm: Literal["stop", "warn"] = "stop"
    """What a larger difference in a step does: end the run, or say so and go on (start-up always ends it)."""


class KL(Section):
    """Distance to the reference policy."""

    where: Literal["none", "reward", "loss"] = "none"
    """none: no reference model at all; reward: a per-token penalty in the reward; loss: a term of the loss."""
    coef: NonNegativeFloat = 0.001
    """Weight of the term (the starting value with the adaptive controller)."""
    estimator: Literal["k1", "abs", "k2", "k3"] = "k3"
    """k1 = difference, k2 = half its square, k3 = the unbiased low-variance one (Schulman 2020)."""
    controller: Literal["fixed", "adaptive"] = "fixed"
    """adaptive moves coef towards `target` (Ziegler 2019); needs where: reward."""
    target: PositiveFloat = 0.1
    """KL that the adaptive controller aims at, nats per token."""
    horizon: PositiveInt = 10000
    """Time scale of the adaptive controller, in sequences."""


class OverlongPenalty(Section):
    """DAPO's soft penalty for answers that run into the length limit."""

    buffer: NonNegativeInt = 0
    """Tokens before the limit in which the penalty grows from 0 to `factor`; 0: off."""
    factor: NonNegativeFloat = 1.0
    """Penalty at the limit."""


class Algorithm(Section):
    """What is learned from the answers."""

    kind: Literal["ppo", "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"] = "ppo"
    """The estimator of the advantages; ppo trains a critic."""
    gamma: Fraction = 1.0
    """Discount per token (ppo, reinforce_pp)."""
    lam: Fraction = 1.0
    """GAE's lambda (ppo)."""
    whiten_advantages: bool | None = None
    """Mean 0, variance 1 over the step's tokens; null: on for ppo and reinforce_pp*, off for the others."""
    policy_loss: Literal["clip", "gspo", "cispo"] = "clip"
    """PPO's clipped ratio per token, GSPO's per sequence, or CISPO's clipped weight."""
    clip_low: NonNegativeFloat = 0.2
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: NonNegativeFloat | None = None
    """The ratio is clipped above at 1 + clip_high (DAPO's clip-higher); null: as clip_low."""
    dual_clip: Annotated[float, Field(gt=1.0)] | None = None
    """Upper bound c of the loss for negative advantages (dual clip); null: off."""
    value_clip: PositiveFloat | None = 0.5
    """New values stay within this distance of the old ones in the value loss; null: off."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    loss_agg: LossAgg = "token-mean"
    """How token losses become one number; dr_grpo is usually run with seq-mean-token-sum-norm."""
    loss_norm_scale: PositiveInt | None = None
    """Scale of seq-mean-token-sum-norm; null: rollout.max_new_tokens."""
    epochs: PositiveInt = 1
    """Passes over each step's answers."""
    mini_batch_size: PositiveInt | None = None
    """Prompts per optimizer step; null: the whole step (one update)."""
    critic_warmup_steps: NonNegativeInt = 0
    """First steps in which only the critic learns."""
    kl: KL = KL()
    overlong_penalty: OverlongPenalty = OverlongPenalty()
    filter_groups: bool = False
    """DAPO: prompts whose answers all got the same reward are left out of numerator and denominator."""


class RewardFunction(Section):
    """One reward function."""

    path: str
    """`module:function`, `file.py:function`, or `builtin:NAME`: exact_number, regex, format, length, math, gsm8k."""
    weight: float = 1.0
    """Weight in the sum of rewards."""
    name: str | None = None
    """Name in metrics; null: the function's."""
    signature: Literal["auto", "verl", "trl", "openrlhf"] = "auto"
    """How it is called; auto decides by the names of its arguments."""
    kwargs: dict[str, JsonValue] = {}
    """Further keyword arguments for each call."""


class RewardModel(Section):
    """A Hugging Face sequence-classification model as reward."""

    path: str | None = None
    """Directory or hub name; null: none."""
    weight: float = 1.0
    """Weight in the sum of rewards."""
    use_chat_template: bool = True
    """Score the whole conversation through the reward model's own chat template; false: prompt text + answer text."""


class Reward(Section):
    """How answers are scored."""

    functions: list[RewardFunction] = []
    """Their weighted sum is the reward; with none and no reward model the built-in rule of the row's data_source."""
    model: RewardModel = RewardModel()
    timeout_seconds: PositiveFloat = 60.0
    """Longest time for one call of a function."""
    workers: NonNegativeInt = 0
    """Worker processes for the functions, per rank; 0: in the training process (in a thread)."""
    on_failure: Literal["stop", "mask"] = "stop"
    """What to do when a function raises, times out or returns NaN: stop with the sample named, or mask and count it."""
    max_failed_share: Fraction = 0.25
    """With on_failure: mask, stop when more than this share of a step's samples failed."""


class Optimizer(Section):
    """AdamW of one model, always on fp32 weights."""

    kind: Literal["adamw", "adamw8bit", "adamw_offload"] = "adamw"
    """adamw8bit: moments in 8 bits (needs torchao); adamw_offload: fp32 weights and moments in host memory."""
    lr: PositiveFloat = 1e-6
    """Learning rate after warm-up."""
    betas: Annotated[tuple[Beta, Beta], Strict(False)] = (0.9, 0.999)
    """Adam's averaging factors."""
    eps: PositiveFloat = 1e-8
    """Adam's epsilon."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay; not applied to norms and biases."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps of linear warm-up."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Course of the learning rate after warm-up, to min_lr_ratio at the last step."""
    min_lr_ratio: Fraction = 0.0
    """Last learning rate as a share of lr."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Gradients are clipped to this norm; null: not clipped."""


class Optim(Section):
    """Optimizers of actor and critic."""

    actor: Optimizer = Optimizer()
    critic: Optimizer = Optimizer(lr=1e-5)


class Packing(Section):
    """Bins of tokens, the micro-batches of packed training."""

    capacity: PositiveInt | None = None
    """Tokens per bin and rank; null: the larger of 4,096 and data.max_length."""
    micro_batch_size: PositiveInt = 8
    """Sequences per micro-batch when use_remove_padding is false."""


class Run(Section):
    """One run: its folder, its length, its life."""

    name: str | None = None
    """Name of the run; null: the profile's or the file's."""
    dir: str | None = None
    """Run folder; null: runs/NAME-DATE-TIME."""
    device: Literal["auto", "cpu"] = "auto"
    """cpu: ranks on the host stand in for the positions of the device mapping, also where there are GPUs."""
    steps: PositiveInt | None = None
    """Training steps; null: from epochs."""
    epochs: PositiveInt = 1
    """Passes over the training prompts, when steps is null."""
    seed: NonNegativeInt = 0
    """Seed of everything that is drawn."""
    resume: bool = False
    """Go on from the last complete checkpoint of run.dir."""
    save_every: NonNegativeInt = 0
    """Steps between checkpoints; 0: only at the end and on SIGTERM."""
    keep_checkpoints: PositiveInt = 2
    """How many of the last checkpoints stay."""
    save_last: bool = True
    """Write a checkpoint when the run ends; false: of a benchmark nothing is kept but its numbers."""
    save_hf: bool = True
    """Write a Hugging Face directory of the actor at the end."""
    validate_every: NonNegativeInt = 0
    """Steps between validations; 0: at the start and at the end only."""
    validation_temperature: NonNegativeFloat = 0.0
    """Sampling temperature in validation; 0: greedy."""
    validation_n: PositiveInt = 1
    """Answers to each validation prompt."""
    log_rollouts: NonNegativeInt = 8
    """Answers per step written to rollouts/STEP.jsonl."""
    loggers: list[Literal["tensorboard", "wandb"]] = []
    """Further loggers beside metrics.jsonl."""
    plots: bool = True
    """Write PNG plots at the end."""
    profile_steps: list[PositiveInt] = []
    """Training steps to trace: profile/ gets a file for Perfetto and a picture of each; --profile-steps 3,5."""
    startup_checks: bool = True
    """Check packed = one by one and generator = trainer on a few tokens before the first step."""
    hang_timeout_seconds: NonNegativeFloat = 600.0
    """When ranks wait and none has moved for so long, the run ends, and phase and missing ranks are named. 0: off."""


class Profile(Section):
    """A whole run."""

    name: str = "run"
    """Name of the profile."""
    model: Model
    data: Data
    rollout: Rollout = Rollout()
    algorithm: Algorithm = Algorithm()
    reward: Reward = Reward()
    optim: Optim = Optim()
    packing: Packing = Packing()
    run: Run = Run()
    device_mapping_file: str | None = None
    """YAML file with the devices of each role; its content may also stand inline under `devices`."""
    devices: DeviceMapping = DeviceMapping()
    """Devices of each role; empty: all roles on all ranks."""
