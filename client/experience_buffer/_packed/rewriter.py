"""A batch that was read, or selected of one, as a file again. No torch."""

from __future__ import annotations

from array import array

from experience_buffer._packed.table import Table
from experience_buffer._packed.writer import FORMAT_VERSION, Entries


def rewrite(table: Table) -> bytearray:
    """Write what `read_table` reads as the same table."""
    entries = Entries()
    entries.add("format", "I64", (2,), array("q", [FORMAT_VERSION, table.num_rows]).tobytes())
    for name, view in table.columns.items():
        entries.add(f"columns/{name}", view.dtype, view.shape, view.data)
    for name, values in table.values.items():
        entries.add_bytes(name, values)
    for name, forms in table.fields.items():
        for number, form in enumerate(forms):
            tail = f".{number}/{name}" if number else f"/{name}"
            kind = "scalars" if form.is_scalar else "fields"
            entries.add(f"{kind}{tail}", form.view.dtype, form.view.shape, form.view.data)
            offsets = form.offsets_view
            entries.add(f"offsets{tail}", offsets.dtype, offsets.shape, offsets.data)
            if not all(form.present):
                entries.add(f"present{tail}", "BOOL", (table.num_rows,), form.present)
    return bytearray().join(entries.pieces())
