"""Continuous batching: many requests share each step, and so each read of the weights."""
