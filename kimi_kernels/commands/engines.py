"""Starts SGLang's engines as programs, `sglang_integration.engine_run`, and collects their results and logs."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from kimi_kernels.commands import UsageError

PROGRAM = "sglang_integration.engine_run"
ERROR_LINES = 12


def run_engines(jobs: dict[str, dict], at_once: bool) -> dict[str, tuple[dict, str]]:
    """Name -> result and log of each job's engine. Raises UsageError with the end of the log of one that failed.

    One after the other; or, `at_once`, all start together and run their rounds one after the other.
    """
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        engines = {name: Engine(name, job, Path(folder), wait=at_once) for name, job in jobs.items()}
        if at_once:
            for engine, port in zip(engines.values(), free_ports(len(jobs)), strict=True):
                engine.job["engine"].setdefault("nccl_port", port)
                stack.enter_context(engine)
            for engine in engines.values():
                engine.wait_until_ready()
            return {name: engine.run() for name, engine in engines.items()}
        results = {}
        for name, engine in engines.items():
            with engine:
                results[name] = engine.run()
        return results


def free_ports(count: int) -> list[int]:
    """Different ones; engines that start together would find the same."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


class Engine:
    """One engine's process, from `with` to its end; it leaves no process behind."""

    def __init__(self, name: str, job: dict, folder: Path, wait: bool):
        self.name, self.job = name, {**job, "engine": dict(job["engine"]), "wait": wait}
        self._files = {suffix: folder / f"{name}.{suffix}" for suffix in ("job", "result", "log", "ready")}

    def __enter__(self) -> "Engine":
        self._files["job"].write_text(json.dumps(self.job))
        command = [sys.executable, "-m", PROGRAM, *(str(self._files[suffix]) for suffix in ("job", "result", "ready"))]
        with self._files["log"].open("w") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, **self.job.get("environment", {})},
                start_new_session=True,
            )
        return self

    def __exit__(self, *_) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def wait_until_ready(self) -> None:
        while not self._files["ready"].exists():
            if self._process.poll() is not None:
                raise UsageError(self._failure())
            time.sleep(0.1)

    def run(self) -> tuple[dict, str]:
        """Lets the engine begin, if it waits, and returns its result and log at its end."""
        self._process.communicate("go\n")
        if self._process.returncode:
            raise UsageError(self._failure())
        return json.loads(self._files["result"].read_text()), self._files["log"].read_text()

    def _failure(self) -> str:
        end = "\n  ".join(self._files["log"].read_text().strip().splitlines()[-ERROR_LINES:])
        return f"the {self.name} engine ended with {self._process.returncode}:\n  {end}"
