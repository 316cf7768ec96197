"""Checks that take no time, before a run has a folder and before any process is started.

Its prompts, tokenizer and checkpoints take seconds to read, see `neoproto.run.prepare`. Nothing here imports
torch.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from meshes.common.topology import compile_here
from neoproto.config import RunConfig
from neoproto.config.schema import OPTIONAL_ROLES
from neoproto.run.folder import check_folder
from neoproto.run.prepare import check_functions, check_named_models
from neoproto.run.resuming import checkpoint_at_path
from neoproto.runtime.backend import check_backend, check_hosts
from neoproto.runtime.placement import Placement
from neoproto.trainer.checkpoint.folder import Checkpoint
from neoproto.trainer.metrics.services import check_installed


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedRun:
    """A run that may be started.

    Attributes:
        placement: the compiled topology.
        elsewhere: the checkpoint that `trainer.resume_from_path` names, not read yet.
    """

    config: RunConfig
    placement: Placement
    elsewhere: Checkpoint | None


def check_run(config: RunConfig) -> CheckedRun:
    """Check what needs no reading of data: backend, folders, services, topology, functions, model folders.

    Raises:
        ConfigError: something is wrong.
    """
    check_folder(config)
    elsewhere = checkpoint_at_path(config)
    check_installed(config.trainer.logger)
    placement = place(config, config.roles)
    check_functions(config)
    check_named_models(config)
    return CheckedRun(config=config, placement=placement, elsewhere=elsewhere)


def place(config: RunConfig, needed: Collection[str]) -> Placement:
    """Compile the topology for this machine, or for the applied job.

    Args:
        needed: roles that it must have; it may have others of a run.

    Raises:
        TopologyError: with every violation.
        ConfigError: there is no such backend or job, or the job's meshes are not the topology's clusters.
    """
    check_backend(config.runtime.backend)
    placement = compile_here(
        config.resolved_topology(),
        hosts_are_here=config.runtime.hosts_are_here,
        roles_needed=needed,
        roles_allowed=(*config.roles, *OPTIONAL_ROLES),
    )
    check_hosts(config.runtime, placement)
    return placement
