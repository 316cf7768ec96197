"""What a user's file may import of the folder it lies in."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from neoproto.errors import ConfigError
from neoproto.neighbours import source_files
from neoproto.user_code import load_function


@pytest.fixture(autouse=True)
def nothing_is_lent(tmp_path: Path) -> Iterator[None]:
    """No other code finds a neighbour: not by the interpreter's path, not among its modules."""
    path = list(sys.path)
    yield
    assert sys.path == path
    files = {name: str(getattr(module, "__file__", "")) for name, module in sys.modules.copy().items()}
    lent = [name for name, file in files.items() if file.startswith(str(tmp_path))]
    assert [name for name in lent if not name.startswith("neoproto_user_")] == []


def loaded(folder: Path, files: dict[str, str], main: str = "mine.py") -> Any:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return load_function(folder / main, "f", field="x")


@pytest.mark.parametrize(
    "line",
    [
        "import helper\ndef f(): return helper.VALUE",
        "def f():\n    import helper\n    return helper.VALUE",  # when it is called
        "from helper import *\ndef f(): return VALUE",
        "from helper import VALUE as v\ndef f(): return v",
        "from .helper import VALUE\ndef f(): return VALUE",
        "from . import helper\ndef f(): return helper.VALUE",
        "import package.part\ndef f(): return package.part.VALUE",
        "import package.part as p\ndef f(): return p.VALUE",
        "from package import part\ndef f(): return part.VALUE",
        "from package.part import VALUE\ndef f(): return VALUE",
        "from plain.part import VALUE\ndef f(): return VALUE",  # a folder without __init__.py
        "import second\ndef f(): return second.helper.VALUE",  # a neighbour's neighbour
    ],
)
def test_it_may_import_what_lies_beside_it(tmp_path: Path, line: str) -> None:
    function = loaded(
        tmp_path,
        {
            "mine.py": line,
            "helper.py": "VALUE = 7",
            "second.py": "import helper",
            "package/__init__.py": "import package.part as own",
            "package/part.py": "from helper import VALUE",
            "plain/part.py": "import helper; VALUE = helper.VALUE",
        },
    )
    assert function() == 7


def test_neighbours_of_one_name_are_two_modules(tmp_path: Path) -> None:
    text = "import helper\ndef f():\n    import helper as late\n    return helper.VALUE, late.VALUE"
    first = loaded(tmp_path / "a", {"mine.py": text, "helper.py": "VALUE = 1"})
    second = loaded(tmp_path / "b", {"mine.py": text, "helper.py": "VALUE = 2"})
    assert (first(), second(), first()) == ((1, 1), (2, 2), (1, 1))


def test_neighbours_are_loaded_again_with_their_file(tmp_path: Path) -> None:
    files = {"mine.py": "import helper\ndef f(): return helper.seen", "helper.py": "seen = []"}
    first, second = loaded(tmp_path, files), loaded(tmp_path, files)
    first().append(1)
    assert second() == []


def test_a_neighbour_is_no_module_of_the_standard_library_or_neoproto(tmp_path: Path) -> None:
    text = "import json, neoproto.errors\ndef f(): return json.dumps([neoproto.errors.__name__])"
    broken = {f"{name}.py": "1 / 0" for name in ("json", "random", "neoproto")}
    assert json.loads(loaded(tmp_path, {"mine.py": text, **broken})()) == ["neoproto.errors"]


def test_a_neighbour_goes_before_an_installed_package_in_its_own_folder_only(tmp_path: Path) -> None:
    text = "import yaml\ndef f(): return yaml.VALUE"
    assert loaded(tmp_path, {"mine.py": text, "yaml.py": "VALUE = 3"})() == 3
    import yaml

    assert yaml.safe_load("a: 1") == {"a": 1}


def test_a_folder_goes_after_an_installed_package(tmp_path: Path) -> None:
    text = "import yaml\ndef f(): return yaml.safe_load('1')"
    assert loaded(tmp_path, {"mine.py": text, "yaml/data.txt": ""})() == 1


def test_a_file_named_like_a_package_does_not_import_itself(tmp_path: Path) -> None:
    text = "import yaml\ndef f(): return yaml.safe_load('1')"
    assert loaded(tmp_path, {"yaml.py": text}, main="yaml.py")() == 1


def test_the_files_that_a_file_is_made_of(tmp_path: Path) -> None:
    files = {
        "mine.py": "import helper, json\ndef f():\n    from package import part; import plain.deep.x",
        "helper.py": "from . import second\nfrom .types import x\nimport mine, actors, nowhere",
        "types.py": "",
        "second.py": "def broken(",
        "package/__init__.py": "from .other import VALUE",
        "package/part.py": "from ..third import VALUE\nfrom ....far import VALUE",
        "package/other.py": "",
        "package/unused.py": "",
        "plain/deep/x.py": "",
        "third.py": "",
        "json.py": "",
        "actors.py": "",
        "unused.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    first, *others = (str(path.relative_to(tmp_path)) for path in source_files(tmp_path / "mine.py"))
    assert first == "mine.py"
    package = ["package/__init__.py", "package/other.py", "package/part.py"]
    assert others == [
        "actors.py",
        "helper.py",
        *package,
        "plain/deep/x.py",
        "second.py",
        "third.py",
        "types.py",
    ]
    assert source_files(tmp_path / "gone.py") == [tmp_path / "gone.py"]


def test_what_fails_in_a_neighbour_is_placed_at_the_import(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"mine\.py cannot be imported: line 2: ZeroDivisionError"):
        loaded(tmp_path, {"mine.py": "\nimport helper", "helper.py": "1 / 0"})
    with pytest.raises(ConfigError, match=r"line 1: ModuleNotFoundError: No module named 'nowhere'"):
        loaded(tmp_path, {"mine.py": "import nowhere"})
    with pytest.raises(ConfigError, match=r"line 1: ModuleNotFoundError: No module named 'yaml.nowhere'"):
        loaded(tmp_path, {"mine.py": "import yaml.nowhere"})
