"""The shape of the source tree, read from its syntax: what may import what, sizes, names and forbidden calls."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "speculators"

RANK = {"errors": 0, "formats": 1, "models": 2, "runtime": 3, "convert": 4, "extract": 4, "train": 5, "cli": 6}
VERBS = ("runtime", "convert", "extract", "train", "cli")
# Places where a method or a producer has to be called by its name.
FAMILY_TABLES = re.compile(
    r"speculators/(runtime/(config|recognise)|convert/((from|to)_\w+|detect|layer_ids|sources|targets)|cli/stitching)\.py"
)
# Packages whose absence is normal (extras), or whose import is slow and needed for one picture, kernel or kind of file.
LATE_THIRD_PARTY = {"datasets", "gguf", "llguidance", "matplotlib", "pyarrow", "vllm"}
# Kernels are decorated as their module is read, so that this imports Triton: it is read when one is first run.
KERNELS = ("speculators/models/kernels/", "speculators/runtime/kernels/")
KERNEL_MODULES = ("speculators.models.kernels", "speculators.runtime.kernels")
# These directories are read without torch: the two functions that handle tensors import it themselves.
TORCH_FREE = re.compile(
    r"speculators/formats/\w+\.py|speculators/models/(__init__|family)\.py|speculators/models/\w+/config\.py"
)
# A family whose network or training extends another's may import that one.
BUILDS_ON = {"peagle": "eagle3", "dflash2": "dflash", "dspark": "dflash"}
FORBIDDEN_WORDS = {"utils", "util", "common", "core", "base", "helper", "helpers", "manager", "misc"}


@dataclass(frozen=True)
class Import:
    source: str
    target: str
    line: int
    late: bool
    type_only: bool


@cache
def modules() -> dict[str, ast.Module]:
    paths = sorted(PACKAGE.rglob("*.py"))
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def layer(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def targets(node: ast.Import | ast.ImportFrom, known: set[str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    assert node.level == 0, f"line {node.lineno}: relative imports hide the layer; write the full name"
    assert node.module is not None
    for alias in node.names:
        full = f"{node.module}.{alias.name}"
        yield full if full in known else node.module


def imports_of(path: str, tree: ast.Module) -> Iterator[Import]:
    known = {module_name(other) for other in modules()}

    def walk(node: ast.AST, late: bool, type_only: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import | ast.ImportFrom):
                for target in targets(child, known):
                    yield Import(path, target, child.lineno, late, type_only)
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                yield from walk(child, True, type_only)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                yield from walk(child, late, True)
            else:
                yield from walk(child, late, type_only)

    yield from walk(tree, False, False)


@cache
def imports() -> list[Import]:
    return [found for path, tree in modules().items() for found in imports_of(path, tree)]


def test_imports_point_one_way() -> None:
    wrong = []
    for found in imports():
        here, there = layer(module_name(found.source)), layer(found.target)
        if not found.target.startswith("speculators.") or here in ("", there):
            continue
        if RANK[there] >= RANK[here]:
            wrong.append(f"{found.source}:{found.line} ({here}) imports {found.target} ({there})")
    assert wrong == []


def test_every_module_belongs_to_a_layer() -> None:
    assert {layer(module_name(path)) for path in modules()} <= {"", *RANK}


def test_no_import_cycle() -> None:
    graph: dict[str, set[str]] = {module_name(path): set() for path in modules()}
    for found in imports():
        source = module_name(found.source)
        if found.target in graph and found.target != source and not (found.late or found.type_only):
            graph[source].add(found.target)
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")


def test_the_package_never_imports_itself_whole() -> None:
    wrong = [f"{found.source}:{found.line}" for found in imports() if found.target == "speculators"]
    assert wrong == []


def test_late_imports_stand_only_where_they_are_meant_to() -> None:
    wrong = []
    for found in imports():
        top = found.target.split(".")[0]
        if not found.late or found.source.startswith("speculators/cli"):
            continue
        if found.target.startswith(KERNEL_MODULES):
            continue
        if top in LATE_THIRD_PARTY or (top in ("torch", "safetensors") and TORCH_FREE.fullmatch(found.source)):
            continue
        wrong.append(f"{found.source}:{found.line} imports {found.target} inside a function")
    assert wrong == []


def test_triton_is_imported_by_kernels_alone() -> None:
    users = {found.source for found in imports() if found.target.split(".")[0] == "triton"}
    assert users
    assert all(path.startswith(KERNELS) for path in users)
    wrong = [f"{found.source}:{found.line}" for found in imports() if imports_kernels_early(found)]
    assert wrong == []


def imports_kernels_early(found: Import) -> bool:
    mine = found.target.startswith(KERNEL_MODULES)
    return mine and not found.late and not found.source.startswith(KERNELS)


def test_modules_are_imported_by_name_only_in_tables_and_for_a_users_class() -> None:
    allowed = {"speculators/__init__.py", "speculators/models/family.py", "speculators/models/__init__.py"}
    allowed |= {"speculators/runtime/proposers/custom.py"}
    allowed |= {f"speculators/convert/{table}.py" for table in ("sources", "targets")}
    users = {
        path
        for path, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node).endswith(("import_module", "__import__"))
    }
    assert users <= allowed


def family_names() -> set[str]:
    return {path.parent.name for path in (PACKAGE / "models").glob("*/config.py")}


def docstrings(tree: ast.Module) -> set[int]:
    bodies = (
        node.body
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body
    )
    return {id(body[0].value) for body in bodies if isinstance(body[0], ast.Expr)}


def words(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.alias):
        return node.name
    if isinstance(node, ast.ImportFrom):
        return node.module or ""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return ""


def test_a_verb_never_names_a_draft_family() -> None:
    assert "eagle3" in family_names()
    pattern = re.compile("|".join(sorted(family_names())), re.IGNORECASE)
    wrong = []
    for path, tree in modules().items():
        if layer(module_name(path)) not in VERBS or FAMILY_TABLES.fullmatch(path):
            continue
        prose = docstrings(tree)
        wrong += [
            f"{path}:{getattr(node, 'lineno', '?')} says {words(node)[:60]!r}"
            for node in ast.walk(tree)
            if id(node) not in prose and pattern.search(words(node))
        ]
    assert wrong == []


def test_a_family_imports_no_other_but_the_one_it_builds_on() -> None:
    wrong = []
    for found in imports():
        here, there = module_name(found.source).split("."), found.target.split(".")
        if here[1:2] == ["models"] and there[:2] == ["speculators", "models"] and len(there) > 2 and len(here) > 2:
            mine, other = here[2], there[2]
            if mine in family_names() and other in family_names() and other not in (mine, BUILDS_ON.get(mine)):
                wrong.append(f"{found.source}:{found.line} imports {found.target}")
    assert wrong == []


def python_files() -> list[Path]:
    folders = ("speculators", "tests", "recipes", "benchmarks")
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def test_files_stay_readable() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in python_files()
    }
    assert {path: lines for path, lines in lengths.items() if lines > 450} == {}


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{path}:{node.lineno} {node.name}", node


def own_length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring."""
    assert node.end_lineno is not None
    first = node.body[0]
    lines = node.end_lineno - node.lineno + 1
    if ast.get_docstring(node) is not None and first.end_lineno is not None:
        lines -= first.end_lineno - first.lineno + 1
    return lines


