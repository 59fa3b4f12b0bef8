"""The guards of the house: who may import whom, what stays light, what is shipped, and how long a file may be."""

from __future__ import annotations

import ast
import fnmatch
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOMES = {"rlspeed": ROOT / "src" / "rlspeed", "commands": ROOT / "commands", "profiles": ROOT / "profiles"}
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = CONFIG["tool"]["setuptools"]

MOST_LINES, MOST_LINES_OF_A_FUNCTION = 400, 60

BELOW_DATA = {"errors", "config", "planning"}
BELOW_TRAINING = BELOW_DATA | {"engine", "models", "rollout", "algorithms", "data", "rewards"}
MAY_IMPORT = {
    "errors": set(),
    "config": {"errors"},
    "planning": {"errors", "config"},
    "data": BELOW_DATA,
    "rewards": BELOW_DATA,
    "algorithms": {"errors"},
    "engine": BELOW_DATA,
    "models": BELOW_DATA | {"engine"},
    "rollout": BELOW_DATA | {"engine", "models"},
    "training": BELOW_TRAINING,
    "bench": BELOW_TRAINING | {"training"},
    "commands": BELOW_TRAINING | {"training", "bench"},
    "__main__": {"commands"},
    "__init__": set(),
    "profiles": set(),
}
LIGHT = ("errors", "config", "planning", "data", "rewards", "commands")
HEAVY = {"torch", "transformers", "vllm"}
ALGORITHMS_MAY_USE = {"torch", "rlspeed", "__future__", "math", "typing", "dataclasses", "collections"}
COLLECTIVES = re.compile(
    r"^(i?send|i?recv|barrier|monitored_barrier|batch_isend_irecv|(broadcast|scatter|gather|all_gather|all_reduce"
    r"|reduce|reduce_scatter|all_to_all)(_.*)?|init_process_group|destroy_process_group|new_group)$"
)
COLLECTIVES_IN = ("src/rlspeed/engine/", "src/rlspeed/training/checkpoint.py")


def sources() -> list[Path]:
    """Every Python file that is installed."""
    return sorted(p for home in HOMES.values() for p in home.rglob("*.py"))


