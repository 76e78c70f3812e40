"""Pages of the reference, made when the site is built: nothing in them can be out of date."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from scripts.documentation.reference import client, commands, contract, http, metrics, settings

PAGES: Final[Mapping[str, Callable[[], str]]] = {
    "reference/client.md": client.clients,
    "reference/experiences.md": client.experiences,
    "reference/tensors.md": client.tensors,
    "reference/values.md": client.values,
    "reference/settings.md": settings.page,
    "reference/commands.md": commands.page,
    "reference/metrics.md": metrics.page,
    "reference/http.md": http.page,
    "reference/contract.md": contract.page,
}
"""By their names in the site: what makes each."""
