"""One engine, some rounds of prompts, one JSON result: `python -m sglang_integration.engine_run JOB RESULT READY`.

A process of its own for each engine: an engine that shut down still holds device memory and plugin state.

    job     {"engine": {arguments of sglang.Engine},
             "rounds": [{"prompts": [[ids], ...], "new": [tokens of each], "logprobs": whether to ask for them}],
             "wait": whether to wait for a line on standard input once the engine is up, which the file READY says}
    result  {"start_seconds": s, "rounds": [{"tokens": [[ids], ...], "logprobs": [[...], ...],
             "cached": [tokens of each], "seconds": s}]}

Decoding is greedy. A logprob is of the chosen token; `cached` counts prompt tokens that came from the prefix cache.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path


def run_job(job: dict, ready: Callable[[], object] = lambda: None) -> dict:
    """Starts the engine, calls `ready`, runs the rounds in order and shuts the engine down."""
    from sglang_integration import compat

    start = time.perf_counter()
    engine = compat.start_engine(job["engine"])
    started = time.perf_counter() - start
    try:
        ready()
        return {"start_seconds": started, "rounds": [_run_round(engine, round_) for round_ in job["rounds"]]}
    finally:
        engine.shutdown()


def _run_round(engine, round_: dict) -> dict:
    logprobs = round_.get("logprobs", False)
    start = time.perf_counter()
    outputs = engine.generate(
        input_ids=round_["prompts"],
        sampling_params=[{"temperature": 0, "max_new_tokens": new, "ignore_eos": True} for new in round_["new"]],
        return_logprob=logprobs,
    )
    seconds, metas = time.perf_counter() - start, [output["meta_info"] for output in outputs]
    return {
        "tokens": [output["output_ids"] for output in outputs],
        "logprobs": [[entry[0] for entry in meta["output_token_logprobs"]] for meta in metas if logprobs],
        "cached": [meta["cached_tokens"] for meta in metas],
        "seconds": seconds,
    }


def main(argv: list[str]) -> None:
    job_file, result_file, ready_file = map(Path, argv)
    job = json.loads(job_file.read_text())

    def ready() -> None:
        ready_file.touch()
        if job.get("wait"):
            sys.stdin.readline()

    result_file.write_text(json.dumps(run_job(job, ready)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
