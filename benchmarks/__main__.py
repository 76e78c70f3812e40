"""`python -m benchmarks`: throughput, latency and the hot path, as tables and JSON lines."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
from dataclasses import asdict
from pathlib import Path

import grpc
import lmdb
import torch

from benchmarks import hot_path, throughput
from benchmarks.workload import SIZES

_GROUPS = {"S": 1000, "M": 600, "L": 100}


def main() -> None:
    """Run everything, print tables, keep the raw figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="more or fewer groups")
    parser.add_argument("--output", type=Path, default=Path("bench-output"))
    options = parser.parse_args()
    groups = {name: max(int(count * options.scale), 8) for name, count in _GROUPS.items()}
    torch.set_num_threads(1)
    options.output.mkdir(parents=True, exist_ok=True)
    with (options.output / "bench.jsonl").open("w") as raw:
        print(_machine())
        print("\nThroughput (durable: counted when the fsync is done)")
        print("case      size  experiences/s    MB/s   server CPU us/experience")
        for result in throughput.run(groups):
            cpu = ", ".join(f"{k} {v:.0f}" for k, v in result.server_microseconds.items())
            print(
                f"{result.case:9} {result.size:4} {result.rate:13,.0f} "
                f"{result.megabytes_per_second:8.1f}   {cpu}",
                flush=True,
            )
            raw.write(json.dumps(asdict(result)) + "\n")
        print("\nOne durable insert (M), ms")
        milliseconds = [s * 1e3 for s in throughput.insert_latencies(SIZES["M"], 400)]
        cuts = statistics.quantiles(milliseconds, n=100)
        print(f"p50 {cuts[49]:.2f}   p99 {cuts[98]:.2f}", flush=True)
        raw.write(json.dumps({"case": "insert1", "p50_ms": cuts[49], "p99_ms": cuts[98]}) + "\n")
        print("\nHot path, us per experience, one thread, no gRPC")
        for name, count in groups.items():
            steps = asyncio.run(hot_path.measure(SIZES[name], count))
            print(f"{name}: " + "  ".join(f"{k} {v:.1f}" for k, v in steps.items()), flush=True)
            raw.write(json.dumps({"case": "hot_path", "size": name} | steps) + "\n")


def _machine() -> str:
    load = os.getloadavg()[0]
    return (
        f"{os.cpu_count()} cores, load {load:.1f}, Python {platform.python_version()}, "
        f"grpc {grpc.__version__}, lmdb {lmdb.__version__}, torch {torch.__version__}"
    )


if __name__ == "__main__":
    main()
