"""Read the imports of a source tree and judge them by the table of DESIGN.md, "Folders".

Every import counts: inside functions, under `if TYPE_CHECKING:` (a type is a dependency too), relative ones,
and `import_module("…")` with a literal name. Import strings that a registry resolves later are not imports.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

OURS = ("neoproto", "meshes", "actors", "configs", "scripts")
ENTRY_POINTS = frozenset(
    f"neoproto.{name}" for name in ("__main__", "run", "eval", "export", "report", "stack")
)
EVERYTHING = frozenset({"*"})


def _layers(*names: str) -> frozenset[str]:
    return frozenset(f"neoproto.{name}" for name in names)


# Layer -> the layers it may import, besides itself.
MAY_IMPORT: dict[str, frozenset[str]] = {
    "neoproto": _layers("packages"),
    "neoproto.errors": frozenset(),
    "neoproto.packages": frozenset(),
    "neoproto.choices": frozenset(),
    "neoproto.trace": _layers("files"),
    "neoproto.text": _layers("errors"),
    "neoproto.files": _layers("errors"),
    "neoproto.neighbours": _layers("packages"),
    "neoproto.user_code": _layers("errors", "files", "neighbours", "text"),
    "neoproto.tables": _layers("text"),
    "neoproto.rollout": _layers("choices", "data"),
    "neoproto.rewards": _layers("choices", "text", "data"),
    "neoproto.config": _layers("errors", "text", "choices", "algorithms", "rollout", "rewards"),
    "neoproto.engines": _layers("errors"),
    "neoproto.store": _layers("engines", "errors"),
    "neoproto.data": _layers("errors", "files", "text", "store", "tables"),
    "neoproto.weights": _layers("errors", "store", "trace"),
    "neoproto.algorithms": _layers("errors", "choices"),
    "neoproto.runtime": _layers(
        "errors", "files", "text", "user_code", "config", "store", "data", "tables", "trace"
    ),
    "neoproto.trainer": _layers(
        "errors",
        "files",
        "neighbours",
        "text",
        "user_code",
        "config",
        "store",
        "data",
        "weights",
        "algorithms",
        "trace",
    ),
    "meshes": _layers("engines", "packages", "errors", "files", "text", "config", "store", "data", "runtime"),
    "actors": _layers(
        "packages",
        "errors",
        "files",
        "text",
        "user_code",
        "config",
        "algorithms",
        "rollout",
        "rewards",
        "data",
        "store",
        "weights",
        "runtime",
    ),
    "configs": _layers("packages"),
    "scripts": EVERYTHING,
    **dict.fromkeys(ENTRY_POINTS, EVERYTHING),
}
# Of some layers only these names may be taken: a worker needs its base class and `register` with its modes.
ONLY_NAMES: dict[tuple[str, str], frozenset[str]] = {
    ("actors", "neoproto.runtime"): frozenset(
        {"Worker", "register", "Dispatch", "Execute", "custom_dispatch"}
    ),
    # A worker is given its own section of the configuration and knows no other.
    ("actors", "neoproto.config"): frozenset({"ActorConfig", "CriticConfig", "UpdateConfig"}),
}
# Package -> the only layers that may import it. Benchmarks measure against the bare thing, side by side.
ONLY_IN: dict[str, frozenset[str]] = {
    "monarch": frozenset({"meshes", "actors", "neoproto.engines", "neoproto.store", "scripts"}),
    "torchstore": frozenset({"neoproto.store"}),
    "vllm": frozenset({"actors"}),
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
    """One imported thing: `module` as written out in full, `name` what is taken of it ("" for the module)."""

    path: Path
    line: int
    module: str
    name: str


def sources(root: Path) -> Iterator[Path]:
    """Every Python file of the packages and of `scripts/` under `root`."""
    for top in OURS:
        yield from sorted((root / top).rglob("*.py"))


def imports_of(path: Path, root: Path) -> Iterator[Import]:
    """Every import in a file, relative names resolved."""
    parts = path.relative_to(root).with_suffix("").parts
    package = parts[:-1]  # the same for a module and for an __init__
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield Import(path=path, line=node.lineno, module=alias.name, name="")
            case ast.ImportFrom(module=module, names=names, level=level):
                base = package[: len(package) - level + 1] if level else ()
                full = ".".join((*base, *([module] if module else [])))
                for alias in names:
                    yield Import(path=path, line=node.lineno, module=full, name=alias.name)
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(module)), *_],
            ):
                yield Import(path=path, line=node.lineno, module=module, name="")


def layer_of(module: str, name: str = "") -> str | None:
    """The layer a module belongs to, None if not ours. `name` completes `from neoproto import name`."""
    parts = module.split(".")
    if parts[0] not in OURS:
        return None
    if parts[0] != "neoproto":
        return parts[0]
    if len(parts) == 1 and name:
        parts.append(name)
    return ".".join(parts[:2])


def violations(root: Path) -> list[str]:
    """One sentence for each import under `root` that goes against the table."""
    found = []
    for path in sources(root):
        importer = layer_of(".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"))
        where = path.relative_to(root)
        if importer not in MAY_IMPORT:
            found.append(f"{where}: {importer} is not in the table of DESIGN.md, so it may not exist")
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
