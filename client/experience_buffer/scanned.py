"""What a scan brings of one experience: as it was pushed, and beside it what the server knows. Values only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from experience_buffer._show import Shown
from experience_buffer.values import ExperienceSummary

if TYPE_CHECKING:
    from experience_buffer.experience import Experience

__all__ = ["ScannedExperience"]
__dir__ = __all__.copy


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ScannedExperience(Shown):
    """One experience as `scan` reads it: as it was pushed, and beside it what the server computed.

    Attributes:
        summary: What `list` says of it, but for `places`.
        times_sampled: Deliveries that were acknowledged, over all consumers.
        flags: What its advantages are like, such as "zero_variance"; see `Batch.flags`.
        payload: Its TRXP payload as it was pushed; empty for a tombstone, where it can't be read, and
            where payloads weren't asked for.
        advantages: As computed, float32, little endian, one per response token; empty where none
            were.
        returns: As `advantages`.
        details: How its advantages were computed, as JSON; empty where none were.
        problem: Why it can't be read; empty where it can.
        cursor: What `scan` takes to go on after it.
        lease_id: Of a scan of a training step, its delivery; 0 where that isn't remembered any more.
        unit: Of a scan of a training step, which unit of the delivery it belongs to, from 0.
        rank: Of a scan of a training step, whose part of a shared delivery it was.
    """

    summary: ExperienceSummary
    times_sampled: int = 0
    flags: tuple[str, ...] = ()
    payload: bytes = field(default=b"", repr=False)
    advantages: bytes = field(default=b"", repr=False)
    returns: bytes = field(default=b"", repr=False)
    details: str = field(default="", repr=False)
    problem: str = ""
    cursor: str = ""
    lease_id: int = 0
    unit: int = 0
    rank: int = 0

    @property
    def experience(self) -> Experience | None:
        """The decoded experience, computed advantages in place; None without a payload.

        Raises:
            TrxpError: The payload is damaged.
        """
        if not self.payload:
            return None
        from experience_buffer import trxp

        return trxp.decode(self.delivered)[0]

    @property
    def delivered(self) -> bytes:
        """The payload as a trainer gets it, computed advantages in place; empty without a payload.

        Raises:
            TrxpError: The payload is damaged.
        """
        return delivered(self) if self.payload else b""

    @property
    def computation(self) -> dict[str, Any] | None:
        """How its advantages were computed: estimator, parameters, statistics; None where none were."""
        import json

        return json.loads(self.details) if self.details else None


def delivered(scanned: ScannedExperience) -> bytes:
    """The payload as a trainer gets it."""
    from experience_buffer import trxp

    if not scanned.details:
        return scanned.payload
    computed = {"advantages": scanned.advantages, "returns": scanned.returns}
    tensors = {
        name: trxp.TensorView("F32", (len(data) // 4,), memoryview(data))
        for name, data in computed.items()
    }
    if "masked" in scanned.flags:
        (item,) = trxp.read(scanned.payload)
        if isinstance(item, trxp.TrxpError):
            raise item
        mask = item.tensors.get("action_mask")
        num_tokens = len(scanned.advantages) // 4
        tensors["action_mask"] = (
            trxp.TensorView("BOOL", (num_tokens,), memoryview(bytes(num_tokens)))
            if mask is None
            else trxp.TensorView(mask.dtype, mask.shape, memoryview(bytes(mask.data.nbytes)))
        )
    return trxp.with_tensors(scanned.payload, tensors)
