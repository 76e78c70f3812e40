"""`experience-buffer replay-bundle | replay`: what a training step consumed, kept, and delivered again."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from experience_buffer_server.commands import bundles
from experience_buffer_server.commands.exports import Source, of_server_step, of_store_step
from experience_buffer_server.commands.imports import Taken, push_rows, report
from experience_buffer_server.commands.looking import BufferName, Looking, looks
from experience_buffer_server.commands.output import reported

if TYPE_CHECKING:
    from experience_buffer import Client
    from experience_buffer.scanned import ScannedExperience
    from experience_buffer.tables import TableRow


@looks
def bundle(
    look: Looking,
    out: Annotated[Path, typer.Argument(help="A folder to make, or NAME.zip.")],
    step: Annotated[int, typer.Option(min=0, help="The training step, as acknowledged.")],
    buffer: BufferName = "",
    consumer: Annotated[
        str, typer.Option("--consumer", "-c", help="Who acknowledged it.")
    ] = "trainer",
    data: Annotated[
        Path | None,
        typer.Option(help="Folder of a store to read in place of a server; a server may use it."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what has this name.")] = False,
) -> None:
    """Keep what a training step consumed: payloads as delivered, in their order, batch by batch.

    With statistics, the estimator and its parameters, the buffer's settings and checksums. What a step
    consumed is there until the step is declared safe, or leaves otherwise; `replay` delivers it again.

    Exit status 0: all that is kept of the step is in the bundle; 1: some of it can't be read; 2: nothing.
    """
    with reported(status=2, also=OSError):
        source = (
            of_server_step(look, buffer, consumer, step)
            if data is None
            else of_store_step(data, buffer, consumer, step)
        )
        with bundles.writing(out, force=force) as folder:
            manifest = _written(folder, source, consumer, step)
    told = {"bundle": str(out)} | {
        name: manifest[name]
        for name in ("buffer", "consumer", "step", "digest", "statistics", "problems")
    }
    told["num_batches"] = len(manifest["batches"])
    if look.as_json:
        look.json([told])
    else:
        look.say(*_said(told))
    raise SystemExit(1 if manifest["problems"] else 0)


def _written(folder: Path, source: Source, consumer: str, step: int) -> dict[str, Any]:
    """Write a bundle's files; its manifest.

    Raises:
        ExperienceNotFoundError: Nothing is kept of the step.
    """
    from experience_buffer import __version__, errors, tables

    gathered = _Gathered()
    facts = {"consumer": consumer, "step": step}
    with tables.TableWriter(folder / bundles.ROWS, about=source.about | facts) as writer:
        writer.write(gathered.noted(source.scan))
    if not gathered.num_experiences:
        raise errors.ExperienceNotFoundError(
            f"nothing is kept of what {consumer!r} of buffer {source.buffer!r} consumed at step {step}: "
            "the step is safe by now, or hasn't been acknowledged; `steps` lists those that are kept",
            subject=str(step),
        )
    problems = [*source.problems, *gathered.problems, *writer.problems]
    manifest = {
        "kind": bundles.KIND,
        "format": bundles.FORMAT,
        "version": __version__,
        **source.about,
        **facts,
        "statistics": gathered.statistics(),
        "estimator": source.about["config"].get("advantage"),
        "batches": gathered.batches,
        "digest": gathered.digest,
        "problems": [{"what": what, "reason": reason} for what, reason in problems],
        "files": {bundles.ROWS: bundles.digest_of(folder / bundles.ROWS)},
    }
    text = json.dumps(manifest, ensure_ascii=False, indent=1)
    (folder / bundles.MANIFEST).write_text(text + "\n", encoding="utf-8")
    return manifest


class _Gathered:
    """What a manifest says of the experiences of a step."""

    def __init__(self) -> None:
        self.problems: list[tuple[str, str]] = []
        self.batches: list[dict[str, Any]] = []
        self.num_experiences = 0
        self._hash = hashlib.sha256()
        self._numbers: dict[str, list[float]] = {
            "reward": [], "response_tokens": [], "staleness": [], "policy_version": [],
        }  # fmt: skip
        self._groups: set[str] = set()
        self._flags: Counter[str] = Counter()
        self._unit: tuple[int, int] | None = None

    @property
    def digest(self) -> str:
        """sha256 over the sha256 of each payload as delivered, in their order."""
        return self._hash.hexdigest()

    def noted(self, scan: Iterable[ScannedExperience]) -> Iterator[ScannedExperience]:
        """Experiences on their way into the file; those that can't be read are left out."""
        for each in scan:
            if each.problem:
                self.problems.append((each.summary.uid, each.problem))
                continue
            self._note(each)
            yield each

    def _note(self, each: ScannedExperience) -> None:
        sha256 = hashlib.sha256(each.delivered).digest()
        self._hash.update(sha256)
        self.num_experiences += 1
        if not self.batches or self.batches[-1]["lease_id"] != each.lease_id:
            self.batches.append({"lease_id": each.lease_id, "num_units": 0, "experiences": []})
            self._unit = None
        batch = self.batches[-1]
        if self._unit != (each.lease_id, each.unit):
            self._unit = each.lease_id, each.unit
            batch["num_units"] += 1
        batch["experiences"].append(
            {
                "uid": each.summary.uid, "unit": each.unit, "rank": each.rank,
                "sha256": sha256.hex(),
            }
        )  # fmt: skip
        summary = each.summary
        self._groups.add(summary.group)
        self._flags.update(each.flags)
        for name, value in (
            ("reward", summary.reward),
            ("response_tokens", summary.response_tokens),
            ("staleness", summary.staleness),
            ("policy_version", summary.min_policy_version),
        ):
            if value is not None and math.isfinite(value):
                self._numbers[name].append(value)

    def statistics(self) -> dict[str, Any]:
        """Counts, and of each number its mean and bounds."""
        return {
            "num_experiences": self.num_experiences,
            "num_groups": len(self._groups - {""}),
            "flags": dict(self._flags),
            **{
                name: {"mean": math.fsum(found) / len(found), "min": min(found), "max": max(found)}
                for name, found in self._numbers.items()
                if found
            },
        }


