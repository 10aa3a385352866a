"""The memory wall as arithmetic: chips, bytes and operations of a model, ceilings, latency, goodput.

Pure Python: nothing in this package imports JAX, so every question about a device can be asked on a
machine that has none. Of the other packages only `model.config` (itself free of JAX) is read.
"""
