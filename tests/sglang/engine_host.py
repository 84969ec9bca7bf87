"""Runs engine jobs from one process that imported SGLang once: `python engine_host.py AT_ONCE BASE ...`.

An engine spawns a scheduler and a detokenizer, and each would import SGLang again, 10 s of CPU apiece; here they are
forked, which is safe without a GPU. The job of BASE is BASE.job, with its environment; BASE.json and BASE.log result,
and BASE.rc when it is over.
"""

import json
import multiprocessing
import os
import sys
import traceback
from pathlib import Path


def main(argv: list[str]) -> None:
    _fork_everywhere()
    # what an engine's processes import
    from sglang.srt.plugins import load_plugins

    load_plugins()
    at_once, *bases = argv
    running: dict[int, Path] = {}
    for base in map(Path, bases):
        if len(running) == int(at_once):
            _reap(running)
        running[_start(base)] = base
    while running:
        _reap(running)


def _fork_everywhere() -> None:
    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = lambda *args, **kwargs: None


def _start(base: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    log = os.open(base.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        from sglang_integration.engine_run import run_job

        job = json.loads(base.with_suffix(".job").read_text())
        os.environ.update(job["environment"])
        base.with_suffix(".json").write_text(json.dumps(run_job(job)))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _reap(running: dict[int, Path]) -> None:
    pid, status = os.wait()
    if pid in running:
        running.pop(pid).with_suffix(".rc").write_text(str(os.waitstatus_to_exitcode(status)))


if __name__ == "__main__":
    main(sys.argv[1:])
