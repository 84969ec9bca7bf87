"""`kimi-kernels serve-check` with answers in place of engines: what it starts, how it compares, what it prints."""

import json

import pytest

from kimi_kernels.cli import main
from kimi_kernels.commands import serve_check

STOCK = {"tokens": [[5, 6, 7], [8, 9, 10]], "logprobs": [[-1.0, -2.0, -3.0], [-1.5, -2.5, -3.5]], "seconds": 0.6}
FLAG = {"tokens": [[5, 6, 7], [8, 4, 2]], "logprobs": [[-1.0, -2.25, -3.0], [-1.5, -9.0, -9.0]], "seconds": 0.3}
LOG = "[2026-01-01] NVIDIA megakernel: active (kimi-kernels-k3: triton ops)\n[2026-01-01] Prefill batch\n"


@pytest.fixture
def checkpoint(tmp_path):
    assert main(["make-mini", str(tmp_path / "mini"), "--family", "k3"]) == 0
    return str(tmp_path / "mini")


@pytest.fixture
def jobs(monkeypatch) -> dict:
    """Answers in place of engines; what each was started with."""
    started: dict = {}

    def run_engine(name: str, job: dict) -> tuple[dict, str]:
        started[name] = job
        full = STOCK if name == "stock" else FLAG
        return {"rounds": [full, full | {"seconds": 0.1}, full]}, LOG

    monkeypatch.setattr(serve_check, "_run_engine", run_engine)
    monkeypatch.setattr(serve_check.importlib.util, "find_spec", lambda package: object())
    return started


def arguments(checkpoint: str) -> list[str]:
    settings = '{"attention_backend": "triton"}'
    return ["serve-check", checkpoint, "--batch", "2", "--new", "3", "--prompt-length", "4", "--engine", settings]


def test_both_engines_get_the_same_prompts(checkpoint, jobs, capsys):
    capsys.readouterr()
    assert main([*arguments(checkpoint), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    stock, flag = jobs["stock"]["engine"], jobs["flag"]["engine"]
    assert flag == stock | {"enable_nvidia_megakernel": True} and stock["attention_backend"] == "triton"
    assert jobs["stock"]["rounds"] == jobs["flag"]["rounds"]
    # a warm-up, then prefill alone and the timed round
    assert [round_["new"] for round_ in jobs["flag"]["rounds"]] == [[3, 3], [1, 1], [3, 3]]
    assert [len(prompt) for prompt in result["prompts"]] == [4, 4]
    assert all(0 <= token < 320 for prompt in result["prompts"] for token in prompt)


def test_texts_are_compared_until_they_part(checkpoint, jobs, capsys):
    """After the first other token the logprobs are of different texts. Time is of decode steps: less the prefill."""
    capsys.readouterr()
    assert main([*arguments(checkpoint), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["equal_tokens"] == [3, 1]
    assert result["worst_logprob_difference"] == 0.25
    assert result["ms_per_token"] == {"stock": pytest.approx(250.0), "flag": pytest.approx(100.0)}
    assert result["log"] == ["NVIDIA megakernel: active (kimi-kernels-k3: triton ops)"]


def test_the_text_shows_both_sides(checkpoint, jobs, capsys):
    assert main([*arguments(checkpoint), "--against", "per-op"]) == 0
    out = capsys.readouterr().out
    assert jobs["per-op"]["engine"]["linear_attn_decode_backend"] == "kimi_triton"
    for part in (
        "stock       250.000 ms per token",
        "per-op      100.000 ms per token",
        "differ by 2.50e-01",
        "log   ",
    ):
        assert part in out


def test_an_engine_that_fails_ends_the_command_with_the_end_of_its_log(checkpoint, monkeypatch, capsys):
    monkeypatch.setattr(serve_check.importlib.util, "find_spec", lambda package: object())
    monkeypatch.setattr(serve_check, "PROGRAM", "kimi_kernels.no_such_program")
    assert main(["serve-check", checkpoint]) == 2
    error = capsys.readouterr().err
    assert "the stock engine ended with 1" in error and "No module named kimi_kernels.no_such_program" in error


def test_without_sglang_the_command_says_what_to_install(checkpoint, monkeypatch, capsys):
    monkeypatch.setattr(serve_check.importlib.util, "find_spec", lambda package: None)
    assert main(["serve-check", checkpoint]) == 2
    assert 'serve-check needs the package sglang (pip install "kimi-kernels[sglang]")' in capsys.readouterr().err


@pytest.mark.parametrize("text, message", [("[1]", "expected a JSON object"), ("{", "not JSON")])
def test_engine_settings_that_are_no_object(checkpoint, text, message, capsys):
    assert main(["serve-check", checkpoint, "--engine", text]) == 2
    assert message in capsys.readouterr().err
