"""From the command line to a validated configuration: Hydra composes, the schema validates once."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import OmegaConf, open_dict

from neoproto.config import CONFIG_MODULE, CONFIG_NAMES, RunConfig, load_config
from neoproto.config.precedence import covers, typed_wins
from neoproto.errors import ConfigError
from neoproto.text import cut, shown

_VERSION_BASE = "1.3"
"""Of Hydra's behaviour."""
_MOST_TYPED = 120
"""Characters of what was typed that are quoted."""


def compose(config_name: str, overrides: Sequence[str], config_dir: Path | None = None) -> dict[str, Any]:
    """The composed and resolved mapping, not yet validated.

    Args:
        config_name: primary config, from the shipped ones or from `config_dir`.
        overrides: Hydra overrides. A key that no config has reaches the schema, which names the nearest known
            one, instead of ending in Hydra's own message.
        config_dir: a folder of the user's own configs; its files win over shipped ones of the same name.

    Raises:
        ConfigError: no such config, a file that is no configuration, a malformed override, an interpolation
            that does not resolve.
    """
    if config_dir is not None and not os.path.isdir(config_dir):  # returns False for any text, unlike Path's
        raise ConfigError(f"--config-dir: no such folder: {typed(str(config_dir))}")
    check_name(config_name, config_dir)
    try:
        with searching(config_dir) as loader:
            groups = frozenset(loader.list_groups(""))
            words = [force_value(checked(override, groups), groups) for override in overrides]
            composed = hydra.compose(config_name, words, return_hydra_config=True)
            layers = layers_of(loader, config_name, words, groups, config_dir)
        if config_dir is not None:
            for group, choice in composed.hydra.runtime.choices.items():
                path = config_dir / group.partition("@")[0] / f"{choice}.yaml"
                if path.is_file():
                    check_file(path)  # Hydra passes over a list
        with open_dict(composed):
            composed.pop("hydra", None)
            composed.merge_with(nested(layers.defeated))
        resolved = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except ConfigError:
        raise
    except Exception as error:  # the words and files are the user's: Hydra fails on some in ways of its own
        raise explained(error, config_name, config_dir) from error
    assert isinstance(resolved, dict)
    settled = typed_wins(resolved, layers.typed, layers.typed)
    settled = typed_wins(settled, layers.own, {*layers.typed, *layers.own, *layers.added})
    return {str(key): value for key, value in settled.items()}


class OwnFolder(SearchPathPlugin):  # type: ignore[misc]  # Hydra has no types
    """Puts the user's folder before the shipped files."""

    folder: ContextVar[Path | None] = ContextVar("folder", default=None)

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if (folder := self.folder.get()) is not None:
            search_path.prepend("neoproto", f"file://{folder.absolute()}", "main")


@contextmanager
def searching(config_dir: Path | None) -> Iterator[ConfigLoader]:
    """Hydra's loader over the user's folder, if there is one, and the shipped files.

    If the process itself uses Hydra, its state is as before at the end.
    """
    Plugins.instance().register(OwnFolder)
    token = OwnFolder.folder.set(config_dir)
    theirs = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()  # Hydra refuses to be initialized twice
    try:
        with hydra.initialize_config_module(CONFIG_MODULE, "neoproto", _VERSION_BASE):
            yield GlobalHydra.instance().config_loader()
    finally:
        GlobalHydra.instance().hydra = theirs
        OwnFolder.folder.reset(token)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layers:
    """Who has set which values, by dotted path.

    Attributes:
        typed: on the command line, as key=value.
        own: in files of `--config-dir`.
        added: in shipped files that were added on the command line, as `+smoke=tiny`.
        defeated: values of own files which a shipped file, read after them, has replaced.
    """

    typed: Set[str]
    own: Set[str]
    added: Set[str]
    defeated: Mapping[tuple[str, ...], Any]


