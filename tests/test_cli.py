"""The tool: what each command prints as text and as JSON, and one line of error for every kind of bad input."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

import kimi_kernels.compare_step as compare_step
from kimi_kernels import cli
from kimi_kernels.backends import make_ops
from kimi_kernels.checkpoint import load_weights
from kimi_kernels.cli import main
from kimi_kernels.config import K3_MINI, KIMI_LINEAR_MINI
from kimi_kernels.decoder import Decoder
from kimi_kernels.hf_config import load_config

FAMILIES = ("k3", "kimi-linear")
PROGRAM = [sys.executable, "-W", "ignore", "-m", "kimi_kernels.cli"]
SLOW = "no CUDA device: Triton runs in its interpreter, slowly"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict:
    root = tmp_path_factory.mktemp("cli")
    for family in FAMILIES:
        assert main(["make-mini", str(root / family), "--family", family, "--seed", "3"]) == 0
    return {family: root / family for family in FAMILIES}


@pytest.fixture
def run(capsys):
    """Runs a command in this process. -> exit code, stdout, stderr"""

    def call(*argv) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(arg) for arg in argv])
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def run_json(run):
    """Runs a command with --json and checks that stdout is one object and stderr has no error."""

    def call(*argv) -> dict:
        code, out, err = run(*argv, "--json")
        assert code == 0 and "error" not in err, err
        assert out.endswith("}\n") and out.count("\n") == 1
        return json.loads(out)

    return call


def error_of(result: tuple[int, str, str], code: int = 2) -> str:
    """The message of a run that must fail with exactly one line."""
    got, out, err = result
    assert (got, out) == (code, ""), (got, out, err)
    lines = [line for line in err.splitlines() if not line.endswith(SLOW)]
    assert len(lines) == 1 and lines[0].startswith("kimi-kernels: error: "), err
    return lines[0].removeprefix("kimi-kernels: error: ")


@pytest.fixture(scope="module")
def expected(checkpoints) -> dict:
    """Greedy tokens of each family after 5, 17, from the library."""
    tokens = {}
    for family, directory in checkpoints.items():
        config = load_config(directory)
        decoder = Decoder(config, load_weights(directory, config, progress=False), "reference")
        tokens[family] = decoder.generate([[5, 17]], 4).tokens[0]
    return tokens


# what the commands print


def test_make_mini_says_what_it_wrote(tmp_path, run_json):
    result = run_json("make-mini", tmp_path / "m", "--family", "kimi-linear", "--seed", "7")
    assert result["files"] == ["config.json", "model.safetensors"] and result["seed"] == 7
    assert result["bytes"] == sum(path.stat().st_size for path in (tmp_path / "m").iterdir())


@pytest.mark.parametrize("family", FAMILIES)
def test_decode_prints_the_generated_ids(family, checkpoints, expected, run, run_json):
    argv = (
        "decode",
        checkpoints[family],
        "--tokens",
        "5,17",
        "--new",
        "4",
        "--backend",
        "reference",
        "--device",
        "cpu",
    )
    result = run_json(*argv)
    assert result["tokens"] == expected[family]
    assert result["prompt_tokens"] == [5, 17] and result["text"] is None and result["seconds_per_token"] > 0
    code, out, _ = run(*argv)
    assert code == 0 and ", ".join(map(str, expected[family])) in out and "ms per token" in out


def test_one_new_token_has_no_time_per_token(checkpoints, expected, run_json):
    result = run_json("decode", checkpoints["k3"], "--tokens", "5,17", "--new", "1", "--backend", "reference")
    assert result["tokens"] == expected["k3"][:1] and result["seconds_per_token"] is None


def test_decode_on_triton_gives_the_same_ids_and_says_that_it_is_slow(checkpoints, run, run_json):
    argv = ("decode", checkpoints["kimi-linear"], "--tokens", "5", "--new", "2", "--layers", "1:3", "--backend")
    code, out, err = run(*argv, "triton", "--json")
    assert code == 0, err
    assert json.loads(out)["tokens"] == run_json(*argv, "reference")["tokens"]
    assert err == ("" if torch.cuda.is_available() else f"kimi-kernels: {SLOW}\n")


def test_a_rank_decodes_its_own_part_of_the_vocabulary(checkpoints, run_json):
    argv = ("--tokens", "5", "--new", "3", "--backend", "reference", "--tp", "2", "--tp-rank", "1", "--layers", "1:4")
    result = run_json("decode", checkpoints["k3"], *argv)
    assert (result["tp"], result["tp_rank"], result["layers"]) == (2, 1, [1, 4])
    assert all(K3_MINI.vocab_size // 2 <= token < K3_MINI.vocab_size for token in result["tokens"])


@pytest.mark.parametrize("layers", (":2", "4:", "2:3"))
def test_layers_may_leave_out_an_end(layers, checkpoints, run_json):
    argv = ("--tokens", "5", "--new", "1", "--backend", "reference", "--layers", layers)
    start, stop = layers.split(":")
    got = run_json("decode", checkpoints["k3"], *argv)["layers"]
    assert got == [int(start or 0), int(stop or K3_MINI.num_layers)]


def test_info_of_a_config_and_of_a_directory_agree(checkpoints, run, run_json):
    built_in = run_json("info", "--config", "k3-mini", "--tp", "2", "--rows", "3", "--context", "100")
    read = run_json("info", checkpoints["k3"], "--tp", "2", "--rows", "3", "--context", "100")
    assert {**built_in, "model": None} == {**read, "model": None}
    assert sum(op["weight_bytes"] + op["state_bytes"] for op in read["ops"]) == read["bytes_per_step"]
    assert sum(part["share"] for part in read["parts"]) == pytest.approx(1)
    assert read["floor_us"] == pytest.approx(read["bytes_per_step"] / 4.56e6)
    assert read["bytes_per_token"] == read["bytes_per_step"] / 3


def test_info_prints_every_op_whole(run):
    code, out, _ = run("info", "--config", "k3", "--bandwidth", "8")
    assert code == 0 and "137,917.4 MB" in out and "at 8.0 TB/s" in out and "…" not in out
    assert "moe_gate_up_mxfp4" in out and "kda_recurrent" in out


@pytest.mark.parametrize("family", FAMILIES)
def test_compare_prints_the_worst_error_of_every_op(family, checkpoints, run, run_json):
    argv = ("compare", checkpoints[family], "--right", "reference", "--steps", "2", "--device", "cpu")
    result = run_json(*argv)
    assert result["passed"] and result["steps"] == 2 and result["fed"][0] == 1
    assert {"op", "calls", "left_ratio", "right_ratio", "left_where", "right_where"} == set(result["ops"][0])
    code, out, _ = run(*argv, "--tokens", "5,17")
    assert code == 0 and "2 steps, every op within its bound" in out


@pytest.mark.parametrize("json_flag", ((), ("--json",)))
def test_a_failed_comparison_exits_with_1_and_says_where(json_flag, checkpoints, run, monkeypatch):
    broken = make_ops("reference")
    good = broken.output_gate
    broken.output_gate = lambda o, gate: good(o, gate * 1.1)
    monkeypatch.setattr(compare_step, "make_ops", lambda *_: broken)
    code, out, err = run("compare", checkpoints["k3"], "--right", "reference", "--steps", "2", *json_flag)
    assert code == 1 and err.startswith(
        "kimi-kernels: error: step 0, layer 3 mla, right side (reference): output_gate: y["
    )
    if json_flag:
        result = json.loads(out)
        assert result["passed"] is False and "output_gate" in result["failure"] and result["steps"] == 0
    else:
        assert "an op left its bound" in out


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_has_an_example(command, run, capsys):
    with pytest.raises(SystemExit) as stop:
        run(command, "--help")
    assert stop.value.code == 0
    assert "example: kimi-kernels" in capsys.readouterr().out


# text


@pytest.fixture(scope="module")
def with_tokenizer(checkpoints, tmp_path_factory) -> dict:
    """Copies of the checkpoints with a tokenizer of single words: word i is id i."""
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("transformers")
    words = ["[UNK]", "the", "cat", "sat", *(f"word{i}" for i in range(4, KIMI_LINEAR_MINI.vocab_size))]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    root = tmp_path_factory.mktemp("text")
    for family, directory in checkpoints.items():
        shutil.copytree(directory, root / family)
        tokenizer.save(str(root / family / "tokenizer.json"))
    return {family: root / family for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_prompt_goes_through_the_tokenizer(family, with_tokenizer, run_json):
    argv = ("--new", "3", "--backend", "reference")
    by_text = run_json("decode", with_tokenizer[family], "--prompt", "the cat sat", *argv)
    by_ids = run_json("decode", with_tokenizer[family], "--tokens", "1,2,3", *argv)
    assert by_text["prompt_tokens"] == [1, 2, 3] and by_text["tokens"] == by_ids["tokens"]
    assert by_text["text"] == by_ids["text"] != ""
    if family == "kimi-linear":  # its vocabulary is that of the tokenizer
        assert by_text["text"].split() == [f"word{t}" if t > 3 else "?" for t in by_text["tokens"]]


def test_an_empty_text_prompt_is_refused(with_tokenizer, run):
    assert "no tokens" in error_of(run("decode", with_tokenizer["k3"], "--prompt", "", "--new", "1"))


def test_a_text_prompt_without_tokenizer_or_transformers(checkpoints, with_tokenizer, run, run_json, monkeypatch):
    argv = ("--new", "1", "--backend", "reference")
    assert "no tokenizer" in error_of(run("decode", checkpoints["k3"], "--prompt", "the cat", *argv))
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "package transformers" in error_of(run("decode", with_tokenizer["k3"], "--prompt", "the cat", *argv))
    code, out, err = run("decode", with_tokenizer["k3"], "--tokens", "1", *argv, "--json")
    assert code == 0 and json.loads(out)["text"] is None and "ids only" in err


def test_the_code_of_a_checkpoint_is_never_run(checkpoints, tmp_path, run):
    pytest.importorskip("transformers")
    directory = tmp_path / "custom"
    shutil.copytree(checkpoints["k3"], directory)
    tokenizer = {"tokenizer_class": "Custom", "auto_map": {"AutoTokenizer": ["custom.Custom", None]}}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (directory / "custom.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Custom: pass\n")
    message = error_of(run("decode", directory, "--prompt", "the cat", "--new", "1", "--backend", "reference"))
    assert "tokenizer cannot be loaded" in message and not (tmp_path / "ran").exists()


# errors

DECODE = ("--backend", "reference", "--new", "2")
BAD = {
    "token outside the vocabulary": (("decode", "DIR", "--tokens", "1,320", *DECODE), "[0, 320), got 320"),
    "negative token": (("decode", "DIR", "--tokens=-1,2", *DECODE), "[0, 320), got -1"),
    "tokens not numbers": (
        ("decode", "DIR", "--tokens", "1,x", *DECODE),
        "expected token ids such as 1,2,3, got '1,x'",
    ),
    "empty tokens": (("decode", "DIR", "--tokens", "", *DECODE), "expected token ids"),
    "no prompt": (("decode", "DIR", *DECODE), "--prompt --tokens"),
    "two prompts": (("decode", "DIR", "--tokens", "1", "--prompt", "a", *DECODE), "not allowed with"),
    "no new tokens": (("decode", "DIR", "--tokens", "1", "--new", "0"), "positive integer, got '0'"),
    "context beyond the model": (
        ("decode", "DIR", "--tokens", "1,2", "--new", "1024", "--backend", "reference"),
        "1025 positions are needed, the model has 1024",
    ),
    "layers out of range": (("decode", "DIR", "--tokens", "1", *DECODE, "--layers", "2:7"), "0 <= A < B <= 6"),
    "no layers": (("decode", "DIR", "--tokens", "1", *DECODE, "--layers", "3:3"), "0 <= A < B <= 6"),
    "layers not a slice": (("decode", "DIR", "--tokens", "1", *DECODE, "--layers", "3"), "expected A:B"),
    "tp does not divide": (
        ("decode", "DIR", "--tokens", "1", *DECODE, "--tp", "4"),
        "tp=4 does not divide mla_heads=2",
    ),
    "tp not offered": (("info", "--config", "k3", "--tp", "3"), "--tp"),
    "rank outside tp": (("decode", "DIR", "--tokens", "1", *DECODE, "--tp", "2", "--tp-rank", "2"), "[0, 2), got 2"),
    "missing directory": (("decode", "DIR/none", "--tokens", "1", *DECODE), "No such file"),
    "missing directory of info": (("info", "DIR/none"), "No such file"),
    "unknown backend": (
        ("decode", "DIR", "--tokens", "1", "--new", "1", "--backend", "cuda"),
        "invalid choice: 'cuda'",
    ),
    "megakernel": (
        ("decode", "DIR", "--tokens", "1", "--new", "1", "--backend", "megakernel", "--device", "cpu"),
        "backend megakernel needs an sm_90a or sm_100a GPU and the package nvidia-cutlass-dsl",
    ),
    "compare with the megakernel": (
        ("compare", "DIR", "--left", "megakernel", "--device", "cpu"),
        "nvidia-cutlass-dsl",
    ),
    "trace without a GPU": (("trace", "DIR", "--device", "cpu"), "needs an sm_90a or sm_100a GPU"),
    "trace of many rows": (("trace", "DIR", "--rows", "9"), "batch must be in [1, 8], got 9"),
    "compare the megakernel with itself": (
        ("compare", "DIR", "--left", "megakernel", "--right", "megakernel"),
        "taps one side only",
    ),
    "compare beyond the model": (("compare", "DIR", "--right", "reference", "--steps", "1025"), "the model has 1024"),
    "compare with a bad token": (("compare", "DIR", "--right", "reference", "--tokens", "999"), "got 999"),
    "directory in use": (("make-mini", "DIR", "--family", "k3"), "not empty"),
    "unknown family": (("make-mini", "DIR", "--family", "k2"), "invalid choice: 'k2'"),
    "unknown config": (("info", "--config", "k2"), "invalid choice: 'k2'"),
    "info of nothing": (("info",), "DIR --config"),
    "info context": (("info", "--config", "k3-mini", "--context", "2000"), "1024 positions"),
    "info bandwidth": (("info", "--config", "k3", "--bandwidth", "0"), "positive number of TB/s"),
    "info many rows": (("info", "--config", "k3", "--rows", str(10**17)), "--rows: expected at most 2147483647"),
    "seed of many bits": (("make-mini", "DIR-new", "--family", "k3", "--seed", str(10**30)), "64 bits"),
    "info rows": (("info", "--config", "k3", "--rows", "-1"), "positive integer"),
    "no command": ((), "COMMAND"),
    "unknown command": (("train",), "invalid choice: 'train'"),
    "unknown option": (("info", "--config", "k3", "--fast"), "unrecognized arguments: --fast"),
    "abbreviated option": (("info", "--conf", "k3"), "--conf"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(case, checkpoints, run):
    argv, fragment = BAD[case]
    message = error_of(run(*(arg.replace("DIR", str(checkpoints["k3"])) for arg in argv)))
    assert fragment in message


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_cuda_without_a_gpu(checkpoints, run):
    argv = ("decode", checkpoints["k3"], "--tokens", "1", *DECODE, "--device", "cuda")
    assert "no CUDA device here" in error_of(run(*argv))
    assert "bench needs a CUDA GPU" in error_of(run("bench", "--config", "k3", "--tp", "8"))


@pytest.mark.parametrize(
    ("content", "fragment"),
    (
        ("{", "not JSON"),
        ("[]", "expected a JSON object"),
        ("{}", "problems: "),
        (None, "No such file"),
    ),
)
def test_a_corrupt_config_is_one_line(content, fragment, checkpoints, tmp_path, run):
    directory = tmp_path / "corrupt"
    shutil.copytree(checkpoints["kimi-linear"], directory)
    (directory / "config.json").unlink()
    if content is not None:
        (directory / "config.json").write_text(content)
    for argv in (("decode", directory, "--tokens", "1", *DECODE), ("info", directory)):
        assert fragment in error_of(run(*argv))


def test_a_truncated_checkpoint_is_one_line(checkpoints, tmp_path, run):
    directory = tmp_path / "short"
    shutil.copytree(checkpoints["kimi-linear"], directory)
    file = directory / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)
    assert "model.safetensors" in error_of(run("decode", directory, "--tokens", "1", *DECODE))


def test_a_checkpoint_of_another_config_names_the_tensors(checkpoints, tmp_path, run):
    directory = tmp_path / "other"
    shutil.copytree(checkpoints["kimi-linear"], directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"vocab_size": 300}))
    assert "lm_head.weight" in error_of(run("compare", directory, "--right", "reference"))


@pytest.mark.parametrize(
    ("message", "line"),
    (
        ("one", "one"),
        ("one\ntwo", "one; two"),
        ("two problems\n  a\n  b", "two problems: a; b"),
        ("three problems:\n  missing:\n    a\n    b\n  unknown:\n    c", "three problems: missing: a; b; unknown: c"),
    ),
)
def test_a_long_message_becomes_one_line(message, line, run, monkeypatch):
    def failing(*_args, **_kwargs):
        raise ValueError(message)

    monkeypatch.setattr("kimi_kernels.commands.info.record_step", failing)
    assert error_of(run("info", "--config", "k3")) == line


@pytest.mark.parametrize(
    "error", (MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"))
)
def test_a_failed_allocation_is_one_line(error, run, monkeypatch):
    def failing(*_args, **_kwargs):
        raise error

    monkeypatch.setattr("kimi_kernels.commands.info.record_step", failing)
    assert error_of(run("info", "--config", "k3")).startswith("out of memory")


def test_info_of_a_model_with_few_positions_or_huge_tensors(checkpoints, tmp_path, run, run_json):
    data = json.loads((checkpoints["k3"] / "config.json").read_text())
    text = data["text_config"]
    (tmp_path / "config.json").write_text(json.dumps(data | {"text_config": text | {"max_position_embeddings": 16}}))
    assert run_json("info", tmp_path)["context"] == 16
    huge = {"num_experts": 10_000, "moe_intermediate_size": 2**31 - 32, "routed_expert_hidden_size": 2**31 - 32}
    (tmp_path / "config.json").write_text(json.dumps(data | {"text_config": text | huge}))
    assert "too large" in error_of(run("info", tmp_path))


def test_decode_draws_a_bar_on_a_terminal_only(checkpoints, run, monkeypatch):
    argv = ("decode", checkpoints["k3"], "--tokens", "5", "--new", "2", "--backend", "reference", "--layers", "0:1")
    assert run(*argv)[2] == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert "decode:   0%" in run(*argv)[2]
    assert "decode:" not in run(*argv, "--json")[2]


def test_an_interrupt_is_quiet(run, monkeypatch):
    def interrupted(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("kimi_kernels.commands.info.record_step", interrupted)
    assert run("info", "--config", "k3") == (130, "", "")


# the program as a process


def test_the_readme_pipeline_as_processes(tmp_path):
    """make-mini, decode and compare run one after the other, stdout being only the JSON object."""
    directory = str(tmp_path / "mini")
    steps = (
        ["make-mini", directory, "--family", "k3"],
        ["decode", directory, "--tokens", "1,2", "--new", "2", "--backend", "reference"],
    )
    for argv in steps:
        done = subprocess.run([*PROGRAM, *argv, "--json"], capture_output=True, text=True)
        assert done.returncode == 0 and not done.stderr, done.stderr
        result = json.loads(done.stdout)
    assert len(result["tokens"]) == 2


def test_a_closed_pipe_is_quiet():
    """As in `kimi-kernels info ... | head -0`."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([*PROGRAM, "info", "--config", "k3"], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert done.stderr == "" and done.returncode == 141
