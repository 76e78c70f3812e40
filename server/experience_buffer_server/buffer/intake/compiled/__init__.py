"""Compiled code that reads most of what is pushed; `trxp` and `admission` read, and decide, the rest."""
