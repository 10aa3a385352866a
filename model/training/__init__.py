"""Training a small Llama to imitate a large one, on the mesh that serves them both."""
