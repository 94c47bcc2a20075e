"""Which tokens go into the next forward, and where their K/V lives. Ints, lists and numpy arrays; no torch."""
