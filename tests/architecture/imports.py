"""Read the imports of a source tree, and judge them by the tables of CONTRIBUTING.md, "Who may import whom".

Every import counts: inside functions, under `if TYPE_CHECKING:` (a type is a dependency too), relative ones,
and `import_module("…")` with a literal name. Import strings that a registry resolves later are not imports.

Files may not import each other in a circle, whether at once or later in a function. Imports for types alone
do not count there: a file that prints groups has to name their type, and nothing is loaded in a circle by it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OURS = ("neoproto", "meshes", "actors", "configs", "scripts")
EVERYTHING = frozenset({"*"})
ENTRY_POINT = "commands"
"""How the table describes what nothing else may import."""
HEADING = "## Who may import whom"


def read_tables(page: str) -> Iterator[list[list[str]]]:
    """The tables below the heading, each as its rows of cells."""
    section = page.partition(f"{HEADING}\n")[2].partition("\n## ")[0]
    for table in re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE):
        rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in table.splitlines()]
        yield rows[2:]


def names_in(cell: str) -> frozenset[str]:
    """The packages that a cell names; what lies in `neoproto` goes without it in the last column."""
    if cell == "everything":
        return EVERYTHING
    names = re.findall(r"`([^`]+)`", cell)
    return frozenset(name if name.split(".")[0] in OURS else f"neoproto.{name}" for name in names)


_layers, _packages = read_tables((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
# Layer -> the layers it may import, besides itself.
MAY_IMPORT: Mapping[str, frozenset[str]] = {
    name: names_in(allowed) for named, _, allowed in _layers for name in sorted(names_in(named))
}
ENTRY_POINTS = frozenset(
    name for named, about, _ in _layers if about.startswith(ENTRY_POINT) for name in names_in(named)
)
# Package -> the only layers that may import it. Benchmarks measure against the bare thing, side by side.
ONLY_IN: Mapping[str, frozenset[str]] = {named.strip("`"): names_in(allowed) for named, allowed in _packages}
# Of some layers only these names may be taken: a worker needs its base class and `register` with its modes,
# the configuration the names of the ways for weights to travel.
ONLY_NAMES: dict[tuple[str, str], frozenset[str]] = {
    ("neoproto.config", "neoproto.weights"): frozenset({"TRANSPORTS"}),
    ("actors", "neoproto.runtime"): frozenset(
        {"Worker", "register", "Dispatch", "Execute", "custom_dispatch"}
    ),
    # A worker is given its own section of the configuration and knows no other.
    ("actors", "neoproto.config"): frozenset(
        {"ActorConfig", "CriticConfig", "RewardConfig", "RolloutConfig", "UpdateConfig"}
    ),
}
# Layer -> packages that it must do without: a configuration is read before anything heavy is.
NOT_IN: dict[str, frozenset[str]] = {
    "neoproto.errors": frozenset({"torch", "transformers", "numpy"}),
    "neoproto.files": frozenset({"torch", "transformers", "numpy"}),
    "neoproto.text": frozenset({"torch", "transformers", "numpy"}),
    "neoproto.config": frozenset({"torch", "transformers", "numpy", "pyarrow", "reasoning_gym"}),
    "neoproto.rewards": frozenset({"torch", "transformers", "numpy"}),
    "neoproto.rollout": frozenset({"torch", "transformers", "numpy"}),
    "neoproto.stack": frozenset({"torch", "transformers"}),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Import:
    """One imported thing.

    Attributes:
        path, line: where.
        module: written out in full.
        name: what is taken of it; "" for the module.
        typed: it is for types alone, under `if TYPE_CHECKING:`.
    """

    path: Path
    line: int
    module: str
    name: str
    typed: bool = False


def sources(root: Path) -> Iterator[Path]:
    """Every Python file of the packages and of `scripts/` under `root`."""
    for top in OURS:
        yield from sorted((root / top).rglob("*.py"))


def module_of(path: Path, root: Path) -> str:
    """The dotted name of a file's module."""
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def imports_of(path: Path, root: Path) -> Iterator[Import]:
    """Every import in a file, relative names resolved."""
    parts = path.relative_to(root).with_suffix("").parts
    package = parts[:-1]  # the same for a module and for an __init__
    tree = ast.parse(path.read_text(), filename=str(path))
    typed = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        for module, name in _named(node, package):
            assert isinstance(node, ast.stmt | ast.expr)
            yield Import(path=path, line=node.lineno, module=module, name=name, typed=node in typed)


