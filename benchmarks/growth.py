"""What growing costs: more experiences, buffers, connections, larger groups; see `make bench-growth`.

The servers of a comparison run at the same time and are put under load in turns, so that whatever
the machine does besides touches all of them; figures are medians, and what growing costs is the median
of what it costs in each turn. In a turn as much is sampled as was pushed, so a server's population
stays what it is. Where the goal is judged, turns go on until they tell, or until there were five
times as many. Raw figures are kept as JSON lines.

With `--ten-million` also a store of 10 million small experiences: what its start takes, and memory.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import get_args

from benchmarks import growth_fill, scale_fill
from benchmarks.growth_clients import NUM_THREADS, Shape
from benchmarks.growth_figures import MAX_COST, Figures, memory_table, table, undecided, verdicts
from benchmarks.growth_turns import (
    BATCH_SIZE,
    NUM_PROCESSES,
    Run,
    Side,
    push_and_fetch,
    push_and_stream,
)
from benchmarks.servers import running_server
from benchmarks.workload import GROUP_SIZE, SIZES
from experience_buffer import Client
from experience_buffer.consumer_options import SelectorKind

POPULATION, BUFFERS, CONNECTIONS = "experiences stored", "buffers", "connections"
GROUPS, INDEX = "group size", "index only"
_INDEXED = 10_000_000
_START_SECONDS = 1200.0
_SETTLE_SECONDS = 1.0
_MAX_TIMES_CYCLES = 5
_NUM_FETCHES = 120


def _contest(
    run: Run,
    contest: str,
    shapes: Sequence[Shape],
    turn: Callable[[Side, int, bool], None],
    *,
    is_judged: bool = False,
) -> None:
    """Serve all shapes, and give each of them its turn again and again."""
    names = [shape.name for shape in shapes]
    print(f"\n{contest}: {', '.join(shape.name for shape in shapes)}", flush=True)
    with ExitStack() as stack:
        sides = [_serve(run, stack, contest, shape) for shape in shapes]
        for side in sides:
            run.clients.connect(side.shape, side.server.address)
            stack.callback(run.clients.disconnect, side.shape)
        for cycle in range(-1, run.options.cycles * (_MAX_TIMES_CYCLES if is_judged else 1)):
            figures = Figures(run.records)
            tells = is_judged and not undecided(figures, contest, names, MAX_COST)
            if tells and cycle >= run.options.cycles:
                break
            # Who begins changes, so that what one leaves to the next touches all of them.
            for side in sides if cycle % 2 else sides[::-1]:
                turn(side, run.options.amount, cycle >= 0)
        time.sleep(_SETTLE_SECONDS)
        for side in sides:
            side.add_memory("after the load")
    max_cost = MAX_COST if is_judged else None
    print("\n".join(table(Figures(run.records), contest, names, max_cost=max_cost)), flush=True)


def _serve(run: Run, stack: ExitStack, contest: str, shape: Shape) -> Side:
    folder = run.folder(f"{contest} {shape.name}")
    if shape.population:
        began = time.perf_counter()
        num_groups = shape.population // shape.group_size
        asyncio.run(
            growth_fill.fill(folder / "data", shape.workload, num_groups, selector=shape.selector)
        )
        print(f"{shape.population:,} stored in {time.perf_counter() - began:.0f} s", flush=True)
    began = time.perf_counter()
    server = stack.enter_context(running_server(folder / "data", start_seconds=_START_SECONDS))
    print(f"{shape.name}: served after {time.perf_counter() - began:.1f} s", flush=True)
    side = Side(run, contest, shape, server)
    if shape.population:
        time.sleep(_SETTLE_SECONDS)
        side.add_memory("after the start")
    return side


def _populations(run: Run) -> None:
    options = run.options
    shapes = [
        Shape(
            name=f"{population:,}",
            size=options.size,
            selector=options.selector,
            population=population,
            num_processes=NUM_PROCESSES,
        )
        for population in options.populations
    ]
    _contest(run, POPULATION, shapes, push_and_stream, is_judged=True)


def _buffers(run: Run) -> None:
    shapes = [Shape(name=str(count), size=run.options.size, num_buffers=count) for count in (1, 64)]
    _contest(run, BUFFERS, shapes, push_and_fetch)


def _connections(run: Run) -> None:
    shapes = [
        Shape(name=str(count), size=run.options.size, num_connections=count) for count in (1, 256)
    ]
    _contest(run, CONNECTIONS, shapes, push_and_fetch)


def _groups(run: Run) -> None:
    shapes = [
        Shape(
            name=str(size),
            size=run.options.size,
            group_size=size,
            num_processes=NUM_PROCESSES,
        )
        for size in (1, GROUP_SIZE, 64)
    ]
    _contest(run, GROUPS, shapes, push_and_stream)


def _index(run: Run) -> None:
    """Start and memory with very many small experiences, and that batches come."""
    shape = Shape(name=f"{_INDEXED:,}", population=_INDEXED)
    folder = run.folder(INDEX)
    began = time.perf_counter()
    payload_bytes = asyncio.run(scale_fill.fill(folder / "data", _INDEXED // GROUP_SIZE))
    print(
        f"\n{_INDEXED:,} experiences of {payload_bytes} bytes stored in "
        f"{time.perf_counter() - began:.0f} s",
        flush=True,
    )
    began = time.perf_counter()
    with running_server(folder / "data", start_seconds=_START_SECONDS) as server:
        side = Side(run, INDEX, shape, server)
        side.add("start", "s", time.perf_counter() - began)
        time.sleep(_SETTLE_SECONDS)
        side.add_memory("after the start")
        with Client(server.address) as client:
            taken = [_fetch(client) for _ in range(_NUM_FETCHES)]
        side.add("a batch of 64 with its ack, p50", "ms", statistics.median(taken))
        side.add_memory("after the load")
    print("\n".join(table(Figures(run.records), INDEX, [shape.name])), flush=True)


def _fetch(client: Client) -> float:
    began = time.perf_counter()
    batch = client.sample(BATCH_SIZE, buffer=scale_fill.BUFFER, consumer=scale_fill.CONSUMER)
    batch.ack()
    return (time.perf_counter() - began) * 1e3


_CONTESTS = {
    "populations": _populations,
    "buffers": _buffers,
    "connections": _connections,
    "groups": _groups,
}


def main() -> None:
    """Measure and print tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="S")
    parser.add_argument("--selector", choices=get_args(SelectorKind), default="fifo")
    parser.add_argument("--populations", type=int, nargs="+", default=[10_000, 1_000_000])
    parser.add_argument("--only", nargs="+", choices=_CONTESTS, default=list(_CONTESTS))
    parser.add_argument("--cycles", type=int, default=6, help="turns, at least")
    parser.add_argument("--amount", type=int, default=4096, help="experiences of a turn")
    parser.add_argument("--quick", action="store_true", help="100 thousand, and fewer turns")
    parser.add_argument("--ten-million", action="store_true", help="the index alone; takes long")
    parser.add_argument("--data", type=Path, help="where the stores are made")
    parser.add_argument("--output", type=Path, default=Path("bench-output/growth"))
    options = parser.parse_args()
    if options.quick:
        options.populations, options.cycles = [10_000, 100_000], 4
    options.output.mkdir(parents=True, exist_ok=True)
    with (options.output / "raw.jsonl").open("w") as raw, ExitStack() as stack:
        print(
            f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; size {options.size}, {options.selector}; "
            f"{NUM_PROCESSES} writers, one reader; calls: {NUM_THREADS} at once"
        )
        run = Run(options, stack, raw)
        for name in options.only:
            _CONTESTS[name](run)
        if options.ten_million:
            _index(run)
        figures, populations = Figures(run.records), [f"{p:,}" for p in options.populations]
        print("\n".join(memory_table(figures)))
        print("\n".join(verdicts(figures, POPULATION, populations)))
    print(f"\n{options.output / 'raw.jsonl'}")


if __name__ == "__main__":
    main()
