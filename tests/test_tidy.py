"""The house style as a test, with ratchets: the allow-lists only shrink."""

from __future__ import annotations

import ast
import importlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from tools.house import ROOT, files_of, lines_per_package, nodes, parsed, read_ahead

SRC = ROOT / "src"
FILES = files_of(ROOT)

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_CLASS_LINES = 250

# Kernels and tables may be listed; each entry says why.
LONG_FILES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {
    "quire/kernels/attention/triton.py:attend_items": "a Triton kernel: its state is one loop's registers",
    "quire/kernels/linear/triton_few.py:multiply_few": "the same",
    "quire/kernels/linear/triton_matmul.py:matmul_tiles": "the same",
    "quire/kernels/rope/triton.py:rope_store_heads": "the same",
}
LARGE_CLASSES: dict[str, str] = {}
# Where an import inside a function is allowed: start-up cost, lazy names, optional dependencies.
LATE_IMPORTS: dict[str, str] = {
    "quire/cli/__init__.py": "each command imports what it needs, so that --help is quick",
    "quire/cli/foreign.py": "a draft model is looked for with the code that reads checkpoints",
    "quire_lab/cli/measure.py": "each command imports what it needs, so that --help is quick",
    "quire_lab/cli/quantize.py": "torch is loaded when the command runs, not for its help",
    "quire_lab/cli/cockpit.py": "nicegui is the extra `cockpit`, loaded by the page's process alone",
    "quire/cli/serve.py": "the engine process is started before this process imports the web server",
    "quire/api/call_stages.py": "the one list of the stages of a call",
    "quire/api/generation.py": "the timing of an answer and its spans are loaded with the first that has one",
    "quire/jobs/routes.py": "files and batches are a wing: not loaded without --batch-dir",
    "quire/http/edge.py": "the one list of the wrappers of an application, loaded when a request needs one",
    "quire/engine/helper.py": "each kind imports what it needs: a bare container compiles grammars without msgspec",
    "quire/engine/adapters.py": "the reader of adapters is loaded with the first",
    "quire/engine/build.py": "the choice of an executor, and a step log that is asked for",
    "quire/engine/kv_tier.py": "torch, and the store of a tier in Redis, an extra",
    "quire/runner/worker.py": "drafting and adapters are wings: not loaded without them",
    "quire/text/grammar_matcher.py": "llguidance is optional for quire.LLM, and wanted with the first grammar only",
    "quire_lab/learn/decode_loop.py": "torch and Quill are loaded when this simulation is drawn, not when it is listed",
    "quire_lab/learn/speculation.py": "the same",
    "quire_lab/learn/stop_rules.py": "the same",
    "quire/__init__.py": "LLM and friends are resolved lazily",
    "quire_gateway/scalers.py": "ray is optional",
    "quire_gateway/stages.py": "the one list of the gateway's stages: what is off is not loaded",
    "quire_gateway/routing.py": "the prefix index is a wing: not loaded for a policy that does not score",
    "quire/executor/ray.py": "ray is optional",
    "quire/metrics/trace.py": "opentelemetry is the extra `otel`",
    "quire/tiers/remote.py": "redis is the extra `redis`",
    "quire_gateway/redis_store.py": "redis is the extra `redis`",
    "quire_gateway/ledger_database.py": "psycopg is the extra `postgres`",
    "quire/models/checkpoint.py": "the readers of GGUF and of tokenizers are loaded for such a file",
    "quire/families/quantization.py": "rare formats are loaded for such a file, those that are not read for an error",
    "quire/models/fingerprint.py": "the names of a split file's parts are known where there is one",
    "quire/models/stored_weights.py": "the decoders of GGUF's blocks and of rare formats are loaded for such a file",
    "quire/models/weight_sources.py": "the layouts of rare formats are loaded for such a file",
    "quire/text/load.py": "the reader of sentencepiece files is loaded for one",
    "quire/models/hub.py": "huggingface_hub brings an HTTP client, which a local model need not wait for",
}


# Packages that no test of tests/quick.txt imports by name: they run below the engine or the API in those tests.
TOUCHED_BY_OTHERS = {f"quire.{name}" for name in ("api", "layers", "executor", "http", "jobs")}