def layers_of(
    loader: ConfigLoader,
    config_name: str,
    words: list[str],
    groups: frozenset[str],
    config_dir: Path | None,
) -> Layers:
    """Read again what Hydra has composed, file by file."""
    parser = OverridesParser.create()
    parsed = [parser.parse_override(word) for word in words]
    typed: set[str] = set()
    added_files: set[str] = set()
    for one in parsed:
        if one.key_or_group in groups:
            added_files |= {f"{one.key_or_group}/{one.value()}"} if one.is_add() else set()
        else:
            typed |= (
                {one.key_or_group}
                if one.is_delete()
                else dotted(leaves(one.value(), tuple(one.key_or_group.split("."))))
            )
    own: dict[tuple[str, ...], Any] = {}
    added: set[str] = set()
    defeated: dict[tuple[str, ...], Any] = {}
    for file in loader.compute_defaults_list(config_name, words, RunMode.RUN).defaults:
        if file.config_path.startswith("hydra/"):
            continue
        name = f"{file.config_path}.yaml"
        is_own = config_dir is not None and (config_dir / name).is_file()
        source = (config_dir or Path()) / name if is_own else files(CONFIG_MODULE) / name
        if not source.is_file():
            continue
        content = OmegaConf.to_container(OmegaConf.create(source.read_text(encoding="utf-8")))
        if not isinstance(content, dict):
            continue
        content.pop("defaults", None)
        values = leaves(content, tuple(file.package.split(".")) if file.package else ())
        if is_own:
            own |= values
        elif file.config_path in added_files:
            added |= dotted(values)
        if is_own or file.config_path in added_files:
            defeated = {path: value for path, value in defeated.items() if path not in values}
        else:
            defeated |= {path: own[path] for path in values if path in own}
    left = {path: value for path, value in defeated.items() if not covers(typed, ".".join(path))}
    return Layers(typed=typed, own=dotted(own), added=added, defeated=left)


def leaves(tree: Any, at: tuple[str, ...]) -> dict[tuple[str, ...], Any]:
    """The values of a tree that stands at `at`, each by its whole path; an empty mapping is a value."""
    if not isinstance(tree, dict) or not tree:
        return {at: tree} if at else {}
    below = (leaves(value, (*at, str(key))) for key, value in tree.items())
    return {path: value for one in below for path, value in one.items()}


def dotted(paths: Iterable[tuple[str, ...]]) -> set[str]:
    return {".".join(path) for path in paths}


