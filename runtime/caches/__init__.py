"""Caches of keys and values for serving: plain, of 8 bits, in pages, a ring, over devices."""
