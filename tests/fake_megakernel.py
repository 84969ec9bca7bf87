"""A Megakernel on the CPU, for what is built on it: decoder, comparison, trace."""

from functools import partial
from types import SimpleNamespace

import torch

from cute_megakernel.megakernel import Megakernel
from cute_megakernel.recording import record_local_step
from cute_megakernel.schedule import make_schedule
from kimi_kernels.backends import make_ops, single_rank
from kimi_kernels.decode_step import decode_step
from kimi_kernels.op_specs import OPS

SMS = 5


class Fake(Megakernel):
    """A Megakernel on the CPU: the reference runs in place of the launch and leaves its outputs in the same words;
    `breakages` change the output of op calls by their number."""

    def __init__(self, config, weights, state, rows, breakages=None, schedule=None):
        self.config, self.weights, self.state, self.breakages = config, weights, state, breakages or {}
        self.schedule = schedule or make_schedule(record_local_step(config, weights, rows), config, SMS)
        self.written = {buffer.index for row in self.schedule.rows for buffer in row.writes}
        self.words = torch.zeros(self.schedule.words, dtype=torch.int64)
        self.times = torch.zeros(SMS * len(self.schedule.rows) * 2, dtype=torch.int64)

    def check(self):
        pass

    def put(self, buffer, output):
        """As the kernel stores it: two bfloat16 or one wider number a word, each row at its place, under a tag."""
        place = self.schedule.places[buffer.index]
        payload = output.view(torch.int32) if output.element_size() == 4 else output.contiguous().view(torch.int32)
        words = self.words[place.start : place.start + buffer.rows * place.pitch].view(torch.int32)
        words = words.reshape(buffer.rows, place.pitch, 2)
        words[:, : payload.shape[1], 0] = payload
        words[:, : payload.shape[1], 1] = 32

    def step(self, tokens, batch):
        self.times.copy_(torch.arange(1, 1 + len(self.times)))
        self.calls, reference = iter(self.schedule.recording.calls), make_ops("reference")

        def run(op, *args):
            call = next(self.calls)
            outputs = getattr(reference, op)(*args)
            if op in ("linear", "router_logits"):  # wider where this rank stands in for all
                outputs = outputs.repeat(1, call.outputs[0].width // outputs.shape[1])
            if call.index in self.breakages:
                outputs = self.breakages[call.index](outputs)
            kept = outputs if isinstance(outputs, tuple) else () if outputs is None else (outputs,)
            for buffer, output in zip(call.outputs, kept, strict=True):
                packed = output[..., : self.config.kv_lora_rank] if op == "mla_absorb_query" else output
                if buffer.index in self.written and op != "argmax" and buffer is not self.head:
                    self.put(buffer, packed.reshape(buffer.rows, -1))
            return outputs

        ops = SimpleNamespace(**{op: partial(run, op) for op in OPS}, **single_rank())
        self.head = self.schedule.recording.calls[-1].args["logits"].buffer
        output = decode_step(ops, self.config, self.weights, self.state, batch, tokens)
        self.logits, self.next_tokens = output.logits, output.tokens
        self.next_values = output.logits.amax(-1).float()
        return output