def _said(told: dict[str, Any]) -> Iterator[str]:
    from experience_buffer import _show
    from experience_buffer_server.commands.terminal import clean

    statistics = told["statistics"]
    yield (
        f"{told['bundle']}: step {told['step']} of {clean(told['consumer'])} of buffer "
        f"{clean(told['buffer'])}: {_show.counted(statistics['num_experiences'], 'experience')} in "
        f"{_show.counted(told['num_batches'], 'batch', 'batches')}, "
        f"{_show.counted(statistics['num_groups'], 'group')}"
    )
    for name in ("reward", "response_tokens", "staleness"):
        if found := statistics.get(name):
            yield f"  {name}: mean {found['mean']:g}, {found['min']:g} to {found['max']:g}"
    for each in told["problems"][:20]:
        yield f"  {clean(each['what'])}: {clean(each['reason'])}"
    yield f"digest {told['digest']}"


@looks
def replay(
    look: Looking,
    path: Annotated[Path, typer.Argument(metavar="BUNDLE", help="A folder or a .zip.")],
    buffer: Annotated[
        str,
        typer.Option("--buffer", "-b", help="A buffer to make.", show_default="BUFFER-step-N"),
    ] = "",
) -> None:
    """Make a buffer that delivers what a bundle holds again: the same batches, in the same order.

    Payloads are those that were delivered, advantages in place, and nothing is computed again. The
    bundle's checksums are compared first, and what is stored with its digest afterwards.

    Exit status 0: it is ready to be sampled; 1: some rows were refused; 2: it isn't.
    """
    began, taken = time.monotonic(), Taken()
    with reported(status=2, also=OSError), bundles.reading(path) as (file, manifest):
        name = buffer or f"{manifest['buffer']}-step-{manifest['step']}"
        client = look.patient_client()
        client.create_buffer(_settings(manifest, name))
        for _ in _pushed(client, name, file, manifest, taken):
            pass
        _compare(client, name, manifest, taken)
    if not look.as_json:
        look.say(*_how(name, manifest))
    facts = {"files": [str(path)], "buffer": name, "consumer": manifest["consumer"]}
    if look.as_json:
        facts["batches"] = [batch["num_units"] for batch in manifest["batches"]]
    report(look, taken, facts, began)


def _settings(manifest: dict[str, Any], name: str) -> dict[str, Any]:
    """The settings of a buffer that delivers a bundle's payloads as they are, first in, first out."""
    config = manifest["config"]
    consumers = [c for c in config.get("consumers") or [] if c["name"] == manifest["consumer"]]
    unit = consumers[0].get("unit", "item") if consumers else "item"
    return {
        "name": name,
        "group_by": config.get("group_by") or "none",
        "on_bad_reward": config.get("on_bad_reward") or "refuse",
        "consumers": [{"name": manifest["consumer"], "unit": unit}],
    }


def _pushed(
    client: Client, name: str, file: Path, manifest: dict[str, Any], taken: Taken
) -> Iterator[int]:
    """Push what was delivered, each group with its own size, in their order."""
    sizes = Counter(
        (batch["lease_id"], each["unit"])
        for batch in manifest["batches"]
        for each in batch["experiences"]
    )
    is_grouped = (manifest["config"].get("group_by") or "none") != "none"
    members = (
        sizes[batch["lease_id"], each["unit"]] if is_grouped else 0
        for batch in manifest["batches"]
        for each in batch["experiences"]
    )
    rows = zip(members, _delivered_rows(file), strict=True)
    for size, run in groupby(rows, key=lambda pair: pair[0]):
        some = (row for _, row in run)
        yield from push_rows(client, name, str(file), some, taken, group_size=size)


def _delivered_rows(file: Path) -> Iterator[TableRow]:
    """The rows of a bundle's file with their payloads as delivered."""
    from experience_buffer import tables

    with tables.TableReader(file) as reader:
        yield from reader.delivered()


def _compare(client: Client, name: str, manifest: dict[str, Any], taken: Taken) -> None:
    """Compare what is stored with what was delivered."""
    wanted = [each for batch in manifest["batches"] for each in batch["experiences"]]
    found = {
        each.summary.uid: hashlib.sha256(each.payload).hexdigest()
        for each in client.scan(buffer=name)
    }
    for row, each in enumerate(wanted):
        if each["uid"] in found and found[each["uid"]] != each["sha256"]:
            taken.refuse("", row, each["uid"], "what is stored isn't what was delivered")


def _how(name: str, manifest: dict[str, Any]) -> Iterator[str]:
    units = [batch["num_units"] for batch in manifest["batches"]]
    yield f"buffer {name} delivers step {manifest['step']} again, a batch for each of these:"
    shown = ", ".join(map(str, units[:20])) + (", ..." if len(units) > 20 else "")
    yield f"  for units in ({shown},):"
    yield (
        f'      batch = client.sample(units, buffer="{name}", consumer="{manifest["consumer"]}")'
    )
