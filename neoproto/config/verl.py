"""verl's names: those that stand for one of ours, and those that are refused, with what to use instead.

All other names of verl's that are accepted are our own too: docs/coming-from-verl.md lists them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from neoproto.rollout.engines import ENGINES

KL_NAMES: dict[str, str] = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
"""verl's names of KL estimators, and ours (Schulman, "Approximating KL divergence")."""

REFUSED_KEYS: dict[str, str] = {
    "use_dynamic_bsz": "batches are cut by samples; set ppo_micro_batch_size_per_gpu instead",
    "log_prob_use_dynamic_bsz": "batches are cut by samples; set log_prob_micro_batch_size_per_gpu instead",
    "ppo_max_token_len_per_gpu": "batches are cut by samples; set ppo_micro_batch_size_per_gpu instead",
    "log_prob_max_token_len_per_gpu": "batches are cut by samples; "
    "set log_prob_micro_batch_size_per_gpu instead",
    "ppo_micro_batch_size": "it depends on the number of devices; set ppo_micro_batch_size_per_gpu instead",
    "log_prob_micro_batch_size": "it depends on the number of devices; "
    "set log_prob_micro_batch_size_per_gpu instead",
    "ulysses_sequence_parallel_size": "there is no sequence parallelism; lower data.max_response_length",
    "use_remove_padding": "micro batches are trimmed to their longest sequence already; remove it",
    "use_fused_kernels": "there are no fused kernels; remove it",
    "strategy": "training is FSDP2 where there is more than one rank; remove it",
    "fsdp_config": "sharding is chosen by the number of ranks; remove it",
    "megatron": "there is no Megatron backend; training is FSDP2",
    "enable_gradient_checkpointing": "activations are kept; lower ppo_micro_batch_size_per_gpu instead",
    "lora_rank": "all weights are trained; remove it",
    "lora_alpha": "all weights are trained; remove it",
    "reward_model": "there is no learned reward model; score with reward.name or "
    "reward.custom_reward_function.{path,name}",
    "custom_reward_function": "set reward.custom_reward_function.{path,name} instead",
    "multi_turn": "a rollout is one turn; remove it",
    "agent": "a rollout is one turn, there is no agent loop; remove it",
    "mode": "generation is always asynchronous inside the engine; remove it",
    "free_cache_engine": "the engine keeps its cache; size it with rollout.gpu_memory_utilization, remove it",
    "load_format": "the engine starts from the model folder, then follows the policy; remove it",
    "ignore_eos": "a response always ends at the end-of-sequence token; remove it",
    "calculate_log_probs": "log-probs are always taken at sampling; remove it",
    "response_length": "it is data.max_response_length; remove it",
    "prompt_length": "it is data.max_prompt_length; remove it",
    "return_raw_chat": "prompts are chat messages already; remove it",
    "filter_overlong_prompts": "set data.truncation=filter instead",
    "total_steps": "set trainer.total_training_steps instead",
    "lr_warmup_steps_ratio": "set lr_warmup_steps instead, in steps",
    "warmup_style": "set lr_scheduler_type instead",
    "rollout_rs": "nothing is rejected for its probability ratio; weigh with rollout_is instead",
    "rollout_rs_threshold": "nothing is rejected for its probability ratio; remove it",
    "rollout_rs_threshold_lower": "nothing is rejected for its probability ratio; remove it",
    "rollout_token_veto_threshold": "nothing is rejected for its probability ratio; remove it",
    "rollout_is_batch_normalize": "weights are truncated, not normalised; remove it",
    "bypass_old_logprob_for_rollout": "set rollout_correction.bypass_mode instead",
    "use_pure_rollout_correction": "the loss is policy_loss.loss_mode, always clipped; remove it",
    "use_policy_gradient": "the loss is policy_loss.loss_mode, always clipped; remove it",
    "loss_type": "the loss is policy_loss.loss_mode, always clipped; remove it",
    "use_pf_ppo": "prompts are not reweighted; remove it",
    "max_actor_ckpt_to_keep": "a checkpoint is kept or removed whole; set trainer.max_ckpt_to_keep instead",
    "max_critic_ckpt_to_keep": "a checkpoint is kept or removed whole; set trainer.max_ckpt_to_keep instead",
    "default_hdfs_dir": "checkpoints lie in the run's folder, below trainer.default_local_dir; remove it",
    "del_local_ckpt_after_load": "checkpoints are kept by their number; set trainer.max_ckpt_to_keep instead",
    "esi_redundant_time": "checkpoints are saved by steps; set trainer.save_freq instead",
    "rollout_data_dir": "set trainer.log_samples=true; samples go to the run's folder, samples/step_N.jsonl",
    "validation_data_dir": "all samples are in the run's folder, validation/step_N.jsonl; remove it",
    "log_val_generations": "all samples are in the run's folder, validation/step_N.jsonl; remove it",
    "balance_batch": "rows are dealt to ranks in order; remove it",
    "critic_warmup": "policy and critic train from the first step; remove it",
    "prompt_key": "the column is called prompt; rename it in the data",
    "reward_fn_key": "the column is called data_source; rename it in the data",
    "engine_kwargs": "the engine takes what rollout.* names; environment goes into rollout.env",
    "max_num_batched_tokens": "set rollout.max_num_seqs instead",
    "hybrid_engine": "policy and rollout are always groups of their own; remove it",
    "val_only": "there is no validation without training yet; remove it",
    "reward_kwargs": "read what the function needs from extra_info; remove it",
    "filter_groups": "groups without differences train nothing and are not replaced; remove it",
    "ray_init": "the control plane is Monarch; its options are in runtime.monarch",
    "ray_kwargs": "the control plane is Monarch; its options are in runtime.monarch",
}
"""By last key, wherever it stands."""

REFUSED_VALUES: dict[str, str] = {
    "actor_rollout_ref.rollout.name": f"the engines are {', '.join(ENGINES)}",
    "actor_rollout_ref.rollout.top_p": "training needs 1, as log-probs of a cut-off distribution "
    "cannot be compared with the policy's; rollout.val_kwargs.top_p is free",
    "actor_rollout_ref.rollout.top_k": "training needs -1, as log-probs of a cut-off distribution "
    "cannot be compared with the policy's; rollout.val_kwargs.top_k is free",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "a replica is one process with the "
    "whole model; more ranks make more replicas",
    "actor_rollout_ref.model.trust_remote_code": "code in model folders is not run; use an architecture that "
    "transformers and vllm know",
    "trainer.mode": "the modes are sync, separate_async and decoupled_async",
    "trainer.resume_mode": "the modes are auto, disable and path; verl's resume_path is called path here",
}
"""By full path: options that exist with fewer values than in verl."""


def kl_name(value: Any) -> Any:
    """Our name of a KL estimator that may be called by verl's."""
    return KL_NAMES.get(value, value) if isinstance(value, str) else value


def refused_key(path: Sequence[str | int]) -> str | None:
    """Why an unknown key of this name is refused, if it is one of verl's."""
    return REFUSED_KEYS.get(str(path[-1])) if path else None


def refused_value(dotted: str) -> str | None:
    """Why only some of verl's values are accepted at this path."""
    return REFUSED_VALUES.get(dotted)
