"""The error every checkpoint reader and writer raises."""


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged, or does not describe the model that its configuration promises."""