def name_of(path: Path) -> str:
    return path.relative_to(SRC).as_posix()


def all_nodes() -> Iterator[tuple[str, ast.AST]]:
    read_ahead(FILES)
    for path in FILES:
        name = name_of(path)
        for node in nodes(path):
            yield name, node


def length(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def is_triton_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Triton types a kernel when it is launched."""
    return any(ast.unparse(each) == "triton.jit" for each in function.decorator_list)


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for file, node in all_nodes():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield file, node


def test_files_are_short() -> None:
    long = {name_of(p): n for p in FILES if (n := p.read_text().count("\n")) > MAX_FILE_LINES}
    assert set(long) == set(LONG_FILES), f"over {MAX_FILE_LINES} lines: {long}"


def test_functions_are_short() -> None:
    long = {f"{f}:{d.name}": length(d) for f, d in functions() if length(d) > MAX_FUNCTION_LINES}
    assert set(long) == set(LONG_FUNCTIONS), f"over {MAX_FUNCTION_LINES} lines: {long}"


def test_classes_are_small() -> None:
    large = {}
    for file, node in all_nodes():
        if isinstance(node, ast.ClassDef) and length(node) > MAX_CLASS_LINES:
            large[f"{file}:{node.name}"] = length(node)
    assert set(large) == set(LARGE_CLASSES), f"over {MAX_CLASS_LINES} lines: {large}"


@pytest.mark.parametrize("name", ["utils.py", "util.py", "common.py", "misc.py", "helpers.py"])
def test_no_drawer_for_odds_and_ends(name: str) -> None:
    assert not [name_of(p) for p in FILES if p.name == name]


def test_no_import_inside_functions() -> None:
    late = set()
    for file, function in functions():
        if any(isinstance(n, ast.Import | ast.ImportFrom) for n in ast.walk(function)):
            late.add(file)
    assert late <= set(LATE_IMPORTS), f"imports inside functions: {late - set(LATE_IMPORTS)}"
    assert set(LATE_IMPORTS) <= late | {"__init__.py"}, "an entry of the allow-list is not needed any more"


def test_quick_tests_exist_and_touch_every_package() -> None:
    listed = (ROOT / "tests" / "quick.txt").read_text().split()
    assert not [line for line in listed if not (ROOT / line).exists()]
    texts = [
        file.read_text()
        for line in listed
        for file in ([ROOT / line] if line.endswith(".py") else (ROOT / line).rglob("*.py"))
    ]
    packages = lines_per_package(ROOT).keys() - TOUCHED_BY_OTHERS
    assert not {name for name in packages if not any(name in text for text in texts)}


def test_no_bare_or_silent_except() -> None:
    bad = []
    for file, node in all_nodes():
        if isinstance(node, ast.ExceptHandler):
            silent = len(node.body) == 1 and isinstance(node.body[0], ast.Pass)
            broad = node.type is None or (isinstance(node.type, ast.Name) and node.type.id == "BaseException")
            if node.type is None or (silent and broad):
                bad.append(f"{file}:{node.lineno}")
    assert not bad


def test_no_test_takes_any_error_for_the_one_it_means() -> None:
    """`pytest.raises` of a base class without ``match`` passes for another error, such as a 409 in place of a 404."""
    bases = {"QuireError", "Exception", "BaseException"}
    bad = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if not re.search(rf"raises\([^)]*\b({'|'.join(bases)})\b", path.read_text()):
            continue  # most files need not be parsed
        for node in nodes(path):
            if not isinstance(node, ast.Call) or ast.unparse(node.func).rpartition(".")[2] != "raises":
                continue
            kinds = {ast.unparse(n).rpartition(".")[2] for a in node.args[:1] for n in ast.walk(a)}
            if kinds & bases and not any(keyword.arg == "match" for keyword in node.keywords):
                bad.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not bad, f"expect the class of the error, or give match: {bad}"


def test_planted_faults_are_where_the_code_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """`make mutants`, which takes hours, refuses a table whose text has gone from the code."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    table = importlib.import_module("mutant_table").MUTANTS
    code = {path: (ROOT / path).read_text() for path in {mutant.file for mutant in table}}
    gone = [mutant.name for mutant in table if code[mutant.file].count(mutant.old) != mutant.count]
    assert not gone, f"bring their texts in tools/mutant_table.py and tools/planted up to date: {gone}"
    functions = {
        tuple(test.partition("[")[0].split("::")) for mutant in table for test in mutant.tests if "::" in test
    }
    lost = [name for name in functions if f"def {name[-1]}(" not in (ROOT / name[0]).read_text()]
    assert not lost, f"planted faults name tests that are not there: {lost}"


def test_the_clock_is_injected_below_the_engine() -> None:
    """No `time.*` outside `engine/` and the ranks above it."""
    allowed = (
        "quire/clock.py",
        "quire/engine/",
        "quire/executor/",
        "quire/runner/",
        "quire/api/",
        "quire/cli/",
        "quire/http/front",  # two processes compare their clocks
        "quire/models/",
        "quire_gateway/",
        "quire_lab/bench/",
        "quire_lab/cli/",
    )
    bad = []
    for file, node in all_nodes():
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        imports = "time" in names or (isinstance(node, ast.ImportFrom) and node.module == "time")
        if imports and not file.startswith(allowed):
            bad.append(file)
    assert not bad


def test_public_functions_have_return_types() -> None:
    bad = [f"{f}:{d.name}" for f, d in functions() if d.returns is None and not is_triton_kernel(d)]
    assert not bad


# Both numbers only shrink.
MAX_PRIVATE_TOUCHES = 51
MAX_TUNING_NUMBERS = 450
# What has a leading underscore and is public: named tuples, and the end of a process without clean-up.
PUBLIC = {"_replace", "_fields", "_asdict", "_make", "_exit"}
# Defaults that tune nothing: off, on, the neutral element.
NEUTRAL = {"0", "1", "-1", "0.0", "1.0", "-1.0", "2"}


def test_tests_read_few_private_attributes() -> None:
    touches = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if re.search(r"\._[a-z]", path.read_text())
        for node in nodes(path)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and node.attr not in PUBLIC
        and ast.unparse(node.value) not in ("self", "cls", "super()")
    ]
    assert len(touches) <= MAX_PRIVATE_TOUCHES, "\n".join(touches)


