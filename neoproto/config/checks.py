"""Cross-checks: values that are right by themselves and wrong together.

Each check names every path it read, so that it stays silent where one of them is wrong already.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from neoproto.algorithms.estimators import ESTIMATORS
from neoproto.config.algorithm import CUSTOM
from neoproto.config.schema import OPTIONAL_ROLES, RunConfig
from neoproto.config.topology import (
    MAX_DEVICES_PER_NODE,
    SECTION_OF_ROLE,
    role_problems,
    shares_devices,
    world_size,
)

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
SIZES = ("topology", "trainer.nnodes", "trainer.n_gpus_per_node", "algorithm.adv_estimator")


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One thing that does not fit.

    Attributes:
        text: a sentence that names the fields and what they hold.
        paths: the dotted paths it was judged by.
    """

    text: str
    paths: tuple[str, ...]


def cross_check(config: RunConfig) -> list[Problem]:
    """Everything that does not fit together, in the order of the sections."""
    if wide := _too_wide(config):
        return [wide]  # there is no topology that the others could be judged by
    return [
        *_data(config),
        *_model(config),
        *_rollout(config),
        *_mini_batches(config),
        *_ranks(config),
        *_algorithm(config),
        *_own_estimator(config),
        *_correction(config),
        *_clipping(config),
        *_reward(config),
        *_topology(config),
        *_roles(config),
        *_registry(config),
        *_modes(config),
        *_heartbeats(config),
        *_resuming(config),
    ]


def _problem(text: str, *paths: str) -> Problem:
    return Problem(text=text, paths=paths)


def _too_wide(config: RunConfig) -> Problem | None:
    """The preset's nodes hold the devices of training, and rollout's own beside them."""
    own, trained = config.actor_rollout_ref.rollout.n_gpus_per_node or 1, config.trainer.n_gpus_per_node or 1
    if config.topology is not None or not config.is_async or own + trained <= MAX_DEVICES_PER_NODE:
        return None
    return _problem(
        f"{ROLLOUT}.n_gpus_per_node: got {own}, with trainer.n_gpus_per_node={trained} that is "
        f"{own + trained} devices a node; wanted at most {MAX_DEVICES_PER_NODE}",
        f"{ROLLOUT}.n_gpus_per_node",
        "trainer.n_gpus_per_node",
        "trainer.mode",
        "topology",
    )


def _data(config: RunConfig) -> Iterator[Problem]:
    data = config.data
    for path, files in (("data.train_files", data.train_files), ("data.val_files", data.val_files)):
        if files == ():
            yield _problem(f"{path}: wanted a file or null, got an empty list", path)
    if data.val_files and data.train_files is None:
        yield _problem(
            f"data.val_files: got {list(data.val_files)} without data.train_files; "
            "a task brings its own validation questions (data.task.val_size)",
            "data.val_files",
            "data.train_files",
        )
    if data.train_files is None and data.task.size < data.train_batch_size:
        yield _problem(
            f"data.task.size: got {data.task.size}, less than one batch "
            f"(data.train_batch_size={data.train_batch_size})",
            "data.task.size",
            "data.train_batch_size",
            "data.train_files",
        )


def _model(config: RunConfig) -> Iterator[Problem]:
    model = config.actor_rollout_ref.model
    tiny, where = model.tiny, "actor_rollout_ref.model"
    if model.path is None and tiny.hidden_size % tiny.num_heads:
        yield _problem(
            f"{where}.tiny.hidden_size: got {tiny.hidden_size}, "
            f"wanted a multiple of num_heads={tiny.num_heads}",
            f"{where}.tiny",
            f"{where}.path",
        )
    for path, value in ((f"{where}.path", model.path), ("critic.model.path", config.critic.model.path)):
        if value == "":
            yield _problem(f"{path}: wanted a folder or null, got ''", path)


