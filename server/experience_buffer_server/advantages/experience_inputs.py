"""Inputs of estimators in one experience: what it carries, and whether that can be read.

Pure, and without NumPy: the gate asks before it stores, the worker before it computes. What lies in
tensors is told by their shapes here; `tensor_inputs.py` looks at their dtypes and numbers. Legend: T
response tokens.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Collection, Mapping
from typing import Any, Final

from experience_buffer.trxp import Item, TensorView
from experience_buffer_server.advantages.plan.specs import COLUMNS, INPUT_FIELDS, Plan

_EXTRA_TENSORS: Final = frozenset({"values", "ref_logprobs"})
"""Those of `COLUMNS` that are no attributes of Trinity-RFT's class, but lie in its `extra`."""
_SCALARS: Final = ("baseline_reward", "env_state_hash", "num_turns")
"""Inputs that are entries of `info` and nothing else."""
_INT64_END: Final = 2**63
BOOTSTRAPPING: Final = "response_truncated"
"""The one `truncate_status` after which a response would have gone on."""
_SURELY_FLOAT32: Final = 1e38
_NO_INFO: Final[Mapping[str, Any]] = {}
INPUT_BITS: Final = {name: 1 << place for place, name in enumerate(INPUT_FIELDS)}
"""The bits of `input_fields`."""
_REWARD_BIT: Final = INPUT_BITS["reward"]
_TENSOR_BITS: Final = {name: bit for name, bit in INPUT_BITS.items() if name in COLUMNS}
_INFO_BITS: Final = {name: bit for name, bit in INPUT_BITS.items() if name != "reward"}


def response_tokens(item: Item) -> int:
    """Response length T: that of the action mask, else what tokens exceed the prompt by."""
    mask = item.tensors.get("action_mask")
    if mask is not None:
        return mask.shape[0]
    if "chosen" in item.tensors:
        return item.tensors["chosen"].shape[0]
    return max(item.tensors["tokens"].shape[0] - int(item.meta.get("prompt_length", 1)), 0)


def info_of(item: Item) -> Mapping[str, Any]:
    """The entries of `info`; none where it is no dict."""
    info = item.meta.get("info")
    return info if isinstance(info, dict) else _NO_INFO


def column_tensor(item: Item, name: str) -> TensorView | None:
    """An input's tensor; None where it isn't there, or wasn't kept."""
    tensor = item.tensors.get(name)
    return None if tensor is None or not _is_kept(item, tensor) else tensor


def _is_kept(item: Item, tensor: TensorView) -> bool:
    """Log-probabilities that weren't kept travel as an empty tensor; of no token, so do all."""
    return tensor.shape != (0,) or not response_tokens(item)


def input_fields(item: Item) -> int:
    """Which inputs of an estimator an experience carries: a bit per name of `INPUT_FIELDS`."""
    fields = 0 if item.meta.get("reward") is None else _REWARD_BIT
    for name, tensor in item.tensors.items():
        if name in _TENSOR_BITS and _is_kept(item, tensor):
            fields |= _TENSOR_BITS[name]
    info = info_of(item)
    if not _INFO_BITS.keys().isdisjoint(info):
        for name, bit in _INFO_BITS.items():
            if info.get(name) is not None:
                fields |= bit
    return fields


def read_inputs(plan: Plan) -> frozenset[str]:
    """Names of the inputs that a plan may read; the others may hold anything."""
    names = {name for need in plan.needs for name in need.split("|")}
    if getattr(plan.parameters, "turn_rewards", "none") != "none":
        names.add("num_turns")
    return frozenset(names)


class Needs:
    """What a plan asks of an experience, worked out once for all of them. Thread-safe."""

    __slots__ = ("_bits", "columns", "read")

    def __init__(self, plan: Plan) -> None:
        self.read = read_inputs(plan)
        """Names of the inputs that it may read."""
        self.columns = tuple(name for name in COLUMNS if name in self.read)
        """Those of them with one number per response token."""
        self._bits = [
            (need, sum(INPUT_BITS.get(name, 0) for name in set(need.split("|"))))
            for need in plan.needs
        ]

    def missing(self, fields: int) -> tuple[str, ...]:
        """What it needs and `input_fields` doesn't have; `a|b` is met by either."""
        return tuple([need for need, bits in self._bits if not fields & bits])


