"""One engine, rounds that may continue earlier ones, one JSON result: `python gpu_rounds.py JOB.json RESULT.json`.

    job     {"engine": {arguments of sglang.Engine}, "rounds": [{"kind", "flush": empties the cache first}]}

    batch      prompts, new        all at once                                        -> tokens, logprobs, top, cached
    continue   of, append, new     prompts and tokens of round `of`, and `append`     -> the same
    score      of                  tokens of round `of`, read as prompts by SGLang's prefill     -> logprobs
    churn      prompts, new, arrive, stop_after     each in its second, some stopped early       -> tokens, reasons
    alone      of                  prompts of round `of` that finished, one after the other      -> as batch

`top` holds for each token the best four [logprob, token]. Decoding is greedy.
"""

import asyncio
import json
import sys
import time
from functools import partial
from pathlib import Path

TOP = 4
SOON = 0.002  # seconds
SECONDS = 10


def batch(engine, prompts: list, new: list[int]) -> dict:
    outputs = engine.generate(input_ids=prompts, sampling_params=greedy(new), return_logprob=True, top_logprobs_num=TOP)
    return {"prompts": prompts} | read(outputs)


def read(outputs: list[dict]) -> dict:
    metas = [output["meta_info"] for output in outputs]
    return {
        "tokens": [output["output_ids"] for output in outputs],
        "logprobs": [[entry[0] for entry in meta["output_token_logprobs"]] for meta in metas],
        "top": [[[best[:2] for best in entry] for entry in meta["output_top_logprobs"]] for meta in metas],
        "cached": [meta["cached_tokens"] for meta in metas],
    }


def greedy(new: list[int]) -> list[dict]:
    return [{"temperature": 0, "max_new_tokens": count, "ignore_eos": True} for count in new]


def go_on(engine, before: dict, append: list[int], new: int) -> dict:
    prompts = [p + t + append for p, t in zip(before["prompts"], before["tokens"], strict=True)]
    return batch(engine, prompts, [new] * len(prompts))


def score(engine, before: dict) -> dict:
    whole = [p + t for p, t in zip(before["prompts"], before["tokens"], strict=True)]
    starts = [len(p) - 1 for p in before["prompts"]]
    outputs = engine.generate(
        input_ids=whole, sampling_params=greedy([1] * len(whole)), return_logprob=True, logprob_start_len=starts
    )
    found = [[entry[0] for entry in output["meta_info"]["input_token_logprobs"]] for output in outputs]
    return {"logprobs": [values[-len(t) :] for values, t in zip(found, before["tokens"], strict=True)]}


def churn(engine, prompts: list, new: list[int], arrive: list[float], stop_after: list) -> dict:
    async def one(index: int) -> dict:
        await asyncio.sleep(arrive[index])
        rid, last = f"churn-{index:05}", None  # SGLang stops every request whose id begins so
        arguments = dict(input_ids=prompts[index], sampling_params=greedy([new[index]])[0], rid=rid, stream=True)
        stop = partial(engine.tokenizer_manager.abort_request, rid)
        if stop_after[index] == 0:  # before its first token, where it still waits
            asyncio.get_running_loop().call_later(SOON, stop)
        async for last in await engine.async_generate(**arguments):
            if stop_after[index] is not None and last["meta_info"]["completion_tokens"] >= stop_after[index]:
                stop()
        return last

    async def all_of_them() -> list[dict]:
        return await asyncio.gather(*(one(index) for index in range(len(prompts))))

    outputs = engine.loop.run_until_complete(all_of_them())
    reasons = [output["meta_info"]["finish_reason"]["type"] for output in outputs]
    return {"prompts": prompts, "new": new, "tokens": [output["output_ids"] for output in outputs], "reasons": reasons}


def alone(engine, before: dict) -> dict:
    done = [i for i, reason in enumerate(before["reasons"]) if reason == "length"]
    each = [batch(engine, [before["prompts"][i]], [before["new"][i]]) for i in done]
    return {"requests": done} | {
        name: [one[name][0] for one in each] for name in ("prompts", "tokens", "logprobs", "top")
    }


def empty_cache(engine) -> None:
    """SGLang refuses while a request is left; the last one may still be on its way out."""
    deadline = time.monotonic() + SECONDS
    while not engine.flush_cache().success:
        assert time.monotonic() < deadline, "the cache cannot be emptied: something is left of an earlier request"
        time.sleep(0.05)


KINDS = {"batch": batch, "continue": go_on, "score": score, "churn": churn, "alone": alone}


def run(engine, rounds: list[dict]) -> list[dict]:
    results: list[dict] = []
    for round_ in rounds:
        arguments = dict(round_)
        function, flush = KINDS[arguments.pop("kind")], arguments.pop("flush", False)
        if "of" in arguments:
            arguments["before"] = results[arguments.pop("of")]
        if flush:
            empty_cache(engine)
        results.append(function(engine, **arguments))
    return results


def main(job_file: str, result_file: str) -> None:
    from sglang_integration import compat

    job = json.loads(Path(job_file).read_text())
    engine = compat.start_engine(job["engine"])
    try:
        Path(result_file).write_text(json.dumps(run(engine, job["rounds"])))
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
