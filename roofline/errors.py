"""The package's error type."""


class RooflineError(ValueError):
    """A chip, dtype, model or run that cannot be reasoned about; the message says what is allowed."""