def nested(values: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """The inverse of `leaves`."""
    tree: dict[str, Any] = {}
    for (*above, name), value in values.items():
        section = tree
        for key in above:
            section = section.setdefault(key, {})
        section[name] = value
    return tree


def compose_run(config_name: str, overrides: Sequence[str], config_dir: Path | None = None) -> RunConfig:
    """Compose and validate; every problem is reported at once."""
    return load_config(compose(config_name, overrides, config_dir))


def check_name(config_name: str, config_dir: Path | None) -> None:
    """Refuse what is no name, and the user's own file of that name if it is no configuration.

    Raises:
        ConfigError: see above.
    """
    if os.path.isabs(config_name) or "\0" in config_name:
        raise ConfigError(
            f"--config-name: wanted a configuration's name, got {typed(config_name)!r}; a folder of your own "
            "configurations is --config-dir"
        )
    if config_dir is not None:
        path = config_dir / f"{config_name.removesuffix('.yaml')}.yaml"
        if os.path.isfile(path):
            check_file(path, primary=config_name)


def check_file(path: Path, *, primary: str | None = None) -> None:
    """Read a configuration of the user's by itself.

    Args:
        primary: its name, if it is the one that is to be run: that must not be empty.

    Raises:
        ConfigError: it is not UTF-8, no YAML, no mapping, refers to itself, or its defaults
            are no list of names.
    """
    try:
        content = OmegaConf.load(path)
        plain = OmegaConf.to_container(content)
    except RecursionError as error:
        raise ConfigError(f"{path}: a value holds itself, or is nested too deeply") from error
    except Exception as error:  # the file is the user's, and what reads it fails in many ways
        if isinstance(error, OSError) and error.errno is None:  # OmegaConf's word for a lone number
            raise ConfigError(f"{path}: wanted a mapping, got a single value") from error
        reason = hydra_message(error).replace(f'in "{path}", ', "")
        raise ConfigError(f"{path}: cannot be read as YAML: {reason}") from error
    if not isinstance(plain, dict):
        raise ConfigError(f"{path}: wanted a mapping, got a list")
    if primary is not None and not plain:
        raise ConfigError(f"{path}: is empty; begin it with defaults: [ppo_monarch, _self_]")
    defaults = plain.get("defaults", [])
    if not isinstance(defaults, list):
        raise ConfigError(f"{path}: defaults: wanted a list, got {shown(defaults)}")
    for index, entry in enumerate(defaults):
        choices = [*entry.values()] if isinstance(entry, dict) else [entry or 0]
        if len(choices) != 1 or not isinstance(choices[0], str | list | None) or isinstance(entry, list):
            raise ConfigError(
                f"{path}: defaults[{index}]: wanted a name, or one group: name, got {shown(entry)}"
            )
        if entry == primary:
            raise ConfigError(f"{path}: defaults[{index}]: got {entry!r}, which is this file itself")


def explained(error: Exception, config_name: str, config_dir: Path | None) -> ConfigError:
    """The message for a failure to compose; it names a user's file that cannot be read by itself."""
    name = typed(config_name)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file == config_name:
        where = f" in {config_dir} or" if config_dir else ""
        shipped = ", ".join(CONFIG_NAMES)
        return ConfigError(f"--config-name {name}: no such config{where} among the shipped ones: {shipped}")
    names_its_place = isinstance(error, HydraException) and not isinstance(error, ConfigCompositionException)
    too_long = isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG
    if config_dir is not None and not names_its_place and not too_long:
        for path in sorted((*config_dir.glob("*.yaml"), *config_dir.glob("*/*.yaml"))):
            try:
                check_file(path)
            except ConfigError as wrong:
                return wrong
    if too_long:
        return ConfigError(f"--config-name {name}: the name is too long")
    if isinstance(error, RecursionError):
        return ConfigError(f"--config-name {name}: its defaults lead back to themselves")
    return ConfigError(f"--config-name {name}: {hydra_message(error)}")


def checked(override: str, groups: frozenset[str]) -> str:
    """The override itself, if it sets one of our keys to one value.

    Raises:
        ConfigError: it cannot be parsed, has no key or several values, names no file of a group, or sets one
            of Hydra's own options, none of which is used here.
    """
    try:
        parsed = OverridesParser.create().parse_override(override)
        chosen = parsed.value()
    except (
        HydraException,
        ValueError,
        RecursionError,
    ) as error:  # the last two: thousands of digits, brackets
        reason = (
            hydra_message(error)
            .split(" expecting ")[0]
            .replace("'<EOF>'", "at its end")
            .replace("at at", "at")
        )
        raise ConfigError(
            f"{typed(override)}: cannot be read as key=value ({reason}); "
            "a value with special characters needs quotes: \"key='value'\""
        ) from error
    key, value = parsed.key_or_group, typed(override.partition("=")[2])
    if not key:
        raise ConfigError(f"{typed(override)}: no key before the equals sign")
    if re.split(r"[./]", key)[0] == "hydra":
        raise ConfigError(f"{key}: Hydra's own options are not used; the run's folder is runtime.run_dir")
    if key == "model" and parsed.package is None:
        raise ConfigError(
            f"model: got {value}; a model's folder is actor_rollout_ref.model.path={value}, one of the files "
            "of the group is model@actor_rollout_ref.model=NAME"
        )
    if parsed.is_sweep_override():
        raise ConfigError(f"{key}: one value is needed, got several ({value}); a list is written [a,b]")
    bare = parsed.is_delete() and "=" not in override
    if key in groups and not bare and not isinstance(chosen, str | list):
        raise ConfigError(f"{key}: the name of one of its files is needed, got {value}")
    return override


def force_value(override: str, groups: frozenset[str]) -> str:
    """Turn `a.b=c` into `++a.b=c`; group choices (`data=mine`), additions and deletions stay as they are."""
    key = override.split("=", 1)[0]
    plain = re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", key) is not None
    return f"++{override}" if plain and "=" in override and key not in groups else override


def typed(text: str) -> str:
    """What was typed, cut to what fits into a message, on one line."""
    return cut(text.replace("\n", "\\n"), _MOST_TYPED)


def hydra_message(error: BaseException) -> str:
    """Hydra's message on one line, without its search path and advice about its own options."""
    # By text: Hydra's exceptions carry nothing else of what is wrong.
    own_advice = r"Config search path:|See https?://|Set the environment variable|; use sys\.set_int"
    text = re.split(own_advice, str(error))[0]
    lines = [line.strip() for line in text.splitlines()]
    said = [line for line in lines if line and not line.startswith(("object_type=", "reference_type="))]
    joined = re.sub(r"([:.]); ", r"\1 ", "; ".join(said)).rstrip("; ")
    if joined:
        return joined
    return type(error).__name__ if error.__cause__ is None else hydra_message(error.__cause__)
