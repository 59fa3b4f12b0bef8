"""The nearest known name: spelling, and what other trainers call the same thing."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# last part of a key as verl, TRL and OpenRLHF users write it, to ours
FOREIGN = {
    "num_generations": "rollout.n",
    "n_samples_per_prompt": "rollout.n",
    "max_completion_length": "rollout.max_new_tokens",
    "max_response_length": "rollout.max_new_tokens",
    "generate_max_len": "rollout.max_new_tokens",
    "response_length": "rollout.max_new_tokens",
    "max_tokens": "rollout.max_new_tokens",
    "learning_rate": "optim.actor.lr",
    "actor_learning_rate": "optim.actor.lr",
    "critic_learning_rate": "optim.critic.lr",
    "beta": "algorithm.kl.coef",
    "kl_loss_coef": "algorithm.kl.coef",
    "init_kl_coef": "algorithm.kl.coef",
    "kl_coef": "algorithm.kl.coef",
    "kl_loss_type": "algorithm.kl.estimator",
    "kl_penalty": "algorithm.kl.estimator",
    "kl_estimator": "algorithm.kl.estimator",
    "use_kl_loss": "algorithm.kl.where",
    "use_kl_in_reward": "algorithm.kl.where",
    "adv_estimator": "algorithm.kind",
    "estimator": "algorithm.kind",
    "advantage_estimator": "algorithm.kind",
    "epsilon": "algorithm.clip_low",
    "clip_ratio": "algorithm.clip_low",
    "clip_ratio_low": "algorithm.clip_low",
    "eps_clip": "algorithm.clip_low",
    "epsilon_high": "algorithm.clip_high",
    "clip_ratio_high": "algorithm.clip_high",
    "clip_ratio_c": "algorithm.dual_clip",
    "cliprange_value": "algorithm.value_clip",
    "value_clip": "algorithm.value_clip",
    "loss_type": "algorithm.loss_agg",
    "loss_agg_mode": "algorithm.loss_agg",
    "num_iterations": "algorithm.epochs",
    "ppo_epochs": "algorithm.epochs",
    "ppo_mini_batch_size": "algorithm.mini_batch_size",
    "entropy_coeff": "algorithm.entropy_coef",
    "train_batch_size": "data.batch_size",
    "rollout_batch_size": "data.batch_size",
    "per_device_train_batch_size": "packing.micro_batch_size",
    "ppo_micro_batch_size_per_gpu": "packing.micro_batch_size",
    "ppo_max_token_len_per_gpu": "packing.capacity",
    "use_dynamic_bsz": "packing.capacity",
    "model_name_or_path": "model.path",
    "pretrain": "model.path",
    "torch_dtype": "model.model_dtype",
    "dtype": "model.model_dtype",
    "bf16": "model.model_dtype",
    "gradient_checkpointing": "model.activation_checkpointing",
    "enable_gradient_checkpointing": "model.activation_checkpointing",
    "attn_implementation": "model.attention",
    "packing_samples": "model.use_remove_padding",
    "use_vllm": "model.actor.use_vllm_for_generation",
    "input_key": "data.prompt_key",
    "truncation": "data.overlong",
    "filter_overlong_prompts": "data.overlong",
    "max_steps": "run.steps",
    "total_training_steps": "run.steps",
    "total_epochs": "run.epochs",
    "num_train_epochs": "run.epochs",
    "num_episodes": "run.epochs",
    "output_dir": "run.dir",
    "default_local_dir": "run.dir",
    "save_steps": "run.save_every",
    "save_freq": "run.save_every",
    "eval_steps": "run.validate_every",
    "test_freq": "run.validate_every",
    "save_total_limit": "run.keep_checkpoints",
    "max_ckpt_num": "run.keep_checkpoints",
    "resume_from_checkpoint": "run.resume",
    "resume_mode": "run.resume",
    "report_to": "run.loggers",
    "logger": "run.loggers",
    "custom_reward_function": "reward.functions",
    "reward_funcs": "reward.functions",
    "remote_rm_url": "reward.functions",
    "reward_weights": "reward.functions",
    "reward_pretrain": "reward.model.path",
    "lr_scheduler_type": "optim.actor.schedule",
    "warmup_steps": "optim.actor.warmup_steps",
    "lr_warmup_steps": "optim.actor.warmup_steps",
    "max_grad_norm": "optim.actor.max_grad_norm",
    "grad_clip": "optim.actor.max_grad_norm",
    "lr": "optim.actor.lr",
}


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant: same last part, another trainer's word, or the nearest spelling."""
    names = list(known)
    last = name.rpartition(".")[2]
    ours = FOREIGN.get(last)
    if ours in names:
        return ours
    same = [k for k in names if k.rpartition(".")[2] == last]
    if same:
        return max(same, key=lambda k: difflib.SequenceMatcher(None, k, name).ratio())
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    if close:
        return close[0]
    tails = {k.rpartition(".")[2]: k for k in names}
    near = difflib.get_close_matches(last, list(tails), n=1, cutoff=0.7)
    return tails[near[0]] if near else None
