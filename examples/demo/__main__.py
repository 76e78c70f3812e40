"""The demo's command line: `python -m examples.demo`.

Exit status 0 if the held-out accuracy reached its target, no batch was staler than its bound, every
planned kill happened, and everything that the server acknowledged is accounted for; 1 otherwise.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from examples.demo.settings import DemoSettings

NEEDED = ("torch", "rich", "grpc_health", "experience_buffer_server")
INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""
CURE = "`make demo` installs what it needs"


def main() -> int:
    """Run the demo; the exit status."""
    arguments = _parse()
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        print(f"demo: not installed: {', '.join(missing)}. {CURE}", file=sys.stderr)
        return 1
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _terminate)
    draws = find_spec("matplotlib") is not None
    if not draws:
        print(f"demo: no picture will be drawn, matplotlib isn't installed. {CURE}")
    try:
        # What is imported there may be missing.
        from examples.demo.session import play

        return play(
            output=arguments.output.resolve(),
            num_updates=arguments.updates,
            seed=arguments.seed,
            port=arguments.port,
            kills=arguments.kill,
            keeps=arguments.keep,
            draws=draws,
        )
    except KeyboardInterrupt:
        print("\ndemo: interrupted; all its processes have ended", file=sys.stderr)
        return INTERRUPTED


def _parse() -> argparse.Namespace:
    defaults = DemoSettings.__dataclass_fields__
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo",
        description="Train a small transformer by reinforcement alone, through a real server.",
        epilog=(__doc__ or "").partition("\n\n")[2],
    )
    parser.add_argument("--seed", type=int, default=0, help="same seed, similar curve [0]")
    parser.add_argument(
        "--updates",
        type=_at_least(1),
        default=defaults["num_updates"].default,
        metavar="N",
        help="policy updates at most; it ends when the target has held [%(default)s]",
    )
    parser.add_argument(
        "--kill",
        action="store_true",
        default=os.environ.get("DEMO_KILL", "") not in ("", "0"),
        help="kill the server, then the trainer, with SIGKILL and restart them; also DEMO_KILL=1",
    )
    parser.add_argument(
        "--keep",
        action="store_true",
        help="leave the server running afterwards, until Ctrl-C, and say what to do with it",
    )
    parser.add_argument(
        "--port", type=_at_least(0), default=0, help="of the server; 0: a free one [0]"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("demo-output"), help="folder of the PNG [%(default)s]"
    )
    return parser.parse_args()


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        return value

    return number


def _terminate(signum: int, _frame: object) -> NoReturn:
    """End like an exception, so that no process stays behind."""
    sys.exit(128 + signum)


if __name__ == "__main__":
    sys.exit(main())
