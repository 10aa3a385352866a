"""The one error this package raises."""


class TokenizerError(ValueError):
    """Tokenizer files that cannot be used, text or ids that cannot be converted, a chat that fails."""
