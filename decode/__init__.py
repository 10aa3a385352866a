"""Running a model: the functional KV cache, prefill and decode steps, sampling and the generation loop."""
