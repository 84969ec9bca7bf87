"""`kimi-kernels serve-check` with answers in place of engines: what it starts, how it compares, what it prints."""

import json

import pytest

from kimi_kernels.cli import main
from kimi_kernels.commands import UsageError, engines, serve_check

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

    def run_engines(asked: dict, at_once: bool) -> dict:
        started.update(asked, at_once=at_once)
        return {name: (answer(STOCK if name == "stock" else FLAG, job["rounds"]), LOG) for name, job in asked.items()}

    monkeypatch.setattr(serve_check, "run_engines", run_engines)
    monkeypatch.setattr(serve_check.importlib.util, "find_spec", lambda package: object())
    return started


def answer(full: dict, rounds: list[dict]) -> dict:
    """For each round as many sequences as it has prompts; rounds of one token take 0.1 s, with logprobs a second."""
    cut = [
        {key: full[key][: len(round_["prompts"])] for key in ("tokens", "logprobs")}
        | {"seconds": 0.1 if round_["new"][0] == 1 else 1.0 if round_.get("logprobs") else full["seconds"]}
        for round_ in rounds
    ]
    return {"start_seconds": 7.0, "rounds": cut}


def arguments(checkpoint: str) -> list[str]:
    settings = '{"attention_backend": "triton"}'
    return ["serve-check", checkpoint, "--batch", "2,1", "--new", "3", "--prompt-length", "4", "--engine", settings]


def test_all_engines_get_the_same_prompts(checkpoint, jobs, capsys):
    capsys.readouterr()
    assert main([*arguments(checkpoint), "--json", "--against", "flag,triton"]) == 0
    result = json.loads(capsys.readouterr().out)
    stock, flag = jobs["stock"]["engine"], jobs["flag"]["engine"]
    assert flag == stock | {"enable_nvidia_megakernel": True} and stock["attention_backend"] == "triton"
    assert jobs["triton"]["engine"] == flag and jobs["triton"]["environment"] == {"KIMI_SGLANG_RUNNER": "triton"}
    assert jobs["stock"]["rounds"] == jobs["flag"]["rounds"] == jobs["triton"]["rounds"] and not jobs["at_once"]
    # for each batch a warm-up with logprobs, then prefill alone and the timed round
    assert [round_.get("logprobs", False) for round_ in jobs["flag"]["rounds"]] == [True, False, False] * 2
    assert [round_["new"] for round_ in jobs["flag"]["rounds"]] == [[3, 3], [1, 1], [3, 3], [3], [1], [3]]
    assert [len(prompt) for prompt in result["prompts"]] == [4, 4]
    assert all(0 <= token < 320 for prompt in result["prompts"] for token in prompt)


def test_texts_are_compared_until_they_part(checkpoint, jobs, capsys):
    """After the first other token the logprobs are of different texts. Time is of decode steps: less the prefill."""
    capsys.readouterr()
    assert main([*arguments(checkpoint), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    two, one = result["batches"]
    assert (two["batch"], two["equal_tokens"], one["batch"], one["equal_tokens"]) == (
        2, {"flag": [3, 1]}, 1, {"flag": [3]},
    )  # fmt: skip
    assert two["worst_logprob_difference"] == {"flag": 0.25}
    assert two["ms_per_token"] == {"stock": pytest.approx(250.0), "flag": pytest.approx(100.0)}
    assert result["log"]["flag"] == ["NVIDIA megakernel: active (kimi-kernels-k3: triton ops)"]
    assert result["start_seconds"] == {"stock": 7.0, "flag": 7.0}


def test_the_text_shows_all_sides(checkpoint, jobs, capsys):
    assert main([*arguments(checkpoint), "--against", "per-op", "--at-once"]) == 0
    out = capsys.readouterr().out
    assert jobs["per-op"]["engine"]["linear_attn_decode_backend"] == "kimi_triton" and jobs["at_once"]
    for part in ("250.000, 4.0", "100.000, 10.0", "4 of 6", "3 of 3", "differ by 2.50e-01", "up after 7.0 s"):
        assert part in out


@pytest.mark.parametrize("extra", (["--batch", "1,0"], ["--against", "flag,fast"], ["--engine", "[]"]))
def test_a_bad_argument_is_one_line(checkpoint, extra, capsys):
    assert main(["serve-check", checkpoint, *extra]) == 2
    assert extra[0] in capsys.readouterr().err


ENGINE = """
import json, pathlib, sys
job, result, ready = map(pathlib.Path, sys.argv[1:])
read = json.loads(job.read_text())
if read["engine"].get("fails"):
    sys.exit("no such model")
ready.touch()
line = sys.stdin.readline() if read["wait"] else ""
result.write_text(json.dumps({"line": line, "port": read["engine"].get("nccl_port")}))
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A program that ends at once in place of the one that runs an engine."""
    (tmp_path / "small_engine.py").write_text(ENGINE)
    monkeypatch.setattr(engines, "PROGRAM", "small_engine")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.mark.parametrize("at_once", (False, True))
def test_engines_run_one_after_the_other_or_wait_for_their_turn(at_once, program):
    jobs = {name: {"engine": {}} for name in ("stock", "flag")}
    found = {name: result for name, (result, _) in engines.run_engines(jobs, at_once).items()}
    assert {result["line"] for result in found.values()} == {"go\n" if at_once else ""}
    assert (found["stock"]["port"] != found["flag"]["port"]) == at_once


@pytest.mark.parametrize("at_once", (False, True))
def test_an_engine_that_fails_ends_the_command_with_the_end_of_its_log(at_once, program):
    jobs = {"stock": {"engine": {}}, "flag": {"engine": {"fails": True}}}
    with pytest.raises(UsageError, match="the flag engine ended with 1:\n  no such model"):
        engines.run_engines(jobs, at_once)


def test_without_sglang_the_command_says_what_to_install(checkpoint, monkeypatch, capsys):
    monkeypatch.setattr(serve_check.importlib.util, "find_spec", lambda package: None)
    assert main(["serve-check", checkpoint]) == 2
    assert 'serve-check needs the package sglang (pip install "kimi-kernels[sglang]")' in capsys.readouterr().err


@pytest.mark.parametrize("text, message", [("[1]", "expected a JSON object"), ("{", "not JSON")])
def test_engine_settings_that_are_no_object(checkpoint, text, message, capsys):
    assert main(["serve-check", checkpoint, "--engine", text]) == 2
    assert message in capsys.readouterr().err
