"""The cache of kernels and proofs: what a key holds, that a file is whole or nothing, that none but ours is used; and
the one way to launch what comes out of it."""

import ast
import ctypes
import dataclasses
import hashlib
import json
import logging
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from cute_megakernel import build, cache
from cute_megakernel.launch import ADDRESSES, NUMBERS, TYPES, DeviceKernel, kernel_name
from cute_megakernel.recording import record_step
from cute_megakernel.schedule import Schedule, make_schedule
from cute_megakernel.schedule_error import ScheduleError
from cute_megakernel.shape import THREADS, SharedLayout
from kimi_kernels.backends import BackendError
from kimi_kernels.config import K3_MINI

ROOT = Path(__file__).parent.parent
CODE = b"\x7fELF \x00.rela.text.kernel_decode_step_0\x00.text.kernel_decode_step_0\x00"


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def schedule() -> Schedule:
    return make_schedule(record_step(K3_MINI, 2), K3_MINI, sms=7)


def key(name: str = "a") -> str:
    return cache.key_of("kernel", name=name)


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def fresh_process(script: str, cwd: Path, **environment: str) -> str:
    """The last line that `script` prints in a process of its own."""
    paths = os.pathsep.join((str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, "PYTHONPATH": paths, **environment}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()[-1]


def test_what_was_stored_is_loaded_under_its_own_key_only(folder):
    assert cache.load(key()) is None
    cache.store(key(), b"data\nof bytes")
    assert cache.load(key()) == b"data\nof bytes"
    assert cache.load(key("b")) is None
    assert oct(folder.stat().st_mode & 0o777) == "0o700"


def test_the_directory_is_the_users_cache_unless_one_is_named(monkeypatch, tmp_path):
    monkeypatch.delenv(cache.VARIABLE, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache.directory() == tmp_path / ".cache/kimi-kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.directory() == tmp_path / "xdg/kimi-kernels"


@pytest.mark.parametrize("damage", ("cut", "bit", "empty", "key", "foreign"))
def test_a_damaged_or_foreign_file_is_made_anew_with_one_line(folder, damage, caplog, monkeypatch):
    cache.store(key(), b"data")
    path = only_file(folder)
    whole = path.read_bytes()
    flipped = whole[:-1] + bytes([whole[-1] ^ 1])
    spoilt = {"cut": whole[:-1], "bit": flipped, "empty": b"", "key": whole.replace(b'"a"', b'"c"'), "foreign": whole}
    path.write_bytes(spoilt[damage])
    if damage == "foreign":
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        monkeypatch.setattr(cache.os, "fstat", lambda _: SimpleNamespace(st_uid=54321))
    with caplog.at_level(logging.WARNING):
        assert cache.load(key()) is None
    assert len(caplog.records) == 1 and "is damaged or of another user" in caplog.text
    monkeypatch.undo()
    monkeypatch.setenv(cache.VARIABLE, str(folder))
    cache.store(key(), b"data")
    assert cache.load(key()) == b"data"


def test_readers_see_all_of_a_file_or_nothing(folder):
    """While it is written again and again; and no other file is left behind."""
    data, done, seen = [bytes([i]) * 300_000 for i in range(4)], threading.Event(), []

    def read():
        while not done.is_set():
            seen.append(cache.load(key()))

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for turn in range(60):
        cache.store(key(), data[turn % 4])
    done.set()
    for reader in readers:
        reader.join()
    assert set(seen) <= {None, *data} and len(seen) > 10
    assert len(list(folder.iterdir())) == 1


def test_a_write_that_fails_leaves_nothing(folder, monkeypatch, caplog):
    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(cache.os, "replace", full)
    cache.store(key(), b"data")
    assert "cannot be written: no space left" in caplog.text
    assert not list(folder.iterdir()) and cache.load(key()) is None


@pytest.mark.parametrize("place", ("a file", "nowhere"))
def test_a_directory_that_cannot_be_used_breaks_nothing(place, tmp_path, monkeypatch):
    """A file in its place stands for a read-only one: root may write everywhere."""
    (tmp_path / "file").touch()
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "file/cache") if place == "a file" else "/proc/none/cache")
    monkeypatch.setattr(build, "compile_kernel", lambda *_: SimpleNamespace(__cubin__=CODE))
    build.machine_code.cache_clear()
    assert build.machine_code(schedule().shape, "sm_90a") == CODE
    build.prove(schedule())


