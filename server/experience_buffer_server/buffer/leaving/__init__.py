"""What goes: retention, eviction, removal, and how groups close."""
