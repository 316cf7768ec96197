from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from neoproto.config import RuntimeConfig, RuntimeRoot
from neoproto.errors import ConfigError
from neoproto.runtime.settings import RuntimeSettings


def test_a_mapping_and_an_object_read_the_same(tmp_path: Path) -> None:
    block = {
        "run_dir": str(tmp_path),
        "env_vars": {"A": "1"},
        "stopped_timeout": 4,
        "monarch": {"object_store": {"strategy": "local_rank"}},
    }
    as_object = SimpleNamespace(
        run_dir=tmp_path,
        env_vars={"A": "1"},
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


def test_the_section_alone_and_typed_ones_are_read_too(tmp_path: Path) -> None:
    alone = RuntimeSettings.from_config({"backend": "monarch", "env_vars": {"A": "1"}, "monarch": {}})
    assert (alone.backend, alone.env_vars, alone.topology) == ("monarch", {"A": "1"}, None)
    assert RuntimeSettings.from_config({"env_vars": {"A": "2"}}).env_vars == {"A": "2"}
    typed = RuntimeConfig(run_dir=str(tmp_path), env_vars={"A": "3"})
    for config in (typed, {"runtime": typed, "topology": None}, RuntimeRoot(runtime=typed)):
        settings = RuntimeSettings.from_config(config)
        assert (settings.run_dir, settings.env_vars) == (tmp_path, {"A": "3"})
    composed = OmegaConf.create(
        {"runtime": {"env_vars": {"A": "4", "B": "${data.seed}"}}, "data": {"seed": "5"}}
    )
    assert RuntimeSettings.from_config(composed).env_vars == {"A": "4", "B": "5"}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (None, "configuration: wanted a mapping with `runtime` and `topology`, .*, got None"),
        ([], r"configuration: wanted a mapping .*, got \[\] \(list\)"),
        (5, r"configuration: wanted a mapping .*, got 5 \(int\)"),
        ("monarch", "configuration: wanted a mapping"),
        ({"runtime": None}, "runtime: wanted a mapping, got None"),
        ({"runtime": 5}, r"runtime: wanted a mapping, got 5 \(int\)"),
        ({"runtme": {}}, r"runtme: unknown key; did you mean 'runtime'\?"),
        ({"runtime": {"env_var": {}}}, r"runtime\.env_var: unknown key; did you mean 'env_vars'\?"),
        ({"backend": "monarch", "env_var": {}}, r"env_var: unknown key; did you mean 'env_vars'\?"),
        ({"runtime": {}, "env_vars": {}}, "env_vars: unknown key"),
        (
            {"monarch": {"job_mode": "proces"}},
            r"monarch\.job_mode: wanted 'process' or 'current', got 'proces'",
        ),
        (
            {"runtime": {"stopped_timeout": -5}},
            r"runtime\.stopped_timeout: wanted a value greater than 0, got -5",
        ),
        ({"runtime": {"stopped_timeout": "10"}}, r"runtime\.stopped_timeout: wanted a number, got '10'"),
        ({"runtime": {"env_vars": ["A=1"]}}, r"runtime\.env_vars: wanted a mapping"),
        ({"runtime": {"env_vars": {"A": 1}}}, r"runtime\.env_vars\.A: wanted a string, got 1 \(int\)"),
        ({"runtime": {"env_vars": {"A=B": "1"}}}, r"runtime\.env_vars\['A=B'\]: wanted a name"),
        ({"runtime": {"run_dir": ""}}, r"runtime\.run_dir: wanted .*, got ''"),
        (
            {"runtime": {"monarch": {"object_store": {"strategy": "rank"}}}},
            r"runtime\.monarch\.object_store\.strat",
        ),
    ],
)
def test_what_is_wrong_is_one_line(config: object, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{said}") as caught:
        RuntimeSettings.from_config(config)
    assert len(caught.value.problems) == 1
