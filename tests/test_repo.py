"""Rules of the repository that a machine can hold: name parity, documented paths, size limits, import directions,
bans."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kimi_kernels import reference
from kimi_kernels.op_specs import OPS, markdown_table

ROOT = Path(__file__).parent.parent
PACKAGES = ("kimi_kernels", "triton_ops", "cute_megakernel", "sglang_integration")
SOURCES = [p for package in PACKAGES for p in sorted((ROOT / package).rglob("*.py"))]
DOCS = ("README.md", "DESIGN.md", "MEASURED.md", "CONTRIBUTING.md")
# of cute_megakernel: written in the DSL, import it
DSL_MODULES = ("ptx", "core", "kernel", "stream", "stream_slots", "stream_experts", "stages")
ALLOWED_IMPORTS = {
    "kimi_kernels": {"kimi_kernels"},
    "triton_ops": {"triton_ops", "kimi_kernels"},
    "cute_megakernel": {"cute_megakernel", "kimi_kernels"},
    "sglang_integration": set(PACKAGES),
}


@pytest.mark.parametrize("op", OPS)
def test_an_op_has_one_name_and_one_signature_everywhere(op):
    want = list(OPS[op].args)
    kernel = getattr(importlib.import_module("triton_ops"), op)
    assert list(inspect.signature(getattr(reference, op)).parameters) == want
    assert list(inspect.signature(kernel).parameters) == want
    assert Path(inspect.getsourcefile(kernel)).name == f"{op}.py"
    assert (ROOT / "tests" / f"test_{op}.py").exists()


def test_ops_stand_in_the_order_of_the_step():
    """The reference, `triton_ops.__init__` and the table list the ops in one order."""
    order = list(OPS)
    defined = [n.name for n in ast.parse(inspect.getsource(reference)).body if isinstance(n, ast.FunctionDef)]
    assert [name for name in defined if name in OPS] == order
    tree = ast.parse((ROOT / "triton_ops/__init__.py").read_text())
    imported = [alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted(imported) == sorted(order)


def test_every_op_of_the_table_runs_in_some_step():
    used = {call.func.attr for call in ast.walk(ast.parse((ROOT / "kimi_kernels/decode_step.py").read_text()))
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)}  # fmt: skip
    assert set(OPS) <= used


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_only_one_module_names_sglang(path):
    """`sglang_integration/compat.py` imports SGLang when a name is first used; nothing else does, at any depth."""
    tree = ast.parse(path.read_text())
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level]
    strings = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    names += [text for text in strings if re.fullmatch(r"sglang(\.\w+)+", text)]
    found = [name for name in names if name.split(".")[0] == "sglang"]
    assert not found or path == ROOT / "sglang_integration/compat.py", found


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_source_limits_and_import_direction(path):
    text = path.read_text()
    lines = text.count("\n")
    package = path.relative_to(ROOT).parts[0]
    assert lines <= (400 if package == "triton_ops" else 600), f"{lines} lines"
    tree = ast.parse(text)
    assert ast.get_docstring(tree), "module docstring missing"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 120, f"{node.name} is {node.end_lineno - node.lineno} lines long"
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        for name in names:
            top = name.split(".")[0]
            assert top not in PACKAGES or top in ALLOWED_IMPORTS[package], f"{package} must not import {name}"
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            text_of = ast.unparse(node)
            assert not re.search(r"\bsglang\b", text_of), f"{text_of} must not run on import"
            if not (package == "cute_megakernel" and path.relative_to(ROOT).with_suffix("").parts[1] in DSL_MODULES):
                assert not re.search(r"\b(cutlass|cuda\.bindings)\b", text_of), f"{text_of} must not run on import"
            assert package == "triton_ops" or not re.search(r"import triton\b|from triton\b", text_of)


def test_median_source_file_is_short():
    lengths = sorted(p.read_text().count("\n") for p in SOURCES)
    assert lengths[len(lengths) // 2] < 200


@pytest.mark.parametrize("doc", DOCS)
def test_documents_name_only_paths_that_exist(doc):
    text = (ROOT / doc).read_text()
    named = re.findall(r"`((?:[\w.-]+/)*[\w.-]+\.(?:py|md|toml|json|txt|png))`", text)
    folders = ("", "kimi_kernels", "triton_ops", "sglang_integration", "tests", "benchmarks")
    outside = {"config.json", "model.safetensors.index.json"}  # files of a checkpoint
    missing = [n for n in named if n not in outside and not any((ROOT / f / n).exists() for f in folders)]
    assert not missing, f"{doc} names {missing}"


def test_design_shows_the_op_table():
    shown = (ROOT / "DESIGN.md").read_text().split("<!-- ops -->\n")[1].split("<!-- /ops -->")[0].strip()
    assert shown == markdown_table(), "run python -m kimi_kernels.op_specs and paste"


FAULTS = """
    N01 N03 N06 N07 N09 N11 N13 N14 N16 N18 N20 N21 N22 N23 N25 N27 N28 N30 N31 N33
    I01 I02 I04 I06 I07 I09 I10 I11 I13 I14 I15 I16 I18 I19 I20 I22 I23 I24
    S01 S03 S05 S06 S07 S08 S09 S10 S11 S13
    G01 G02 G04 G05 C01 C03 C05 C07 C08 C10 C11 C14 C15 T01 T03 T05 T06 T08 T09 T10 T11 T12 T14 T15 P01 P09 P10 X01
    X03
""".split()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_test_names_every_known_fault(fault):
    """The ids are public faults of decode kernels, collected from issue trackers; a test that guards against one names
    it: numerics (N), indexing (I), state (S), graphs (G), concurrency (C), model and engine (T), speed (P), toolchain
    (X)."""
    texts = [p.read_text() for p in sorted((ROOT / "tests").rglob("*.py")) if p.name != Path(__file__).name]
    assert any(re.search(rf"\b{fault}\b", text) for text in texts), f"no test names fault {fault}"


BANS = {
    r"^\s*#\s*[-=#]{5,}": "banner",
    r"\bTODO\b(?!\()": "TODO without an anchor",
    r"(?<![\w.])print\(": "print in a package",
    r"/(?:home|root|tmp|work)/": "path of one machine",
}


@pytest.mark.parametrize("ban", BANS)
def test_banned_patterns(ban):
    allowed = {"print in a package": {"cli.py", "bench.py"}}.get(BANS[ban], set())
    hits = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in SOURCES
        if path.name not in allowed
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(ban, line)
    ]
    assert not hits, f"{BANS[ban]}: {hits}"


def test_packages_import_without_gpu_and_without_optional_packages():
    """X03: all of the megakernel but what is written in the DSL."""
    parts = ("megakernel", "schedule", "recording", "lowering", "encode", "images", "table", "shape", "rows", "build")
    code = "import kimi_kernels, triton_ops, sglang_integration, " + ", ".join(f"cute_megakernel.{p}" for p in parts)
    names = ("cutlass", "cuda", "sglang", "transformers", "fla")
    blocked = f"import sys; [sys.modules.__setitem__(m, None) for m in {names}]; "
    done = subprocess.run([sys.executable, "-c", blocked + code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
