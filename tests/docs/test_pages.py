"""What the documentation refers to exists: files, headings, commands, options."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from neoproto.config import CONFIG_NAMES, RunConfig
from neoproto.config.verl import refused_key
from neoproto.run.completion import SHORT_KEYS, shipped_groups
from tests.docs.pages import PAGES, ROOT, anchors, commands, empty_sections, links, prose

OF_OTHERS = {"docs/coming-from-verl.md", "docs/notebooks.md"}
"""Pages whose text names options of verl's, or variables that are called like sections."""
OWN_CONFIGS = {"my_ppo", "words", "config"}
"""Names of configurations that the reader makes, or a run has made."""
FREE_OPTIONS = ("--help", "--cfg", "--config-name", "-cn", "--config-dir", "-cd", "--shell-completion")
FOLDERS = "neoproto|meshes|actors|configs|scripts|tests|docs|requirements"
SECTIONS = "|".join(RunConfig.model_fields)
OPEN = ("runtime.env_vars", "rollout.env", "data.task.options", "custom_advantage_function.options")

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in links(page.read_text(encoding="utf-8")):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = page if not path else (page.parent / path).resolve()
        inside = target.is_relative_to(ROOT) and target.exists()
        if not inside or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            broken.append(link)
    assert broken == []


@each_page
def test_files_of_the_repository_exist(page: Path) -> None:
    text, missing = page.read_text(encoding="utf-8"), []
    for path in re.findall(rf"(?<![\w./-])((?:{FOLDERS})/[\w./*-]*\w)(?![\w{{…])", text):
        if not [*ROOT.glob(path), *ROOT.glob(f"{path}.py")]:
            missing.append(path)
    assert missing == []


@each_page
def test_every_section_says_something(page: Path) -> None:
    assert empty_sections(page.read_text(encoding="utf-8")) == []


def test_every_page_is_reached_from_the_readme() -> None:
    reached: set[Path] = set()
    left = [ROOT / "README.md"]
    while left:
        page = left.pop()
        reached.add(page)
        for link in links(page.read_text(encoding="utf-8")):
            target = (page.parent / link.partition("#")[0]).resolve()
            if target.suffix == ".md" and target.is_file() and target not in reached:
                left.append(target)
    assert [name_of(page) for page in PAGES if page not in reached] == []


@each_page
def test_commands_exist(page: Path) -> None:
    missing = []
    for line in commands(page.read_text(encoding="utf-8")):
        for module in re.findall(r"python -m ((?:neoproto|actors|scripts|tests)[\w.]*)", line):
            if importlib.util.find_spec(module) is None:
                missing.append(module)
        for script in re.findall(r"(?:^|\s|= ?)((?:scripts|docs)/[\w./-]+)", line):
            if not (ROOT / script).exists():
                missing.append(script)
        for job in re.findall(r"monarch apply (scripts[\w.]+)\.job", line):
            if importlib.util.find_spec(job) is None:
                missing.append(job)
    assert missing == []


@each_page
def test_options_in_commands_exist(page: Path) -> None:
    wrong: list[str] = []
    for line in commands(page.read_text(encoding="utf-8")):
        found = re.search(r"(?:neoproto\.(run|eval)|scripts/run|examples/\w+\.py)\b(.*)", line)
        if found and "[" not in found[2].split("=")[0]:
            wrong += wrong_words(found[2].split(), evaluation=found[1] == "eval")
    assert wrong == []


def wrong_words(words: list[str], *, evaluation: bool) -> Iterator[str]:
    """Words of a command that are no option, no configuration and no override that there is."""
    words = [word.strip("'\"") for word in words if word not in ("|", "…")]
    for before, word in zip(["", *words], words, strict=False):
        if before == "--shell-completion":
            continue
        if word.startswith("-"):
            if word.partition("=")[0] not in FREE_OPTIONS:
                yield word
        elif before in ("--config-name", "-cn"):
            if word not in {*CONFIG_NAMES, *OWN_CONFIGS} and not word.isupper():
                yield word
        elif "=" in word or word.startswith("~"):
            key = word.lstrip("+~").partition("=")[0]
            short = evaluation and f"{key}=" in SHORT_KEYS["neoproto.eval"]
            if not short and key != "key" and key not in shipped_groups() and not is_option(key):
                yield word


def is_option(path: str) -> bool:
    """Whether an option, or an entry of an open mapping, has this path."""
    section: type[BaseModel] | None = RunConfig
    *above, name = path.split(".")
    for index, part in enumerate(above):
        field = section.model_fields.get(part) if section is not None else None
        if field is None:
            return False
        if ".".join(above[: index + 1]).endswith(OPEN):
            return True
        section = section_in(field.annotation)
    return section is not None and name in section.model_fields


def section_in(kind: Any) -> type[BaseModel] | None:
    """The section that an annotation is, or holds."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return kind
    return next((found for one in get_args(kind) if (found := section_in(one))), None)


@pytest.mark.parametrize("page", [page for page in PAGES if name_of(page) not in OF_OTHERS], ids=name_of)
def test_options_in_the_text_exist(page: Path) -> None:
    wrong = []
    for words in re.findall(r"`([^`\n]+)`", prose(page.read_text(encoding="utf-8"))):
        for path in re.findall(rf"(?<![\w./-])((?:{SECTIONS})(?:\.\w+)+)(?![\w/(-])", words):
            file = path.endswith((".py", ".json", ".jsonl", ".yaml", ".log", ".md", ".html"))
            if not file and not is_option(path) and refused_key(path.split(".")) is None:
                wrong.append(path)
    assert wrong == []


def test_a_wrong_word_would_be_found() -> None:
    words = ["--config-name", "ppo_monarc", "trainer.tota=1", "data=files", "+smoke=tiny", "--nope", "n=8"]
    assert [*wrong_words(words, evaluation=False)] == ["ppo_monarc", "trainer.tota=1", "--nope", "n=8"]
    assert [*wrong_words(["n=8", "~data.task.options.x"], evaluation=True)] == []
    assert is_option("topology")
    assert not is_option("trainer.mode.x")


def test_anchors_are_githubs() -> None:
    text = "# A run, what `it` does\n## A\n## A\n```\n# no heading\n```\n"
    assert anchors(text) == {"a-run-what-it-does", "a", "a-1"}


def test_a_section_without_text_would_be_found() -> None:
    assert empty_sections("# A\n\n## B\n\n    code\n## C\n```\n# no heading\n```\n## D\n\n# E\n\n") == [
        "D",
        "E",
    ]
