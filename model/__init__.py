"""What a Llama is: its config, its modules, rotary embedding, checkpoint formats and tokenizer.

Importing this package imports nothing else: `import model.config` works without jax.
"""
