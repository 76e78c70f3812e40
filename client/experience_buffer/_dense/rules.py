"""What each field may hold, and the error of a value that it can't hold as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from experience_buffer._arguments import shown
from experience_buffer.errors import InvalidRequestError

RANGES: Final = {
    code: (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if code[0] == "I" else (0, 2**bits - 1)
    for code, bits in ((f"{sign}{bits}", bits) for sign in "IU" for bits in (8, 16, 32, 64))
}
"""Least and greatest value of each integer dtype."""
NAMES: Final = {
    **{code: f"{'u' * (code[0] == 'U')}int{code[1:]}" for code in RANGES},
    **{"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"},
    **{"C64": "complex64", "BOOL": "bool", "F8_E8M0": "float8_e8m0fnu", "F8_E5M2": "float8_e5m2"},
    **{"F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E4M3FNUZ": "float8_e4m3fnuz"},
    **{"F8_E4M3": "float8_e4m3fn"},
}
"""What torch and NumPy call the dtypes."""
CODES: Final = {name: code for code, name in NAMES.items()}


@dataclass(frozen=True, slots=True)
class Rule:
    """What a field may hold. Lists are converted; arrays and tensors are kept as they are."""

    wanted: str
    """What is expected, for errors."""
    list_dtype: str | None = None
    """What a list becomes; None: int64, float32 or bool, by what is in it."""
    is_ids: bool = False
    """Its shape is [n], its dtype one of integers; what else a tensor holds is looked at where it is
    computed with."""


_IDS: Final = Rule("token ids are whole numbers", "I32", is_ids=True)
_NUMBERS: Final = Rule("give numbers", "F32")
ANY: Final = Rule("give numbers")
RULES: Final = {
    **dict.fromkeys(("tokens", "chosen", "rejected"), _IDS),
    **dict.fromkeys(("logprobs", "token_level_reward", "advantages", "returns"), _NUMBERS),
    **dict.fromkeys(("teacher_logprobs", "values", "ref_logprobs"), _NUMBERS),
    "action_mask": Rule("a mask holds True and False, or 1 and 0", "BOOL"),
    "routed_experts": Rule("experts are whole numbers", "U8"),
    "versions": Rule("versions are whole numbers", "I64"),
}
"""By field; those of all others are `ANY`."""


def wrong_shape(shape: Sequence[int], where: str) -> InvalidRequestError:
    """The error of a field that isn't of one dimension."""
    hint = f"; take {where}[0], and make an experience of each row" if len(shape) == 2 else ""
    return refusal(where, f"has shape {list(shape)}; those of one experience have [n]{hint}")


def refusal(where: str, problem: str) -> InvalidRequestError:
    """The error of a field that is not what it should be; its text begins with the field's name."""
    return InvalidRequestError(f"{where} {problem}", subject=where)


def wrong_element(
    value: Any, where: str, shape: Sequence[int], index: int, reason: str
) -> InvalidRequestError:
    """The error of one value of many.

    Args:
        value: It.
        where: The field.
        shape: Of the field.
        index: Where it is, counted over all dimensions.
        reason: What is wrong with it, and what to do.
    """
    return refusal(element_at(where, shape, index), f"is {shown(value)}{reason}")


def element_at(where: str, shape: Sequence[int], index: int) -> str:
    """Name one of many; `index` is counted over all dimensions."""
    path = ""
    for size in reversed(shape):
        index, place = divmod(index, max(size, 1))
        path = f"[{place}]{path}"
    return f"{where}{path}"