def input_problem(item: Item, names: Collection[str]) -> str:
    """Say why an input among `names` can't be read, and what to send; empty when all can.

    An input that isn't there at all is no problem here; see `Needs.missing`.
    """
    info = info_of(item)
    for name in COLUMNS:
        if name not in names or (value := info.get(name)) is None:
            continue
        if name in item.tensors and item.tensors[name].shape != (0,):
            return f"{name} is given twice, as a tensor and as info[{name!r}]; send one of them"
        if problem := _list_problem(f"info[{name!r}]", name, value, response_tokens(item)):
            return problem
    for name in _SCALARS:
        if name not in names:
            continue
        if name in item.tensors:
            return f"{name} is a tensor; send {_what(name, 0)}"
        value = info.get(name)
        if value is not None and not _is_scalar(name, value):
            return f"info[{name!r}] is {_shown(value)}; send {_what(name, 0)}"
    return ""


def fits_float32(value: float) -> bool:
    """Whether a number is finite, and still is once rounded to float32."""
    if -_SURELY_FLOAT32 < value < _SURELY_FLOAT32:
        return True
    try:
        rounded = float(value)
        struct.pack("<f", rounded)
    except OverflowError:
        return False
    return math.isfinite(rounded)


def explain_missing(fields: Collection[str], estimator: str, *, num_tokens: int) -> str:
    """Say what is missing and what to do about each.

    Args:
        fields: What `Needs.missing` returned; not empty.
        estimator: Its name.
        num_tokens: T.
    """
    needs = [field.split("|") for field in fields]
    names = ", ".join(" or ".join(need) for need in needs)
    verb, them = ("is", "it") if len(needs) == 1 else ("are", "them")
    cures = ["send " + ", or ".join(_what(name, num_tokens) for name in need) for need in needs]
    if any("reward" in need for need in needs):
        cures.append("or push a tombstone if the rollout failed")
    if any("reward" not in need for need in needs):
        cures.append(f'or set on_missing_field = "wait" and annotate {them} later')
    return f"{names} {verb} missing; the estimator {estimator!r} needs {them}: {', '.join(cures)}"


def _what(name: str, num_tokens: int) -> str:
    """How to send an input."""
    if name == "reward":
        return "reward as a number that is finite in float32"
    if name == "baseline_reward":
        return f"{name} as an entry of info: a number that is finite in float32"
    if name == "env_state_hash":
        return f"{name} as an entry of info: a text that isn't empty"
    if name == "num_turns":
        return f"{name} as an entry of info: a whole number of at least 1"
    kind = "an extra tensor" if name in _EXTRA_TENSORS else "a tensor"
    length = "T or T+1" if name == "values" else "T"
    return f"{name} as {kind}, or list in info, of {length} numbers (T = {num_tokens} tokens)"


def _is_scalar(name: str, value: Any) -> bool:
    if name == "env_state_hash":
        return isinstance(value, str) and value != ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if name == "baseline_reward":
        return fits_float32(value)
    # An annotation's numbers travel as floats.
    return 1 <= value < _INT64_END and value == int(value)


def _list_problem(label: str, name: str, value: Any, num_tokens: int) -> str:
    plus = ", or one more with the bootstrap value last" if name == "values" else ""
    expected = f"send a list of {num_tokens} numbers{plus}"
    if not isinstance(value, list | tuple):
        return f"{label} is {_shown(value)}; {expected}"
    if not {int, float}.issuperset(map(type, value)):
        place = next(i for i, one in enumerate(value) if type(one) not in (int, float))
        return f"{label}[{place}] is {_shown(value[place])}; {expected}"
    if len(value) != num_tokens and not (name == "values" and len(value) == num_tokens + 1):
        return f"{label} has {len(value)} numbers but the response has {num_tokens}; {expected}"
    try:
        array("d", value)
    except OverflowError:
        return f"{label} has an integer that no float holds; {expected}"
    return ""


def _shown(value: Any) -> str:
    """A value as an error names it: what it is, or of what type if that may be long."""
    if isinstance(value, bool | float):
        return repr(value)
    if isinstance(value, str):
        return repr(value[:80])
    if isinstance(value, int):
        # Python prints no integer of many thousands of digits.
        return str(value) if abs(value) < _INT64_END else f"an integer of {value.bit_length()} bits"
    return f"a {type(value).__name__}"
