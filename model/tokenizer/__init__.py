"""Text to token ids and back: loading, chat templates, streaming detokenisation, stop tokens and strings."""

from model.tokenizer.errors import TokenizerError
from model.tokenizer.stop_strings import StopStrings
from model.tokenizer.streaming import StreamingDecoder
from model.tokenizer.tokenizer import Tokenizer

__all__ = ["StopStrings", "StreamingDecoder", "Tokenizer", "TokenizerError"]