def _named(node: ast.AST, package: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    match node:
        case ast.Import(names=names):
            for alias in names:
                yield alias.name, ""
        case ast.ImportFrom(module=module, names=names, level=level):
            base = package[: len(package) - level + 1] if level else ()
            full = ".".join((*base, *([module] if module else [])))
            for alias in names:
                yield full, alias.name
        case ast.Call(
            func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
            args=[ast.Constant(value=str(module)), *_],
        ):
            yield module, ""


def layer_of(module: str, name: str = "") -> str | None:
    """The row of a module, None if not ours. `name` completes `from neoproto import name`.

    A module that no row has is named by its first two parts.
    """
    parts = module.split(".")
    if parts[0] not in OURS:
        return None
    for names in ((*parts, name), parts):
        for length in range(len(names), 1, -1):
            if (layer := ".".join(names[:length])) in MAY_IMPORT:
                return layer
    return parts[0] if parts[0] in MAY_IMPORT and (len(parts) == 1 or parts[0] != "neoproto") else module


def violations(root: Path) -> list[str]:
    """One sentence for each import under `root` that goes against the tables."""
    found = []
    for path in sources(root):
        importer = layer_of(module_of(path, root))
        where = path.relative_to(root)
        if importer not in MAY_IMPORT:
            found.append(f"{where}: {importer} is not in the table of CONTRIBUTING.md, so it may not exist")
            continue
        for item in imports_of(path, root):
            problem = _judge(importer, item)
            if problem:
                found.append(f"{where}:{item.line}: {problem}")
    return found


def _judge(importer: str, item: Import) -> str | None:
    top = item.module.split(".")[0]
    if top in ONLY_IN and importer not in ONLY_IN[top]:
        return f"{importer} imports {top}, which only {', '.join(sorted(ONLY_IN[top]))} may"
    if top in NOT_IN.get(importer, ()):
        return f"{importer} imports {top}, which it must do without"
    imported = layer_of(item.module, item.name)
    if imported is None or imported in (importer, "neoproto"):
        return None
    if imported in ENTRY_POINTS and importer not in ENTRY_POINTS | {"scripts"}:
        return f"{importer} imports {imported}; nothing imports an entry point"
    allowed = MAY_IMPORT[importer]
    if allowed is not EVERYTHING and imported not in allowed:
        return f"{importer} imports {imported}; it may import {', '.join(sorted(allowed)) or 'nothing'}"
    names = ONLY_NAMES.get((importer, imported))
    if names is not None and item.name not in names:
        taken = item.name or "the whole"
        return f"{importer} takes {taken} of {imported}; it may take {', '.join(sorted(names))}"
    return None


def circles(root: Path) -> list[str]:
    """The files under `root` that import each other, a line for each set of them."""
    modules = {module_of(path, root): path for path in sources(root)}
    imported: dict[str, set[str]] = {name: set() for name in modules}
    for name, path in modules.items():
        for item in imports_of(path, root):
            whole = f"{item.module}.{item.name}"
            other = whole if whole in modules else item.module
            if not item.typed and other in modules and other != name:
                imported[name].add(other)
    reached = {name: _reached(name, imported) for name in modules}
    sets = {frozenset(other for other in reached[name] if name in reached[other]) for name in modules}
    return sorted(" <-> ".join(sorted(one)) for one in sets if one)


def _reached(start: str, imported: Mapping[str, Iterable[str]]) -> set[str]:
    """What is imported by way of others; `start` too if it is in a circle."""
    found: set[str] = set()
    left = list(imported[start])
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += imported[name]
    return found


def private_uses(root: Path, names: Iterable[str]) -> list[str]:
    """One sentence for each use of Monarch's private API by files that may import Monarch, but for its own.

    Args:
        names: attributes of Monarch's objects. One that a class of the file has too is taken for the file's.
    """
    found = []
    for path in sources(root):
        where = path.relative_to(root)
        layer = layer_of(module_of(path, root))
        if layer == "neoproto.private_api" or layer not in ONLY_IN["monarch"]:
            continue
        for item in imports_of(path, root):
            if re.match(r"monarch\._", f"{item.module}.{item.name}"):
                found.append(f"{where}:{item.line}: imports {item.module}")
        tree = ast.parse(path.read_text(), filename=str(path))
        own = {name for node in ast.walk(tree) if (name := _own_name(node))}
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(attr=name) if name in names and name not in own:
                    found.append(f"{where}:{node.lineno}: uses .{name}")
                case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=name), *_]) if (
                    name in names
                ):
                    found.append(f"{where}:{node.lineno}: uses .{name}")
    return found


def _own_name(node: ast.AST) -> str:
    """The attribute or method that a class of the file gets here."""
    match node:
        case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
            return name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return name
    return ""