def test_the_key_of_a_kernel_names_all_it_depends_on(monkeypatch):
    shape = schedule().shape
    first = build.kernel_key(shape, "sm_90a")
    others = [build.kernel_key(shape, "sm_100a")]
    for field in dataclasses.fields(shape):
        value = getattr(shape, field.name)
        changed = dataclasses.replace(shape, **{field.name: not value if isinstance(value, bool) else value + 1})
        others.append(build.kernel_key(changed, "sm_90a"))
    with monkeypatch.context() as patch:
        patch.setattr(build.importlib.metadata, "version", lambda _: "9.9.9")
        others.append(build.kernel_key(shape, "sm_90a"))
    with monkeypatch.context() as patch:
        patch.setenv("CUTE_DSL_LINEINFO", "1")
        others.append(build.kernel_key(shape, "sm_90a"))
    with monkeypatch.context() as patch:
        patch.setattr(cache, "sources", lambda: "other sources")
        others.append(build.kernel_key(shape, "sm_90a"))
    assert len({first, *others}) == 1 + len(others)
    assert build.kernel_key(schedule().shape, "sm_90a") == first and "\n" not in first


def test_the_sources_are_all_files_of_the_package(tmp_path, monkeypatch):
    """A changed, a new and a renamed file each give another digest."""
    monkeypatch.setattr(cache, "__file__", str(tmp_path / "cache.py"))
    digest = cache.sources.__wrapped__
    (tmp_path / "stages").mkdir()
    (tmp_path / "kernel.py").write_text("a")
    seen = [digest()]
    (tmp_path / "kernel.py").write_text("b")
    seen.append(digest())
    (tmp_path / "stages/linear.py").write_text("c")
    seen.append(digest())
    (tmp_path / "stages/linear.py").rename(tmp_path / "stages/other.py")
    assert len({*seen, digest()}) == 4


def test_a_kernel_is_compiled_once(folder, monkeypatch):
    made = []
    monkeypatch.setattr(build, "compile_kernel", lambda *a: made.append(a) or SimpleNamespace(__cubin__=CODE))
    shape = schedule().shape
    for _ in range(3):  # as three processes
        build.machine_code.cache_clear()
        assert build.machine_code(shape, "sm_90a") == CODE
    assert made == [(shape, "sm_90a")]
    only_file(folder).write_bytes(b"\x00")
    build.machine_code.cache_clear()
    assert build.machine_code(shape, "sm_90a") == CODE and len(made) == 2


def test_a_schedule_is_proved_once_and_a_broken_one_never(folder, monkeypatch):
    proved, validate = [], build.validate
    monkeypatch.setattr(build, "validate", lambda s: (validate(s), proved.append(s)))
    for _ in range(2):
        build.prove(schedule())
    assert len(proved) == 1
    broken = schedule()
    broken.work[3][5] = (0, 0)
    for _ in range(2):
        with pytest.raises(ScheduleError):
            build.prove(broken)
    assert len(list(folder.iterdir())) == 1


def test_equal_schedules_have_equal_keys_in_every_process(folder):
    """Else nothing would be found again."""
    script = (
        "from test_megakernel_cache import schedule; import hashlib, pickle;"
        "print(hashlib.sha256(pickle.dumps(schedule())).hexdigest())"
    )
    here = hashlib.sha256(pickle.dumps(schedule())).hexdigest()
    assert {fresh_process(script, folder.parent, PYTHONHASHSEED=seed) for seed in ("1", "2")} == {here}


