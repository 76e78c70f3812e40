"""`experience-buffer compile`: what servers compile at their first start, compiled beforehand."""

from __future__ import annotations

import typer


def compile_all() -> None:
    """Compile now what a first server on this machine would compile beside its work.

    As the user that the server runs as, with the same NUMBA_CACHE_DIR, when installing: the code is
    of use to the same version on a processor of the same kind. Takes a quarter of a minute.
    """
    from experience_buffer_server.advantages.kernels import devices
    from experience_buffer_server.buffer.intake.compiled import __main__ as reader

    devices.warm_up("cpu", threads=1)
    # Ends with status 1 and a reason where there is no place to keep it, which holds for both.
    reader.main()
    typer.echo("compiled")
