"""The hot inner loops: one folder per operation, a jnp reference beside one implementation per platform."""
