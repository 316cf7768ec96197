from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from neoproto.errors import ConfigError
from neoproto.runtime.settings import RuntimeSettings, lookup


def test_a_mapping_and_an_object_read_the_same(tmp_path: Path) -> None:
    block = {
        "run_dir": str(tmp_path),
        "env_vars": {"A": 1},
        "stopped_timeout": 4,
        "monarch": {"object_store": {"strategy": "local_rank"}},
    }
    as_object = SimpleNamespace(
        run_dir=tmp_path,
        env_vars={"A": 1},
        stopped_timeout=4,
        backend="monarch",
        monarch=SimpleNamespace(object_store=SimpleNamespace(strategy="local_rank")),
    )
    for config in (
        {"runtime": block, "topology": {"x": 1}},
        SimpleNamespace(runtime=as_object, topology={"x": 1}),
    ):
        settings = RuntimeSettings.from_config(config)
        assert settings.run_dir == tmp_path
        assert settings.env_vars == {"A": "1"}
        assert settings.topology == {"x": 1}
        assert settings.options["store_strategy"] == "local_rank"
        assert settings.options["stopped_timeout_s"] == 4.0
        assert settings.options["job_mode"] == "process"


def test_an_empty_configuration_has_defaults() -> None:
    settings = RuntimeSettings.from_config({})
    assert settings.backend == "monarch"
    assert settings.topology is None
    assert settings.run_dir.is_absolute()
    assert settings.run_dir.name.endswith(settings.run_id)
    assert RuntimeSettings.from_config({}).run_id != settings.run_id


def test_environment_must_be_a_mapping() -> None:
    with pytest.raises(ConfigError, match=r"runtime\.env_vars"):
        RuntimeSettings.from_config({"runtime": {"env_vars": ["A=1"]}})


def test_a_folder_without_a_name_is_not_the_working_folder() -> None:
    with pytest.raises(ConfigError, match=r"^runtime\.run_dir: wanted a folder or null, got ''$"):
        RuntimeSettings.from_config({"runtime": {"run_dir": ""}})


def test_lookup_ends_early_with_the_default() -> None:
    assert lookup({"a": {"b": None}}, "a.b", 5) == 5
    assert lookup({"a": 1}, "a.b.c", 5) == 5
    assert lookup({"a": {"b": 0}}, "a.b", 5) == 0