def takes_options_of_its_own(where: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Commands (their parameters are flags), `LLM` (vLLM's engine keywords) and kernels (pointers, strides, sizes)."""
    if where.startswith("speculators/cli/"):
        return not node.name.startswith("_")
    if any(ast.unparse(decorator) == "triton.jit" for decorator in node.decorator_list):
        return True
    return where.startswith("speculators/runtime/llm.py") and node.name == "__init__"


def test_functions_stay_short_and_take_few_arguments() -> None:
    wrong = []
    for where, node in functions():
        if own_length(node) > 60:
            wrong.append(f"{where}: {own_length(node)} lines")
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        count = len([argument for argument in arguments if argument.arg not in ("self", "cls")])
        if count > 8 and not takes_options_of_its_own(where, node):
            wrong.append(f"{where}: {count} arguments")
    assert wrong == []


def test_names_say_what_is_inside() -> None:
    wrong = []
    for path, tree in modules().items():
        names = [*Path(path).parts, Path(path).stem]
        names += [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        for name in names:
            parts = {part.lower() for part in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+", name)}
            if parts & FORBIDDEN_WORDS:
                wrong.append(f"{path}: {name}")
    assert wrong == []


def is_forbidden_handler(node: ast.AST) -> bool:
    if not isinstance(node, ast.ExceptHandler):
        return False
    caught = "" if node.type is None else ast.unparse(node.type)
    return node.type is None or bool(re.search(r"\b(Exception|BaseException)\b", caught))


def is_unsafe_load(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or ast.unparse(node.func) != "torch.load":
        return False
    flags = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    return flags.get("weights_only") != "True"


def trusts_remote_code(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and any(
        keyword.arg == "trust_remote_code" and ast.unparse(keyword.value) == "True" for keyword in node.keywords
    )


@pytest.mark.parametrize("forbidden", [is_forbidden_handler, is_unsafe_load, trusts_remote_code])
def test_forbidden_code(forbidden) -> None:
    found = [
        f"{path}:{getattr(node, 'lineno', '?')}"
        for path, tree in modules().items()
        for node in ast.walk(tree)
        if forbidden(node)
    ]
    assert found == []


def test_nothing_is_unpickled() -> None:
    """The one name of pickle's is the error that torch's restricted reader raises."""
    modules_of = {"pickle", "dill"}
    found = [found for found in imports() if found.target.split(".")[0] in modules_of]
    assert {(found.source, found.target) for found in found} <= {("speculators/convert/source.py", "pickle")}
    names = [
        alias.name
        for node in ast.walk(modules()["speculators/convert/source.py"])
        if isinstance(node, ast.ImportFrom) and node.module == "pickle"
        for alias in node.names
    ]
    assert names == ["UnpicklingError"]
    assert len(found) == 1


@pytest.mark.parametrize(
    ("code", "check"),
    [
        ("try:\n    f()\nexcept Exception:\n    pass", is_forbidden_handler),
        ("try:\n    f()\nexcept:\n    pass", is_forbidden_handler),
        ("try:\n    f()\nexcept (ValueError, Exception):\n    pass", is_forbidden_handler),
        ("torch.load(path)", is_unsafe_load),
        ("torch.load(path, weights_only=False)", is_unsafe_load),
        ("AutoModel.from_pretrained(name, trust_remote_code=True)", trusts_remote_code),
    ],
)
def test_the_checks_catch_what_they_are_for(code: str, check) -> None:
    assert any(check(node) for node in ast.walk(ast.parse(code)))
