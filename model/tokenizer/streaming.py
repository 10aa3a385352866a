"""Token ids to text as they arrive."""

import codecs

from model.tokenizer.pieces import Pieces


class StreamingDecoder:
    """Turns one sequence of token ids into text, one token at a time, at a cost that does not grow.

    Text comes out as soon as its characters are complete: at most three bytes of an unfinished character are
    held back. The pushed texts and the flushed rest add up to the decoded whole. Bytes that cannot become a
    character any more come out as U+FFFD, as Unicode recommends: one for each cut-off character, one for each
    stray byte.

    continuation: the tokens continue a text, so a blank in front of the first word belongs to it. Otherwise
        the blank that SentencePiece puts before every text is dropped.
    skip_special: special tokens, such as end-of-turn marks, give no text.
    """

    def __init__(self, pieces: Pieces, *, continuation: bool = False, skip_special: bool = True) -> None:
        self._pieces = pieces
        self._skip = pieces.special_ids if skip_special else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._blanks_to_drop = 0 if continuation else pieces.rule.strip_left

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes, perhaps empty. TokenizerError for a negative id."""
        piece = self._pieces[token_id]
        return "" if token_id in self._skip else self._drop_blanks(self._utf8.decode(piece))

    def flush(self) -> str:
        """What is left when no more tokens come: U+FFFD for an unfinished character, else nothing."""
        return self._drop_blanks(self._utf8.decode(b"", final=True))

    def _drop_blanks(self, text: str) -> str:
        while self._blanks_to_drop and text:
            if not text.startswith(" "):
                self._blanks_to_drop = 0
                break
            text = text[1:]
            self._blanks_to_drop -= 1
        return text
