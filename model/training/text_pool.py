"""What a draft is trained on, as equal rows of tokens: the part that counts, held-out rows, and their order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class TextPool:
    """Rows of tokens, of which only some positions are learnt from.

    tokens: int32 [N, T], zeros after a row's end.
    counted: bool [N, T], positions whose next token is to be predicted: the teacher's own, not the prompt's.
    """

    tokens: np.ndarray
    counted: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def split(self, held_out: int) -> tuple[TextPool, TextPool]:
        """(all rows but the first, the first ``held_out`` rows)."""
        return TextPool(self.tokens[held_out:], self.counted[held_out:]), TextPool(
            self.tokens[:held_out], self.counted[:held_out]
        )

    def counts(self, vocab_size: int) -> np.ndarray:
        """How often each token id follows a counted position, int64 [V]."""
        following = self.tokens[:, 1:][self.counted[:, :-1]]
        return np.bincount(following, minlength=vocab_size)

    def batches(self, batch: int, epochs: int, seed: int, first: int = 0) -> Iterator[np.ndarray]:
        """Row numbers [batch] of every step from step ``first`` on: each epoch is a permutation of its own seed."""
        a_epoch = len(self) // batch
        for step in range(first, a_epoch * epochs):
            epoch, place = divmod(step, a_epoch)
            order = np.random.default_rng((seed, epoch)).permutation(len(self))
            yield order[place * batch : (place + 1) * batch]


def pool_of(rows: Sequence[Sequence[int]], begins: Sequence[int], length: int) -> TextPool:
    """Rows of at most ``length`` tokens; those before ``begins`` are a prompt, and not counted."""
    tokens = np.zeros((len(rows), length), np.int32)
    counted = np.zeros((len(rows), length), bool)
    for row, (ids, begin) in enumerate(zip(rows, begins, strict=True)):
        ids = ids[:length]
        tokens[row, : len(ids)] = ids
        counted[row, max(begin - 1, 0) : len(ids) - 1] = True  # the last token predicts nothing that is known
    return TextPool(tokens, counted)


def windows(ids: Sequence[int], length: int) -> TextPool:
    """A text's tokens, cut into rows of ``length``; a shorter rest is dropped."""
    rows = np.asarray(ids[: len(ids) // length * length], np.int32).reshape(-1, length)
    counted = np.ones(rows.shape, bool)
    counted[:, -1] = False
    return TextPool(rows, counted)


def joined(pools: Sequence[TextPool]) -> TextPool:
    return TextPool(np.concatenate([one.tokens for one in pools]), np.concatenate([one.counted for one in pools]))
