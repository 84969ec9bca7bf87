"""Typed access to the fields of a `config.json`: complaints are collected, none is raised, so that one error lists all.

A getter returns None after a complaint; a complaint reads `field: expected ..., got ...`.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

MAX_INTEGER = 2**31 - 1  # indices and lengths are int32
SHOWN_CHARACTERS = 300  # of a value in a complaint
SHOWN_LAYERS = 20  # of a fault of the layer lists
ABSENT = "nothing"  # shown as the value of a missing field; no field has it as a value

# released name -> other spellings: of transformers' attributes, and of its form for the fields of linear_attn_config
SPELLINGS = {
    "dtype": ("torch_dtype",),
    "max_position_embeddings": ("model_max_length",),
    "moe_renormalize": ("norm_topk_prob",),
    "num_expert_group": ("n_group",),
    "num_experts": ("num_local_experts",),
    "num_experts_per_token": ("num_experts_per_tok",),
    "num_shared_experts": ("n_shared_experts",),
    "linear_attn_config.num_heads": ("linear_num_heads",),
    "linear_attn_config.head_dim": ("linear_head_dim",),
    "linear_attn_config.short_conv_kernel_size": ("linear_conv_kernel_dim",),
}
OUTER_TOO = ("dtype", "eos_token_id", "tie_word_embeddings", "quantization_config")  # a wrapper may hold them as well


class Fields:
    """One dict of a config with what surrounds it; sections share the list of problems."""

    def __init__(self, data: dict[str, Any], outer: dict[str, Any] | None = None):
        self.data, self.outer = data, outer or {}
        self.prefix = "text_config." if outer else ""
        self.problems: list[str] = []
        self.parent: Fields | None = None
        self.section_name = ""

    def problem(self, name: str, expected: object, got: object, prefix: str | None = None) -> None:
        where = self.prefix if prefix is None else prefix
        shown = got if got is ABSENT else _shown(got)
        self.problems.append(f"{where}{name}: expected {expected}, got {shown}")

    def section(self, name: str, required: bool = True) -> "Fields":
        """The fields of a nested object. If it is absent that is the one problem; nothing inside it is reported."""
        data = self.raw(name, ABSENT if required else {})
        part = Fields(data if isinstance(data, dict) else {})
        part.prefix, part.parent, part.section_name = f"{self.prefix}{name}.", self, name
        if isinstance(data, dict):
            part.problems = self.problems
        else:
            self.problem(name, "an object", data)
        return part

    def raw(self, name: str, default: object = ABSENT) -> Any:
        """The value under any of its spellings, `default` if there is none; contradictory spellings are a problem."""
        spelled = SPELLINGS.get(f"{self.section_name}.{name}" if self.parent else name, ())
        places = [(self.prefix + name, self.data, name)]
        upper = self.parent or self
        places += [(upper.prefix + other, upper.data, other) for other in spelled]
        if name in OUTER_TOO:
            places += [(other, self.outer, other) for other in (name, *spelled)]
        found = [(shown, data[key]) for shown, data, key in places if key in data]
        found = [(shown, value) for shown, value in found if value is not None] or found
        for shown, value in found[1:]:
            if value != found[0][1]:
                self.problem(shown, f"{str(found[0][1])[:SHOWN_CHARACTERS]} as in {found[0][0]}", value, prefix="")
        return found[0][1] if found else default

    def integer(
        self,
        name: str,
        minimum: int = 1,
        maximum: int = MAX_INTEGER,
        multiple: int = 1,
        choices: Sequence[int] = (),
        nullable: bool = False,
        default: object = ABSENT,
    ) -> Any:
        value = self.raw(name, default)
        if value is default is not ABSENT or (value is None and nullable):
            return value
        ok = isinstance(value, int) and not isinstance(value, bool) and value >= minimum and value % multiple == 0
        if not ok or (choices and value not in choices):
            expected = f"an integer of at least {minimum}" if multiple == 1 else f"a positive multiple of {multiple}"
            if choices:
                expected = f"one of {tuple(choices)}"
            self.problem(name, expected + (" or null" if nullable else ""), value)
            return None
        if value > maximum:
            self.problem(name, f"at most {maximum}", value)
            return None
        return value

    def number(
        self,
        name: str,
        above: float = float("-inf"),
        below: float = float("inf"),
        nullable: bool = False,
        default: object = ABSENT,
    ) -> Any:
        value = self.raw(name, default)
        if value is default is not ABSENT or (value is None and nullable):
            return value
        ok = isinstance(value, int | float) and not isinstance(value, bool) and above < value < below
        if not ok or abs(value) > sys.float_info.max:
            bound = f"above {above}" if below == float("inf") else f"below {below}"
            self.problem(name, f"a number {bound}" + (" or null" if nullable else ""), value)
            return None
        return float(value)

    def flag(self, name: str, default: object = ABSENT) -> Any:
        value = self.raw(name, default)
        if value is default is not ABSENT:
            return value
        if not isinstance(value, bool):
            self.problem(name, "true or false", value)
            return None
        return value

    def fixed(self, name: str, expected: object, default: object = ABSENT, why: str = "") -> None:
        """A field of which one value is supported."""
        value = self.raw(name, default)
        if type(value) is not type(expected) or value != expected:
            self.problem(name, f"{expected} ({why})" if why else expected, value)

    def layer_split(self, first: str, second: str, count: int) -> tuple[int, ...] | None:
        """0-based layers of `second`; both 1-based lists must partition 1..count. None if both are absent."""
        lists = {name: self.raw(name) for name in (first, second)}
        if all(layers is ABSENT for layers in lists.values()):
            return None
        for name, layers in lists.items():
            if not isinstance(layers, list) or not all(isinstance(layer, int) for layer in layers):
                self.problem(name, "a list of layer numbers", layers)
                return ()
        listed = Counter(lists[first] + lists[second])
        every = range(1, count + 1)
        faults = {
            "in none": [layer for layer in every if layer not in listed],
            "more than once": sorted(layer for layer, times in listed.items() if times > 1),
            "outside": sorted(layer for layer in listed if layer not in every),
        }
        shown = ", ".join(f"{_shown_layers(layers)} {fault}" for fault, layers in faults.items() if layers)
        if shown:
            self.problems.append(
                f"{self.prefix}{first} and {second}: expected every layer of 1..{count} once, got {shown}"
            )
        return tuple(sorted(layer - 1 for layer in lists[second]))

    def layer_kinds(self, name: str, kinds: tuple[str, str], count: int) -> tuple[int, ...] | None:
        """0-based layers of the second kind in a list with one kind per layer; None if the list is absent."""
        values = self.raw(name, None)
        if values is None:
            return None
        if not isinstance(values, list) or len(values) != count or not all(value in kinds for value in values):
            self.problem(name, f"{count} entries of {' or '.join(kinds)}", values)
            return ()
        return tuple(layer for layer, value in enumerate(values) if value == kinds[1])


def _shown(value: object) -> str:
    """repr, cut where it is long."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested too deeply, an integer of too many digits
        return f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def _shown_layers(layers: list[int]) -> str:
    rest = len(layers) - SHOWN_LAYERS
    return f"{layers[:SHOWN_LAYERS]} and {rest} more" if rest > 0 else str(layers)