def short(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def room_of(path: Path) -> str:
    """The part of the package that a file belongs to: `config`, `commands`, `errors`, ..."""
    for name in ("commands", "profiles"):
        if path.is_relative_to(HOMES[name]):
            return name
    return path.relative_to(HOMES["rlspeed"]).parts[0].removesuffix(".py")


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports(tree: ast.AST) -> Iterator[str]:
    """Dotted names of all absolute imports, wherever they stand."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            # `from rlspeed import errors` and `from rlspeed.errors import Fault` both name a part
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports_when_loaded(tree: ast.Module) -> Iterator[str]:
    """Those that run when the module is imported: neither in functions nor under TYPE_CHECKING."""
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo.extend(node.orelse)
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from imports(node)
        todo.extend(ast.iter_child_nodes(node))


def test_the_walk_sees_the_whole_house() -> None:
    """A walk that finds nothing would pass every guard."""
    rooms = {room_of(p) for p in sources()}
    assert rooms == set(MAY_IMPORT)
    assert "rlspeed.errors.Fault" in set(imports(parse(HOMES["rlspeed"] / "config" / "load.py")))
    tree = ast.parse("import a\nif TYPE_CHECKING:\n    import b\ndef f():\n    import c\nclass D:\n    import d\n")
    assert set(imports(tree)) == {"a", "b", "c", "d"}
    assert set(imports_when_loaded(tree)) == {"a", "d"}


def test_imports_point_down_only() -> None:
    wrong = []
    for path in sources():
        room = room_of(path)
        for name in imports(parse(path)):
            top, _, rest = name.partition(".")
            part = rest.partition(".")[0]
            if top == "rlspeed" and part not in MAY_IMPORT[room] | {room, "__version__"}:
                wrong.append(f"{short(path)} imports {name}")
            if room == "algorithms" and top not in ALGORITHMS_MAY_USE:
                wrong.append(f"{short(path)} imports {name}")
    assert wrong == []


def test_commands_import_each_other_relatively() -> None:
    """From the root of the repository `import commands.x` would make a second copy of a module."""
    wrong = [
        f"{short(p)}: {name}"
        for p in sources()
        for name in imports(parse(p))
        if name.split(".")[0] in ("commands", "profiles")
        or (room_of(p) == "commands" and name.startswith("rlspeed.commands"))
    ]
    assert wrong == []


def test_light_parts_import_nothing_heavy_when_loaded() -> None:
    wrong = [
        f"{short(path)} imports {name}"
        for path in sources()
        for name in imports_when_loaded(parse(path))
        if room_of(path) in LIGHT and name.split(".")[0] in HEAVY
    ]
    assert wrong == []


def test_no_torch_at_the_door() -> None:
    """Whatever the AST says: all light modules together, in a fresh interpreter, load nothing heavy."""
    modules = [
        ".".join(("rlspeed", *path.relative_to(base).with_suffix("").parts)).removesuffix(".__init__")
        for path in sources()
        if room_of(path) in LIGHT
        for base in (HOMES["rlspeed"] if path.is_relative_to(HOMES["rlspeed"]) else ROOT,)
    ]
    assert "rlspeed.commands.train" in modules
    assert "rlspeed.config.load" in modules
    script = f"import importlib, sys\nfor m in {modules!r}: importlib.import_module(m)\n"
    script += f"print(sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"


def test_collectives_are_called_in_the_engine_only() -> None:
    wrong = [
        f"{short(path)}:{node.lineno} calls {ast.unparse(node.func)}"
        for path in sources()
        if not short(path).startswith(COLLECTIVES_IN)
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and COLLECTIVES.match(node.func.attr)
        and ast.unparse(node.func.value).split(".")[-1] in ("dist", "distributed")
    ]
    assert wrong == []


def test_vllm_and_transformers_have_one_door_each() -> None:
    """transformers: models, tokenizers and chat templates; vllm: its adapter."""
    wrong = []
    for path in sources():
        for name in imports(parse(path)):
            top = name.split(".")[0]
            if top == "vllm" and short(path) != "src/rlspeed/rollout/vllm.py":
                wrong.append(f"{short(path)} imports {name}")
            if top == "transformers" and room_of(path) not in ("models", "data", "rewards"):
                wrong.append(f"{short(path)} imports {name}")
    assert wrong == []


def test_no_file_and_no_function_is_too_long() -> None:
    wrong = []
    for path in [*sources(), *sorted((ROOT / "docs").rglob("*.py"))]:
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > MOST_LINES:
            wrong.append(f"{short(path)}: {lines} lines, at most {MOST_LINES}")
        for node in ast.walk(parse(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MOST_LINES_OF_A_FUNCTION:
                    wrong.append(f"{short(path)}: {node.name} has {length} lines, at most {MOST_LINES_OF_A_FUNCTION}")
    assert wrong == []


def test_modules_say_what_they_are_in_ascii() -> None:
    wrong = [short(p) for p in sources() if not ast.get_docstring(parse(p))]
    wrong += [f"{short(p)}: not ASCII" for p in sources() if not p.read_text(encoding="utf-8").isascii()]
    assert wrong == []


def test_the_package_list_is_the_folders() -> None:
    """An unlisted package works in the checkout and is missing from the wheel."""
    folders = {"rlspeed", "rlspeed.commands", "rlspeed.profiles"}
    for init in HOMES["rlspeed"].rglob("__init__.py"):
        folders.add(".".join(("rlspeed", *init.parent.relative_to(HOMES["rlspeed"]).parts)))
    assert set(SETUPTOOLS["packages"]) == folders
    holding_code = {path.parent for path in sources()}
    assert all((folder / "__init__.py").is_file() for folder in holding_code)
    assert SETUPTOOLS["package-dir"] == {
        "rlspeed": "src/rlspeed",
        "rlspeed.commands": "commands",
        "rlspeed.profiles": "profiles",
    }


def test_every_data_file_is_shipped() -> None:
    patterns = SETUPTOOLS["package-data"]
    listed = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "profiles"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    files = [Path(line).relative_to("profiles") for line in listed.stdout.splitlines() if not line.endswith(".py")]
    if listed.returncode:  # an unpacked source archive has no history
        files = [p.relative_to(HOMES["profiles"]) for p in HOMES["profiles"].rglob("*") if p.suffix not in ("", ".py")]
    assert len(files) > 5
    wrong = [str(f) for f in files if not any(matches(f, pattern) for pattern in patterns["rlspeed.profiles"])]
    assert wrong == []
    assert patterns["rlspeed"] == ["py.typed"]
    assert (HOMES["rlspeed"] / "py.typed").is_file()


def matches(path: Path, pattern: str) -> bool:
    """As a glob, in which * does not cross a folder."""
    parts = pattern.split("/")
    return len(parts) == len(path.parts) and all(map(fnmatch.fnmatch, path.parts, parts))


def test_the_shipped_model_is_small() -> None:
    size = sum(p.stat().st_size for p in (HOMES["profiles"] / "quickstart" / "model").iterdir())
    assert size <= 4 << 20


def test_the_generated_reference_is_up_to_date() -> None:
    words = [sys.executable, str(ROOT / "docs" / "generate.py"), "--check"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def readme_section(words: str) -> str:
    """The section of the README whose heading has these words."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    sections = re.split(r"^## ", text, flags=re.MULTILINE)
    return next(part for part in sections[1:] if words in part.splitlines()[0])


def test_the_readme_has_two_commands_and_ci_runs_the_second() -> None:
    blocks = re.findall(r"```bash\n(.*?)```", readme_section("Two commands"), flags=re.DOTALL)
    first, second = (line for block in blocks for line in block.splitlines())
    assert first.endswith("rlspeed train quickstart")
    assert "pytest" in second
    ci = (ROOT / ".ci" / "run").read_text()
    found = re.search(r"grep -m1 -E '([^']+)' README.md", ci)
    assert found is not None
    assert 'bash -c "$test_command"' in ci
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    taken = next(line for line in text.splitlines() if re.search(found[1], line))
    assert taken == second
    assert "-m" not in second.split("pytest")[1].split(), "the whole suite, not a part of it"


def test_the_readme_names_eight_files_that_are_there() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = next(
        part for part in re.split(r"^## ", text, flags=re.MULTILINE) if "eight files" in part.splitlines()[0]
    )
    files = re.findall(r"^\d+\. \[[^\]]+\]\(([^)]+)\)", section, flags=re.MULTILINE)
    assert len(files) == 8
    assert all((ROOT / f).is_file() for f in files)


@pytest.mark.parametrize("page", sorted(map(short, [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])))
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))
    missing = [t for t in targets if "://" not in t and not (path.parent / t).exists()]
    assert missing == []
