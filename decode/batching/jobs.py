"""What the scheduler knows of a request, and of a step that is to run."""

from __future__ import annotations

from dataclasses import dataclass, field

from decode.batching.request import Request, Ticket
from decode.speculation.control import DRAFT_PRIOR, PAUSE, PRIOR, RowEstimate
from decode.speculation.ngram_index import NgramIndex


@dataclass
class Guess:
    """What speculation knows of a request.

    index: where its next tokens are looked up; None where none are.
    copying, drafting: how many stand of the tokens that were looked up, and of a draft model's. pause: tokens after
        which one who lost is tried again with an open mind.
    found: what was looked up last, whether or not it was proposed.
    passed_over: tokens that it got without proposals since the last that had some.
    drafted: positions whose keys and values the draft's cache has, where there is one.
    """

    index: NgramIndex | None
    copying: RowEstimate = field(default_factory=lambda: RowEstimate.of(PRIOR))
    drafting: RowEstimate = field(default_factory=lambda: RowEstimate.of(DRAFT_PRIOR))
    found: list[int] = field(default_factory=list)
    pause: int = PAUSE
    passed_over: int = 0
    drafted: int = 0


@dataclass(eq=False, slots=True)
class Job:
    """A request on its way.

    order: place in the order of arrival: the larger, the younger.
    tokens: the prompt, and what was generated as far as the host has read it.
    computed: positions whose keys and values are in the cache once every step sent so far has run.
    in_flight: tokens chosen by steps that were sent and not read yet. Their values are on the device alone.
    slot: its place in the batch, -1 while it waits.
    pages: those of positions 0.., in order; names: the content names of the full ones, as far as known; named: how
        many of them the pool was told; tabled: how many of the pages are in its slot's block table.
    fresh: the device was not told yet what is kept for its slot.
    reused: positions of the prompt that came from the prefix cache at its first admission, None before.
    guess: what speculation knows of it; None where it does not speculate.
    first_at, last_at: when its first and newest token reached the host.
    prompt_len, end: tokens of the prompt, and with all that may be generated.
    """

    ticket: Ticket
    request: Request
    order: int
    arrived: float
    tokens: list[int]
    computed: int = 0
    in_flight: int = 0
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)
    named: int = 0
    tabled: int = 0
    fresh: bool = True
    guess: Guess | None = None
    reused: int | None = None
    ended: bool = False
    first_at: float | None = None
    last_at: float = 0.0
    prompt_len: int = field(init=False)
    end: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_len = len(self.request.prompt)
        self.end = self.prompt_len + self.request.max_new_tokens

    @property
    def length(self) -> int:
        """Positions that its tokens take, those in flight too."""
        return len(self.tokens) + self.in_flight

    @property
    def left(self) -> int:
        """Positions still to compute before the next token can be chosen."""
        return self.length - self.computed

    @property
    def sampled(self) -> int:
        """Tokens generated, those in flight too."""
        return self.length - self.prompt_len


@dataclass(eq=False, slots=True)  # not frozen: that makes each dearer, and a step has many
class Piece:
    """Positions start..start+count of a job, computed in one step.

    proposal: the token at ``start`` where it is a guess; None for the job's own tokens.
    """

    job: Job
    start: int
    count: int
    proposal: int | None = None


@dataclass(frozen=True)
class Plan:
    """One step: rows of one position each, pieces of prompts in tiles, and which jobs get a token.

    A job that speculates has a row for its newest token and one for each of its proposals, in order, and gets as many
    tokens; those after the first that differs from its proposal mean nothing.

    sampled: (job, position of its new token), rows first and in their order, then the pieces that end a prompt.
    R, C: the compiled shape it runs in: rows, and prompt tokens.
    context: positions that attention reads, over all rows and tiles.
    proposals: the proposals of each job that speculates. A draft model's are on the device: -2 stands for the first
        one, -3 for the second, and so on.
    asked: the jobs for which a draft model proposes. fills: what it is to compute before.
    """

    rows: list[Piece]
    pieces: list[Piece]
    sampled: list[tuple[Job, int]]
    R: int
    C: int
    context: int
    proposals: dict[Job, list[int]] = field(default_factory=dict)
    asked: tuple[Job, ...] = ()
    fills: list[Piece] = field(default_factory=list)
