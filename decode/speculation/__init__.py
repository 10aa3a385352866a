"""Speculative decoding: something cheap proposes tokens, the model checks several of them in one pass."""
