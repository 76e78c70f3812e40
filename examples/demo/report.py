"""The summary of a run, in words."""

from __future__ import annotations

from statistics import fmean

from examples.demo.history import Kill
from examples.demo.runner import NUM_JUDGED, Outcome


def summary(outcome: Outcome) -> list[str]:
    """Describe an outcome, a line per fact, the verdict last."""
    lines = [_accuracy(outcome), _training(outcome), _experiences(outcome)]
    lines += [_kill(kill, outcome) for kill in outcome.history.kills]
    problems = _problems(outcome)
    lines.append("FAILED: " + "; ".join(problems) if problems else "success")
    return lines


def _accuracy(outcome: Outcome) -> str:
    first = outcome.history.updates[0].accuracy or 0.0
    return (
        f"held-out accuracy {first:.1%} -> {outcome.accuracy:.1%} "
        f"({NUM_JUDGED} problems that no worker posed; target {outcome.target_accuracy:.0%})"
    )


def _training(outcome: Outcome) -> str:
    history = outcome.history
    rewards = [update.reward for update in history.updates if update.reward is not None]
    staleness = [update.staleness for update in history.updates if update.staleness is not None]
    largest = max((update.max_staleness or 0 for update in history.updates), default=0)
    num_stale = sum(update.num_stale for update in history.updates)
    if not rewards:
        return "no policy updates"
    return (
        f"{history.version} policy updates in {history.seconds:.0f} s, reward {rewards[0]:.2f} -> "
        f"{fmean(rewards[-10:]):.2f}, staleness {fmean(staleness):.1f} on average, at most {largest}, "
        f"{num_stale} experiences marked as too stale"
    )


def _experiences(outcome: Outcome) -> str:
    audit = outcome.audit
    return (
        f"{audit.num_acked:,} experiences acknowledged = {audit.num_trained:,} trained + "
        f"{audit.num_in_buffer:,} in the buffer; {len(audit.missing)} missing, "
        f"{len(audit.repeated)} trained twice"
    )


def _kill(kill: Kill, outcome: Outcome) -> str:
    seconds = kill.time - outcome.history.start_time
    after = f"{kill.recovery_seconds or 0.0:.1f} s later"
    if kill.what == "server":
        return f"server killed after {seconds:.0f} s, serving again {after}"
    return (
        f"trainer killed after {seconds:.0f} s at update {kill.version}, resumed {after} from "
        f"update {kill.resumed_version}: {outcome.audit.num_undone:,} experiences trained in between "
        "came again"
    )


def _problems(outcome: Outcome) -> list[str]:
    audit = outcome.audit
    problems = []
    if outcome.accuracy < outcome.target_accuracy:
        problems.append(f"accuracy {outcome.accuracy:.1%} is under {outcome.target_accuracy:.0%}")
    for uids, what in (
        (audit.missing, "acknowledged experiences are missing"),
        (audit.unknown, "experiences were never acknowledged"),
        (audit.repeated, "experiences were trained more than once"),
    ):
        if uids:
            problems.append(f"{len(uids)} {what}, such as {uids[0]}")
    return problems
