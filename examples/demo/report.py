"""What a run says before and after its training, in words."""

from __future__ import annotations

from statistics import fmean

from examples.demo.history import History, Kill
from examples.demo.runner import Outcome
from examples.demo.server import Server
from examples.demo.settings import BUFFER, CONSUMER, DemoSettings


def introduction(settings: DemoSettings, server: Server, *, kills: bool) -> list[str]:
    """Say what is going to happen, and where to look at it meanwhile."""
    lines = [
        "A small transformer learns to write up to six digits backwards, by reinforcement",
        "alone. Workers push what they sampled to an experience buffer server, which",
        "computes advantages; a trainer streams batches from it and publishes policies.",
        f"It ends when the policy has solved {settings.target_accuracy:.0%} of the held-out problems "
        f"{settings.num_held} times in",
        f"a row, or after {settings.num_updates} updates: about a minute on two CPU cores.",
    ]
    if kills:
        lines.append("On the way the server is killed and, later, both ranks of the trainer.")
    return [*lines, f"Look into the buffer meanwhile: http://{server.metrics_address}/ui/", ""]


def summary(outcome: Outcome) -> list[str]:
    """Describe an outcome, a few lines per fact; `verdict` is apart."""
    lines = ["", *_accuracy(outcome), *_training(outcome), *_experiences(outcome)]
    for kill in outcome.history.kills:
        lines += _kill(kill, outcome)
    return lines


def verdict(outcome: Outcome) -> str:
    """Whether the run is a success, and if it isn't, why."""
    found = problems(outcome)
    return "FAILED: " + "; ".join(found) if found else "success"


def problems(outcome: Outcome) -> list[str]:
    """Say what keeps a run from being a success; empty when nothing does."""
    settings, found, history = outcome.settings, outcome.audit, outcome.history
    texts = [
        f"the {what} was to be killed, and the training ended before" for what in outcome.not_killed
    ]
    if history.verdict is None:
        texts.append("the trainer ended without measuring its last policy")
    elif history.verdict.accuracy < settings.target_accuracy:
        texts.append(
            f"{history.verdict.accuracy:.1%} solved after {history.version} updates is under "
            f"{settings.target_accuracy:.0%}"
        )
    if (largest := _largest_staleness(history)) > settings.max_staleness:
        texts.append(
            f"a batch was {largest} policy versions behind, {settings.max_staleness} is the bound"
        )
    # What was too stale left the buffer untrained, and was counted.
    if len(found.missing) != history.num_stale:
        texts.append(
            f"{len(found.missing)} acknowledged experiences are neither trained nor in the buffer, "
            f"{history.num_stale} were left out as too stale, see {_first(found.missing)}"
        )
    for uids, what in (
        (found.unknown, "experiences were never acknowledged"),
        (found.repeated, "experiences were trained more than once"),
    ):
        if uids:
            texts.append(f"{len(uids)} {what}, see {_first(uids)}")
    return texts


def invitation(server: Server) -> list[str]:
    """Say what can be done with a server that goes on."""
    return [
        "",
        f"The server goes on until Ctrl-C, on {server.address}. In a browser:",
        "",
        f"  http://{server.metrics_address}/ui/",
        "",
        "In another terminal:",
        "",
        f"  .venv/bin/experience-buffer status --address {server.address}",
        f"  .venv/bin/experience-buffer steps --address {server.address} -b {BUFFER}",
        "  .venv/bin/python",
        "  >>> from experience_buffer import Client",
        f"  >>> buffer = Client({server.address!r})",
        f"  >>> buffer.get_stats({BUFFER!r})",
        f"  >>> batch = buffer.sample(1, buffer={BUFFER!r}, consumer={CONSUMER!r})",
        "  >>> [(e.prompt_text, e.response_text, e.reward) for e in batch.experiences]",
        "  >>> batch.experiences[0].advantages  # as the server computed them",
        "  >>> batch.nack()  # gives the group back",
    ]


def _accuracy(outcome: Outcome) -> list[str]:
    history = outcome.history
    first = history.updates[0].accuracy or 0.0
    if history.verdict is None:
        return _fact("solved", f"{first:.1%} before the training, not measured after it")
    return _fact(
        "solved",
        f"{first:.1%} before the training, {history.verdict.accuracy:.1%} after it (target "
        f"{outcome.settings.target_accuracy:.0%}),",
        f"of {history.verdict.num_problems:,} problems that no worker posed",
    )


def _training(outcome: Outcome) -> list[str]:
    history, bound = outcome.history, outcome.settings.max_staleness
    rewards = [update.reward for update in history.updates if update.reward is not None]
    staleness = [update.staleness for update in history.updates if update.staleness is not None]
    if not rewards:
        return _fact("updates", "none")
    return [
        *_fact("updates", f"{history.version} in {history.seconds:.0f} s"),
        *_fact(
            "reward", f"{rewards[0]:.2f} in the first batch, {fmean(rewards[-10:]):.2f} at last"
        ),
        *_fact(
            "staleness",
            f"{fmean(staleness):.1f} policy versions on average, {_largest_staleness(history)} at "
            f"most (bound {bound});",
            f"{history.num_stale:,} experiences would have passed it and were left out",
        ),
    ]


def _experiences(outcome: Outcome) -> list[str]:
    found, num_stale = outcome.audit, outcome.history.num_stale
    missing = max(len(found.missing) - num_stale, 0)
    return _fact(
        "experiences",
        f"{found.num_acked:,} acknowledged to the workers =",
        f"{found.num_trained:,} trained + {found.num_in_buffer:,} still in the buffer + "
        f"{num_stale:,} too stale;",
        f"{missing:,} missing, {len(found.repeated):,} trained twice",
    )


def _kill(kill: Kill, outcome: Outcome) -> list[str]:
    seconds = kill.time - outcome.history.start_time
    after = f"{kill.recovery_seconds or 0.0:.1f} s later"
    if kill.what == "server":
        return _fact("server", f"killed after {seconds:.0f} s, serving again {after}")
    return _fact(
        "trainer",
        f"killed after {seconds:.0f} s at update {kill.version}, resumed {after} from update "
        f"{kill.resumed_version};",
        f"{outcome.audit.num_undone:,} experiences trained in between came again",
    )


def _fact(name: str, *lines: str) -> list[str]:
    return [f"{name if index == 0 else '':<13}{line}" for index, line in enumerate(lines)]


def _largest_staleness(history: History) -> int:
    return max((update.max_staleness or 0 for update in history.updates), default=0)


def _first(uids: tuple[str, ...]) -> str:
    return uids[0] if uids else "none of them"
