"""One named buffer behind one door: what comes in, what is handed out, what is computed, what leaves."""
