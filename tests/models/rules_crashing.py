"""Rules of the end of a process: at rest, and with a call on its way to the disk."""

from __future__ import annotations

import copy
from collections.abc import Callable

from tests.models.port import Choose, Port
from tests.models.rules_changing import Changing
from tests.models.rules_ending import Ending


class Crashing(Ending, Changing):
    def crash(self, choose: Choose) -> None:
        """Everything acknowledged holds."""
        self.port.crash()

    def crash_during(self, choose: Choose) -> None:
        """A call is on its way to the disk: afterwards it has happened, or it hasn't."""
        before = copy.deepcopy((self.model, self.ended))
        call = self._some_call(choose)
        if call is None:
            return
        self.port.crash_during(call, choose.number(0, 1))
        either = [self.port.expected(model) for model in (self.model, before[0])]
        if either[0] == either[1]:
            # Nobody can tell: the caller asks again, as it would.
            call(self.port)
        elif (observed := self.port.observed(*either)) != either[0]:
            wrong = [
                {k: (observed[k], v) for k, v in e.items() if observed[k] != v} for e in either
            ]
            assert not wrong[1], (
                f"observed, expected: neither after {wrong[0]} nor before {wrong[1]}"
            )
            self.model, self.ended = before

    def _some_call(self, choose: Choose) -> Callable[[Port], object] | None:
        """A call, already done on the model."""
        kind = choose.one_of(["ack", "nack", "rewind", "safe"])
        leases = [i for i, le in self.model.leases.items() if le.consumer != "narrow"]
        if kind in ("ack", "nack") and leases:
            lease_id = choose.one_of(sorted(leases))
            if kind == "nack":
                self.end_lease(lease_id, "nacked")
                return lambda port: port.nack(lease_id)
            step, rank = self.ack_arguments(lease_id, choose)
            self.acked(lease_id, step, rank)
            return lambda port: port.ack(lease_id, step, rank)
        name = choose.one_of(list(self.model.places))
        low = max(self.model.places[name].safe or 0, 0)
        step = choose.number(low, max(low, self.step))
        if kind == "rewind":
            self.ended |= dict.fromkeys(self.model.leases_of(name), "nacked")
            self.model.rewind(name, step)
            return lambda port: port.rewind(name, step)
        if kind == "safe":
            self.model.declare_safe(name, step)
            return lambda port: port.declare_safe(name, step)
        return None