def _rollout(config: RunConfig) -> Iterator[Problem]:
    rollout, data = config.actor_rollout_ref.rollout, config.data
    needed = data.max_prompt_length + data.max_response_length
    if config.max_model_len < needed:
        yield _problem(
            f"{ROLLOUT}.max_model_len: got {rollout.max_model_len}, wanted at least {needed} = "
            f"data.max_prompt_length={data.max_prompt_length} + "
            f"data.max_response_length={data.max_response_length}",
            f"{ROLLOUT}.max_model_len",
            "data.max_prompt_length",
            "data.max_response_length",
        )
    if not rollout.val_kwargs.do_sample and rollout.val_kwargs.n > 1:
        yield _problem(
            f"{ROLLOUT}.val_kwargs.n: got {rollout.val_kwargs.n} greedy answers a prompt, all the same; "
            "set it to 1, or do_sample to true",
            f"{ROLLOUT}.val_kwargs.n",
            f"{ROLLOUT}.val_kwargs.do_sample",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trained:
    """A model that is trained. `mini` in prompts over all ranks, `micro` in samples on one rank."""

    section: str
    role: str
    mini: int
    micro: int


def _trained(config: RunConfig) -> list[_Trained]:
    actor, critic = config.actor_rollout_ref.actor, config.critic
    trained = [
        _Trained(
            section=ACTOR,
            role="actor",
            mini=actor.ppo_mini_batch_size,
            micro=actor.ppo_micro_batch_size_per_gpu,
        )
    ]
    if config.uses_critic:
        trained.append(
            _Trained(
                section="critic",
                role="critic",
                mini=critic.ppo_mini_batch_size,
                micro=critic.ppo_micro_batch_size_per_gpu,
            )
        )
    return trained


def _mini_batches(config: RunConfig) -> Iterator[Problem]:
    """Mini batches in prompts; then, per rank, in samples."""
    prompts, n = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    topology = config.resolved_topology()
    for one in _trained(config):
        mini, ranks = one.mini, world_size(topology, one.role) or 1
        field, micro_field = (
            f"{one.section}.ppo_mini_batch_size",
            f"{one.section}.ppo_micro_batch_size_per_gpu",
        )
        if prompts % mini:
            yield _problem(
                f"{field}: got {mini} prompts, wanted a divisor of data.train_batch_size={prompts} prompts",
                field,
                "data.train_batch_size",
                "algorithm.adv_estimator",
            )
        if mini * n % ranks:
            yield _problem(
                f"{field}: got {mini} prompts, with {ROLLOUT}.n={n} that is {mini * n} samples; "
                f"wanted a multiple of the {ranks} ranks of {one.role!r}",
                field,
                f"{ROLLOUT}.n",
                *SIZES,
            )
            continue
        per_rank = mini * n // ranks
        if per_rank % min(one.micro, per_rank):
            yield _problem(
                f"{micro_field}: got {one.micro} samples, wanted a divisor of the {per_rank} samples "
                f"that a rank trains on in one mini batch ({mini} prompts x n={n} / {ranks} ranks)",
                micro_field,
                field,
                f"{ROLLOUT}.n",
                *SIZES,
            )


def _ranks(config: RunConfig) -> Iterator[Problem]:
    """The whole batch, dealt to ranks: prompts to replicas, samples to everything else."""
    prompts, n = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    topology = config.resolved_topology()
    for role in config.roles:
        ranks = world_size(topology, role) or 1
        if role == "rollout" and config.is_async:
            continue  # the dispatcher deals prompts to replicas as they come
        if role == "rollout":
            rows, unit = prompts, "prompts"
        else:
            rows, unit = prompts * n, f"prompts x {ROLLOUT}.n={n} samples"
        if rows % ranks:
            yield _problem(
                f"data.train_batch_size: got {prompts} {unit}, "
                f"wanted a multiple of the {ranks} ranks of {role!r}",
                "data.train_batch_size",
                f"{ROLLOUT}.n",
                *SIZES,
            )


def _algorithm(config: RunConfig) -> Iterator[Problem]:
    algorithm, n, enable = config.algorithm, config.actor_rollout_ref.rollout.n, config.critic.enable
    estimator, by_estimator = algorithm.adv_estimator, "algorithm.adv_estimator"
    built_in = ESTIMATORS.get(estimator)
    if built_in is not None and built_in.compares_samples and n < 2:
        yield _problem(
            f"{ROLLOUT}.n: got {n}, wanted at least 2: "
            f"{by_estimator}={estimator} compares the samples of a prompt",
            f"{ROLLOUT}.n",
            by_estimator,
        )
    if algorithm.truncated == "bootstrap" and not config.uses_critic:
        with_critic = " or ".join(name for name, one in ESTIMATORS.items() if one.needs_critic)
        critic = (
            "a critic (critic.enable=true)"
            if built_in is None
            else f"the critic of {by_estimator}={with_critic}"
        )
        yield _problem(
            f"algorithm.truncated: got 'bootstrap', which needs {critic} (got {estimator})",
            "algorithm.truncated",
            by_estimator,
            "critic.enable",
        )
    kl, samples = algorithm.kl_ctrl, config.data.train_batch_size * n
    if algorithm.use_kl_in_reward and kl.type == "adaptive" and samples >= 5 * kl.horizon:
        yield _problem(
            f"algorithm.kl_ctrl.horizon: got {kl.horizon}, wanted more than a fifth of the {samples} samples "
            "of a step: the weight moves by a share of samples / horizon and must not turn negative",
            "algorithm.kl_ctrl.horizon",
            "data.train_batch_size",
            f"{ROLLOUT}.n",
        )
    if enable is not None and enable != config.uses_critic:
        wants = "needs a critic" if config.uses_critic else "has no use for a critic"
        yield _problem(
            f"critic.enable: got {str(enable).lower()}, but {by_estimator}={estimator} {wants}; set null",
            "critic.enable",
            by_estimator,
        )


def _own_estimator(config: RunConfig) -> Iterator[Problem]:
    """A file is needed where its function is to be used, and would be passed over elsewhere."""
    algorithm, path = config.algorithm, "algorithm.custom_advantage_function.path"
    estimator, found = algorithm.adv_estimator, algorithm.custom_advantage_function.path
    if estimator == CUSTOM and not found:
        yield _problem(
            f"{path}: got {found!r}, but algorithm.adv_estimator=custom needs a Python file",
            path,
            "algorithm.adv_estimator",
        )
    if estimator != CUSTOM and found is not None:
        yield _problem(
            f"{path}: got {found!r} with algorithm.adv_estimator={estimator}, which does not look at it; "
            "set algorithm.adv_estimator=custom",
            path,
            "algorithm.adv_estimator",
        )


def _correction(config: RunConfig) -> Iterator[Problem]:
    """With `bypass_mode` PPO's own ratio corrects; weights on top would correct twice."""
    correction, where = config.algorithm.rollout_correction, "algorithm.rollout_correction"
    if correction.bypass_mode and correction.rollout_is is not None:
        yield _problem(
            f"{where}.rollout_is: got {correction.rollout_is!r} with {where}.bypass_mode=true, which takes "
            "PPO's ratio against rollout itself; set one of them to null, false",
            f"{where}.rollout_is",
            f"{where}.bypass_mode",
        )


def _clipping(config: RunConfig) -> Iterator[Problem]:
    """The ratio is clipped to [1 - low, ...], which has to stay above 0."""
    actor = config.actor_rollout_ref.actor
    if actor.clip_range()[0] >= 1:
        yield _problem(
            f"{ACTOR}.clip_ratio: got {actor.clip_ratio}, which must be below 1 on the lower side; "
            "set clip_ratio_low",
            f"{ACTOR}.clip_ratio",
            f"{ACTOR}.clip_ratio_low",
        )


def _reward(config: RunConfig) -> Iterator[Problem]:
    reward, custom = config.reward, "reward.custom_reward_function.path"
    if reward.custom_reward_function.path == "":
        yield _problem(f"{custom}: wanted a Python file or null, got ''", custom)
    elif reward.custom_reward_function.path is not None and reward.name != "auto":
        yield _problem(
            f"reward.name: got {reward.name!r} beside {custom}={reward.custom_reward_function.path!r}; "
            "one of them must be unset (auto, null)",
            "reward.name",
            custom,
        )


def _topology(config: RunConfig) -> Iterator[Problem]:
    """An explicit topology against what the rest of the configuration asks for."""
    topology, trainer = config.topology, config.trainer
    if topology is None:
        return
    total = sum(cluster.nnodes for cluster in topology.clusters)
    if trainer.nnodes not in (None, total):
        yield _problem(
            f"trainer.nnodes: got {trainer.nnodes}, but topology.clusters has {total} node(s); set null",
            "trainer.nnodes",
            "topology",
        )
    for index, cluster in enumerate(topology.clusters):
        path = f"topology.clusters[{index}]"
        if trainer.n_gpus_per_node not in (None, cluster.n_gpus_per_node):
            yield _problem(
                f"trainer.n_gpus_per_node: got {trainer.n_gpus_per_node}, but {path}.n_gpus_per_node is "
                f"{cluster.n_gpus_per_node}; set it to null",
                "trainer.n_gpus_per_node",
                "topology",
            )
        if cluster.device_type is not None and trainer.device_type not in ("auto", cluster.device_type):
            yield _problem(
                f"trainer.device_type: got {trainer.device_type!r}, but {path}.device_type is "
                f"{cluster.device_type!r}; set it to auto",
                "trainer.device_type",
                "topology",
            )


def _roles(config: RunConfig) -> Iterator[Problem]:
    """What is enabled must be placed, what is placed must be enabled, by the section it belongs to."""
    if config.topology is None:
        return
    models = config.topology.models
    workers = [model.worker for model in models]
    for text in role_problems(workers, needed=config.roles, allowed=OPTIONAL_ROLES):
        yield _problem(
            text,
            "topology",
            "algorithm.adv_estimator",
            "algorithm.use_kl_in_reward",
            f"{ACTOR}.use_kl_loss",
        )
    for index, model in enumerate(models):
        section = SECTION_OF_ROLE.get(model.worker)
        if section is not None and model.config_key not in (None, section):
            yield _problem(
                f"topology.models[{index}].config_key: got {model.config_key!r}, wanted {section!r} for "
                f"worker {model.worker!r}",
                "topology",
            )


def _registry(config: RunConfig) -> Iterator[Problem]:
    """Worker groups have different names."""
    name, topology = config.weights.registry_name, config.resolved_topology()
    if name in {*(model.name for model in topology.models), *config.roles, *OPTIONAL_ROLES}:
        yield _problem(
            f"weights.registry_name: got {name!r}, which is the name of another worker group",
            "weights.registry_name",
            "topology",
        )


def _modes(config: RunConfig) -> Iterator[Problem]:
    """What the asynchronous modes need, and what only they can use."""
    mode, rollout, buffer = (
        config.trainer.mode,
        config.actor_rollout_ref.rollout,
        config.trainer.replay_buffer,
    )
    own = f"{ROLLOUT}.n_gpus_per_node"
    if rollout.n_gpus_per_node is not None and (config.topology is not None or not config.is_async):
        why = (
            "topology says where rollout runs" if config.is_async else "trainer.mode=sync shares its devices"
        )
        yield _problem(
            f"{own}: got {rollout.n_gpus_per_node}, but {why}; set it to null",
            own,
            "topology",
            "trainer.mode",
        )
    if not config.is_async:
        return
    topology = config.resolved_topology()
    for role in config.roles:
        if role != "rollout" and shares_devices(topology, "rollout", role):
            yield _problem(
                f"topology.models: rollout shares devices with {role!r}; trainer.mode={mode} needs some "
                "of its own for rollout (another pool or device_range)",
                "topology",
                "trainer.mode",
            )
    lag, most = config.trainer.decoupled_async.min_version_lag, buffer.max_off_policy_threshold
    if mode == "decoupled_async" and lag >= most:
        yield _problem(
            f"trainer.decoupled_async.min_version_lag: got {lag}, wanted less than "
            f"trainer.replay_buffer.max_off_policy_threshold={most}",
            "trainer.decoupled_async.min_version_lag",
            "trainer.replay_buffer.max_off_policy_threshold",
            "trainer.mode",
        )
    ahead = config.async_options.num_warmup_batches
    if buffer.max_off_policy_strategy == "drop" and ahead > most * config.async_options.parameter_sync_step:
        yield _problem(
            f"trainer.{mode}.num_warmup_batches: got {ahead}; with trainer.replay_buffer."
            f"max_off_policy_threshold={most} and parameter_sync_step="
            f"{config.async_options.parameter_sync_step} every one of them would be too old and be dropped",
            f"trainer.{mode}.num_warmup_batches",
            f"trainer.{mode}.parameter_sync_step",
            "trainer.replay_buffer",
            "trainer.mode",
        )


def _heartbeats(config: RunConfig) -> Iterator[Problem]:
    interval, timeout = config.trainer.heartbeat_interval, config.trainer.heartbeat_timeout
    if interval >= timeout:
        yield _problem(
            f"trainer.heartbeat_interval: got {interval:g}, wanted less than "
            f"trainer.heartbeat_timeout={timeout:g}",
            "trainer.heartbeat_interval",
            "trainer.heartbeat_timeout",
        )


def _resuming(config: RunConfig) -> Iterator[Problem]:
    """A path is needed where one is asked for, and would be passed over elsewhere."""
    trainer, path, mode = config.trainer, "trainer.resume_from_path", "trainer.resume_mode"
    if trainer.resume_mode == "path" and not trainer.resume_from_path:
        yield _problem(
            f"{path}: got {trainer.resume_from_path!r}, but {mode}=path needs the folder of a checkpoint "
            "or of a run",
            path,
            mode,
        )
    if trainer.resume_mode != "path" and trainer.resume_from_path is not None:
        yield _problem(
            f"{path}: got {trainer.resume_from_path!r} with {mode}={trainer.resume_mode}, which does not "
            f"look at it; set {mode}=path",
            path,
            mode,
        )
