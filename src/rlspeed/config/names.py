"""The nearest known name: spelling, and what other trainers call the same thing."""

from __future__ import annotations

import difflib
from collections.abc import Collection

# how a key of verl, TRL or OpenRLHF ends, to ours; with a space in it: a sentence that says what to do instead
FOREIGN = {
    "actor_rollout_ref.model.path": "model.path",
    "critic.model.path": "model.critic.path",
    "ref.model.path": "model.reference.path",
    "reward_model.model.path": "reward.model.path",
    "critic.optim.lr": "optim.critic.lr",
    "critic.lr": "optim.critic.lr",
    "actor.lr": "optim.actor.lr",
    "critic.grad_clip": "optim.critic.max_grad_norm",
    "critic.ppo_epochs": "algorithm.epochs",
    "kl_ctrl.type": "algorithm.kl.controller",
    "kl_ctrl.target_kl": "algorithm.kl.target",
    "kl_ctrl.horizon": "algorithm.kl.horizon",
    "overlong_buffer.len": "algorithm.overlong_penalty.buffer",
    "overlong_buffer.penalty_factor": "algorithm.overlong_penalty.factor",
    "overlong_buffer.enable": "algorithm.overlong_penalty.buffer",
    "filter_groups.enable": "algorithm.filter_groups",
    "custom_reward_function.path": "reward.functions",
    "custom_reward_function.name": "reward.functions",
    "actor.use_torch_compile": "leave it out: nothing here is compiled by torch.compile",
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
    "weight_decay": "optim.actor.weight_decay",
    "warmup_ratio": "optim.actor.warmup_steps",
    "lr_warmup_steps_ratio": "optim.actor.warmup_steps",
    "adam_betas": "optim.actor.betas",
    "adam_beta1": "optim.actor.betas",
    "adam_beta2": "optim.actor.betas",
    "lambd": "algorithm.lam",
    "norm_adv_by_std_in_grpo": "algorithm.kind",
    "scale_rewards": "algorithm.kind",
    "critic_warmup": "algorithm.critic_warmup_steps",
    "delta": "algorithm.dual_clip",
    "mask_truncated_completions": "algorithm.overlong_penalty.buffer",
    "prompt_data": "data.train_files",
    "dataset_name": "data.train_files",
    "prompt_max_len": "data.max_prompt_length",
    "gen_batch_size": "data.batch_size",
    "balance_batch": "data.balance_dp_token",
    "enable_thinking": "data.chat_template_kwargs",
    "max_num_seqs": "rollout.max_concurrent",
    "importance_sampling_level": "algorithm.policy_loss",
    "vllm_importance_sampling_correction": "rollout.correction",
    "tis_imp_ratio_cap": "rollout.correction_threshold",
    "ref_model_path": "model.reference.path",
    "reward_model_path": "reward.model.path",
    "tensor_model_parallel_size": "devices.actor.vllm_config.tensor_parallel_size",
    "vllm_tensor_parallel_size": "devices.actor.vllm_config.tensor_parallel_size",
    "gpu_memory_utilization": "devices.actor.vllm_config.gpu_memory_utilization",
    "vllm_gpu_memory_utilization": "devices.actor.vllm_config.gpu_memory_utilization",
    "ulysses_sequence_parallel_size": "devices.actor.sequence_parallel_size",
    "param_offload": "devices.actor.fsdp_config.cpu_offload",
    "optimizer_offload": "devices.actor.fsdp_config.cpu_offload",
    "project_name": "run.name",
    "experiment_name": "run.name",
    "run_name": "run.name",
    "use_wandb": "run.loggers",
    "save_hf_ckpt": "run.save_hf",
    "load_checkpoint": "run.resume",
    "load_enable": "run.resume",
    "max_actor_ckpt_to_keep": "run.keep_checkpoints",
    "rollout_data_dir": "run.log_rollouts",
    "log_completions": "run.log_rollouts",
    "n_gpus_per_node": "give the option --nproc-per-node",
    "num_processes": "give the option --nproc-per-node",
    "nnodes": "start on several nodes through torchrun",
    "gradient_accumulation_steps": "leave it out: packing.capacity cuts a step into bins",
    **dict.fromkeys(
        (
            "lora",
            "lora.rank",
            "lora.r",
            "lora_rank",
            "lora_alpha",
            "peft",
            "peft_config",
            "use_peft",
            "target_modules",
            "qlora",
        ),
        "leave it out: adapters are not offered, all weights train",
    ),
    **dict.fromkeys(
        ("load_in_4bit", "load_in_8bit", "quantization_config", "fp8", "quantization"),
        "leave it out: quantised weights are not offered",
    ),
    "micro_train_batch_size": "packing.micro_batch_size",
    "micro_rollout_batch_size": "packing.micro_batch_size",
}


def suggestion(name: str, known: Collection[str]) -> str:
    """What to do about an unknown key: "did you mean ...?", another trainer's word translated, or to leave it out."""
    ours = _foreign(name.lower())
    if ours is not None and " " in ours:
        return ours
    near = nearest(name, known)
    return f"did you mean {near}?" if near else "leave it out"


def nearest(name: str, known: Collection[str]) -> str | None:
    """The known name that was probably meant: another trainer's word, the same last part, or the nearest spelling."""
    names = list(known)
    lower = name.lower()
    ours = _foreign(lower)
    if ours is not None and (ours in names or ours.rpartition(".")[0] in names):
        return ours
    last = lower.rpartition(".")[2]
    same = [k for k in names if k.rpartition(".")[2] == last]
    if same:
        return max(same, key=lambda k: difflib.SequenceMatcher(None, k, lower).ratio())
    close = difflib.get_close_matches(lower, names, n=1, cutoff=0.75)
    if close:
        return close[0]
    tails: dict[str, list[str]] = {}
    for key in names:
        tails.setdefault(key.rpartition(".")[2], []).append(key)
    near = difflib.get_close_matches(last, list(tails), n=1, cutoff=0.7)
    if not near:
        return None
    return max(tails[near[0]], key=lambda k: difflib.SequenceMatcher(None, k, lower).ratio())


def _foreign(name: str) -> str | None:
    """The table's entry for the longest end of a dotted name."""
    parts = name.lstrip("-+~").split(".")
    return next((FOREIGN[end] for i in range(len(parts)) if (end := ".".join(parts[i:])) in FOREIGN), None)
