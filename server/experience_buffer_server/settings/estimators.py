"""Estimators of the operator's own: their sections in the server's configuration file.

Only names, needs and parameters are looked at. What `path` names is imported by the process that
computes (`estimators/custom_functions.py`), and by no other.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    ValidationInfo,
    field_validator,
)

from experience_buffer_server.advantages import EstimatorSpec
from experience_buffer_server.advantages.plan import custom
from experience_buffer_server.settings.consumer import spelled

_NAME_PATTERN = r"[A-Za-z][A-Za-z0-9_]{0,63}"
_FUNCTION_PATTERN = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"


class EstimatorSettings(BaseModel):
    """One of them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: Annotated[str, spelled(_FUNCTION_PATTERN, "'module.of:function'")]
    """Where its function is, such as `my_package.advantages:scores`."""
    computes: custom.Computes = "scores"
    """What the function returns: a number per experience, or advantages per token."""
    compares: Literal["group", "item"] = "group"
    """Whether it compares the members of a group, or each experience stands alone."""
    needs: Annotated[tuple[str, ...], AfterValidator(custom.checked_needs)]
    """What an experience must carry; `a|b` is met by either."""
    parameters: dict[str, Any] = {}
    """Names and defaults of its parameters; a default's kind is the parameter's."""

    @field_validator("parameters")
    @classmethod
    def _usable(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if {"computes", "compares"} <= info.data.keys():
            computes, compares = info.data["computes"], info.data["compares"]
            custom.check_parameters(value, computes=computes, compares=compares)
        return value

    def spec(self, name: str) -> EstimatorSpec:
        """What the server needs to know of it."""
        return custom.custom_spec(name, **self.model_dump(exclude={"path"}))


EstimatorName = Annotated[
    str,
    spelled(_NAME_PATTERN, "a letter, then up to 63 letters, digits and '_'"),
    AfterValidator(custom.checked_name),
]
Estimators = dict[EstimatorName, EstimatorSettings]


class Declarations(BaseModel):
    """Of everything in the file, the estimators: the settings of buffers refer to them."""

    estimators: Estimators = {}

    def specs(self) -> dict[str, EstimatorSpec]:
        """What `custom.declare` takes."""
        return {name: section.spec(name) for name, section in self.estimators.items()}
