"""From the command line to a validated configuration: Hydra composes, the schema validates once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from neoproto.config import CONFIG_NAMES, CONFIG_SEARCH_PATH, RunConfig, load_config
from neoproto.errors import ConfigError


def compose(config_name: str, overrides: Sequence[str], config_dir: Path | None = None) -> dict[str, Any]:
    """The composed and resolved mapping, not yet validated.

    Args:
        config_name: primary config, from the shipped ones or from `config_dir`.
        overrides: Hydra overrides. A key that no config has reaches the schema, which names the nearest known
            one, instead of ending in Hydra's own message.
        config_dir: a folder of the user's own configs; its files win over shipped ones of the same name.

    Raises:
        ConfigError: no such config, a file that is not YAML, a malformed override, an interpolation that does
            not resolve.
    """
    if config_dir is not None and not config_dir.is_dir():
        raise ConfigError(f"--config-dir: no such folder: {config_dir}")
    GlobalHydra.instance().clear()
    search_path = create_config_search_path(CONFIG_SEARCH_PATH)
    if config_dir is not None:
        search_path.prepend("command-line", f"file://{config_dir.absolute()}", "main")
    try:
        hydra = Hydra.create_main_hydra2(task_name="neoproto", config_search_path=search_path)
        groups = frozenset(hydra.config_loader.list_groups(""))
        composed = hydra.compose_config(
            config_name=config_name,
            overrides=[force_value(checked(override, groups), groups) for override in overrides],
            run_mode=RunMode.RUN,
            with_log_configuration=False,
            from_shell=True,
        )
        with open_dict(composed):
            composed.pop("hydra", None)
        resolved = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except MissingConfigException as error:
        if error.missing_cfg_file != config_name:
            raise ConfigError(f"--config-name {config_name}: {one_line(error)}") from error
        where = f" in {config_dir} or" if config_dir else ""
        shipped = ", ".join(CONFIG_NAMES)
        raise ConfigError(
            f"--config-name {config_name}: no such config{where} among the shipped ones: {shipped}"
        ) from error
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(f"--config-name {config_name}: {one_line(error)}") from error
    finally:
        GlobalHydra.instance().clear()
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}


def compose_run(config_name: str, overrides: Sequence[str], config_dir: Path | None = None) -> RunConfig:
    """Compose and validate; every problem is reported at once."""
    return load_config(compose(config_name, overrides, config_dir))


def checked(override: str, groups: frozenset[str]) -> str:
    """The override itself, if it sets one of our keys to one value.

    Raises:
        ConfigError: it cannot be parsed, has no key or several values, names no file of a group, or sets one
            of Hydra's own options, none of which is used here.
    """
    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException as error:
        raise ConfigError(
            f"{override}: cannot be read as key=value ({one_line(error)}); "
            "a value with special characters needs quotes: \"key='value'\""
        ) from error
    key, value = parsed.key_or_group, override.partition("=")[2]
    if not key:
        raise ConfigError(f"{override}: no key before the equals sign")
    if re.split(r"[./]", key)[0] == "hydra":
        raise ConfigError(f"{key}: Hydra's own options are not used; the run's folder is runtime.run_dir")
    if parsed.is_sweep_override():
        raise ConfigError(f"{key}: one value is needed, got several ({value}); a list is written [a,b]")
    if key in groups and not parsed.is_delete() and not isinstance(parsed.value(), str | list):
        raise ConfigError(f"{key}: the name of one of its files is needed, got {value}")
    return override


def force_value(override: str, groups: frozenset[str]) -> str:
    """Turn `a.b=c` into `++a.b=c`; group choices (`data=mine`), additions and deletions stay as they are."""
    key = override.split("=", 1)[0]
    plain = re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", key) is not None
    return f"++{override}" if plain and "=" in override and key not in groups else override


def one_line(error: BaseException) -> str:
    """What Hydra's many-line messages say, without its search path and advice about its own options."""
    text = re.split(r"Config search path:|See https?://|Set the environment variable", str(error))[0]
    lines = [line.strip() for line in text.splitlines()]
    joined = "; ".join(line for line in lines if line)
    return re.sub(r"([:.]); ", r"\1 ", joined).rstrip("; ") or type(error).__name__
