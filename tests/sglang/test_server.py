"""SGLang's HTTP server with the flag, started as a user starts it: fresh processes that find the plugin themselves."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from engine_jobs import ENGINE, ENVIRONMENT, prompts

SECONDS = 150
REQUESTS = (3, 5)
NEW = 2


def get(url: str, body: dict | None = None) -> dict:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        return json.loads(answer.read() or b"{}")


@pytest.fixture
def server(tiny, tmp_path):
    """Address and log file of a server of the tiny Kimi-Linear."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(tiny / "kimi-linear")]
    command += ["--host", "127.0.0.1", "--port", str(port), "--enable-nvidia-megakernel"]
    for name, value in ENGINE.items():
        flag = f"--{name.replace('_', '-')}"
        command += [flag] if value is True else [] if value is False else [flag, str(value)]
    environment = {**os.environ, **ENVIRONMENT, "KIMI_SGLANG_RUNNER": "reference"}
    log = tmp_path / "server.log"
    with log.open("w") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)
    try:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + SECONDS
        while not healthy(url):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.5)
        yield url, log
    finally:
        process.terminate()
        process.wait(30)


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def test_requests_over_http_give_the_engines_tokens(engines, server):
    url, log = server
    assert get(f"{url}/server_info")["enable_nvidia_megakernel"] is True

    def ask(request: int) -> dict:
        parameters = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
        return get(f"{url}/generate", {"input_ids": prompts()[request], "sampling_params": parameters})

    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(ask, REQUESTS))
    want = engines.outcome("kimi-linear stock").rounds[0]["tokens"]
    assert [answer["output_ids"] for answer in answers] == [want[request][:NEW] for request in REQUESTS]
    assert "NVIDIA megakernel: active (kimi-kernels-kimi-linear:" in log.read_text()