def test_a_fresh_process_takes_the_kernel_from_the_cache_without_the_compiler(folder):
    """Compiled for real in one process, with delays and trace; the next one does not even import the DSL."""
    script = (
        "import json, sys; from test_megakernel_cache import schedule; from cute_megakernel import build, launch;"
        "from dataclasses import replace; shape = replace(schedule().shape, delay=True, trace=True);"
        "code = build.machine_code(shape, 'sm_90a');"
        "print(json.dumps([launch.kernel_name(code), len(code), 'cutlass' in sys.modules]))"
    )
    found = [json.loads(fresh_process(script, folder.parent, CUDA_VISIBLE_DEVICES="")) for _ in range(2)]
    assert "decode_step" in found[0][0] and found[0][:2] == found[1][:2]
    assert [imported for *_, imported in found] == [True, False]
    assert [path.name for path in folder.parent.iterdir()] == ["cache"], "the compiler left files behind"


class Driver:
    """Notes what the driver is asked for; `refuse` names what it does not grant."""

    def __init__(self, refuse: str = ""):
        self.asked: list[tuple] = []
        self.refuse = refuse
        self.CUresult = SimpleNamespace(CUDA_SUCCESS=SimpleNamespace(name="CUDA_SUCCESS"))
        self.CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="shared")

    def __getattr__(self, name: str):
        def ask(*args):
            self.asked.append((name, *args))
            refused = SimpleNamespace(name="CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE")
            return refused if name == self.refuse else self.CUresult.CUDA_SUCCESS, f"made by {name}"

        return ask


def launched(driver: Driver, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
    kernel = DeviceKernel(CODE, schedule().shape)
    kernel(tuple(range(len(ADDRESSES))), tuple(range(len(NUMBERS))), 5, 6)


def test_the_one_launch_is_cooperative_and_as_large_as_its_shape(monkeypatch):
    """Fault C03: a grid that cannot be resident at once is refused by the driver instead of hanging."""
    driver, shared = Driver(), SharedLayout.of(schedule().shape).end
    launched(driver, monkeypatch)
    kernel = "made by cuModuleGetFunction"
    values = (*range(len(ADDRESSES)), *range(len(NUMBERS)), 5)
    assert driver.asked == [
        ("cuModuleLoadData", CODE),
        ("cuModuleGetFunction", "made by cuModuleLoadData", b"kernel_decode_step_0"),
        ("cuFuncSetAttribute", kernel, "shared", shared),
        ("cuLaunchCooperativeKernel", kernel, 7, 1, 1, THREADS, 1, 1, shared, 6, (values, TYPES)),
    ]
    with pytest.raises(BackendError, match="cuLaunchCooperativeKernel says CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE"):
        launched(Driver("cuLaunchCooperativeKernel"), monkeypatch)


def test_arguments_are_those_of_the_kernel():
    """Names, order and width: the driver knows none of them."""
    tree = ast.parse((ROOT / "cute_megakernel/kernel.py").read_text())
    (kernel,) = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "decode_step")
    assert [arg.arg for arg in kernel.args.args] == [*ADDRESSES, *NUMBERS, "limit_ns"]
    widths = {"Int32": 4, "Int64": 8}
    assert [widths[ast.unparse(arg.annotation)] for arg in kernel.args.args] == [ctypes.sizeof(t) for t in TYPES]


def test_a_cubin_with_two_kernels_is_refused():
    assert kernel_name(CODE) == "kernel_decode_step_0"
    with pytest.raises(ValueError):
        kernel_name(CODE + b".text.other\x00")


@pytest.mark.gpu
def test_an_instance_from_the_cache_gives_the_same_step_mini(folder):
    """Built and launched in two fresh processes; prints how long each took to build the instance."""
    script = (
        "import hashlib, json, time, torch; from megakernel_cases import *;"
        "model = mini('k3'); state = random_state(model); start = time.monotonic();"
        "kernel = kernel_of(model, 4, state); took = time.monotonic() - start;"
        "logits = run(kernel, tokens_of(model, 4), batch_of([3, 0, 7, 5], [33, 1, 64, 17]));"
        "print(json.dumps([hashlib.sha256(logits.view(torch.int16).cpu().numpy().tobytes()).hexdigest(), took]))"
    )
    found = [json.loads(fresh_process(script, folder.parent)) for _ in range(2)]
    print(f"instance built in {found[0][1]:.2f} s, from the cache in {found[1][1]:.2f} s")
    assert found[0][0] == found[1][0]
    assert sorted(path.name.split("-")[0] for path in folder.iterdir()) == ["kernel", "proof"]