def is_number(value: ast.expr | None) -> bool:
    match value:
        case ast.Constant(value=number):
            return isinstance(number, int | float) and not isinstance(number, bool)
        case ast.UnaryOp(operand=operand):
            return is_number(operand)
        case ast.BinOp(left=left, right=right):
            return is_number(left) and is_number(right)
        case ast.Tuple(elts=items):
            return bool(items) and all(map(is_number, items))
    return False


def tuning_numbers(path: Path) -> Iterator[str]:
    """Name the numbers of a module: its constants, and the defaults in its classes that are not neutral."""
    tree = parsed(path)
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                pairs = list(zip(names, values, strict=True))
            case ast.Assign(targets=targets, value=value):
                pairs = [(target, value) for target in targets]
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                pairs = [(target, value)]
            case _:
                continue
        yield from (ast.unparse(name) for name, value in pairs if is_number(value))
    for owner in (node for node in nodes(path) if isinstance(node, ast.ClassDef)):
        for node in owner.body:
            if isinstance(node, ast.AnnAssign) and is_number(node.value):
                assert node.value is not None
                if ast.unparse(node.value) not in NEUTRAL:
                    yield f"{owner.name}.{ast.unparse(node.target)}"


def test_numbers_that_tune_behaviour_do_not_grow() -> None:
    numbers = {f"{name_of(path)} {number}" for path in FILES for number in tuning_numbers(path)}
    reasons = tomllib.loads((ROOT / "tests/fixed_numbers.toml").read_text()).values()
    fixed = [
        f"{file} {name}"
        for group in reasons
        for file in group
        if file != "why"
        for name in group[file].split()
    ]
    assert sorted(fixed) == sorted(set(fixed))
    assert set(fixed) <= numbers, f"tests/fixed_numbers.toml: {sorted(set(fixed) - numbers)}"
    assert len(numbers) - len(fixed) <= MAX_TUNING_NUMBERS, sorted(numbers - set(fixed))
