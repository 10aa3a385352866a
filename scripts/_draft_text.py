"""Text that a teacher writes for its draft: answers to many made-up messages, or texts from nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from decode.decoder import Decoder
from decode.sampling import SamplingParams
from model.tokenizer import Tokenizer
from model.training.text_pool import TextPool, pool_of

WARM = 0.7
"""Temperature of every second round; the others are greedy, as ``scripts.generate`` is by default."""

MESSAGES = (
    "What is {}?",
    "Explain {} to a child.",
    "Explain how {} works.",
    "Give me three facts about {}.",
    "Why is {} important?",
    "Write a short story about {}.",
    "Write a poem about {}.",
    "Tell me a story in which {} changes somebody's life.",
    "List five tips for {}.",
    "What are the advantages and disadvantages of {}?",
    "Write an email to a friend about {}.",
    "Summarize what you know about {} in two sentences.",
    "Summarise the following in one sentence: many people have heard of {}, yet few know how it began or why it lasts.",
    "What should a beginner know about {}?",
    "Describe the history of {}.",
    "How would you teach a class about {}?",
    "Can you recommend a book about {}? Say why.",
    "What are common mistakes people make with {}?",
    "Write a Python function to do with {}.",
    "Write a dialogue between two people who disagree about {}.",
    "I want to learn about {}. Where should I start?",
    "Compare {} with something similar.",
    "Give a step by step plan for {}.",
    "What questions should I ask an expert on {}?",
    "Is {} good for the environment?",
    "How has {} changed in the last hundred years?",
    "Write a newspaper headline and a first paragraph about {}.",
    "Who invented {}, or who made it famous?",
    "What is the difference between {} and its alternatives?",
    "Help me to prepare a talk on {}.",
)
SUBJECTS = (
    "photosynthesis",
    "gravity",
    "the water cycle",
    "a lighthouse",
    "the city of Paris",
    "machine learning",
    "baking bread",
    "time management",
    "the French Revolution",
    "black holes",
    "learning a language",
    "a lost dog",
    "sorting a list",
    "the stock market",
    "healthy food",
    "a robot",
    "vaccines",
    "the Roman Empire",
    "solar power",
    "playing the guitar",
    "the moon",
    "friendship",
    "prime numbers",
    "a good night's sleep",
    "the Amazon rainforest",
    "public speaking",
    "bicycles",
    "dinosaurs",
    "recursion",
    "coffee",
    "climate change",
    "a job interview",
    "the human heart",
    "chess",
    "electric cars",
    "gardening",
    "Shakespeare",
    "the internet",
    "a dragon",
    "saving money",
    "the ocean",
    "running a marathon",
    "volcanoes",
    "a hash table",
    "the Olympic Games",
    "bees",
    "democracy",
    "an old clock",
    "travelling by train",
    "the speed of light",
    "yoga",
    "a small village",
    "binary search",
    "antibiotics",
    "the pyramids",
    "winter",
    "cooking pasta",
    "photography",
    "the brain",
    "a spaceship",
    "reading files",
    "stress",
    "rivers",
    "music",
    "supply and demand",
    "cats",
    "a birthday party",
    "the periodic table",
    "remote work",
    "earthquakes",
)


def messages(count: int, seed: int, first: int) -> list[str]:
    """User messages from number ``first`` on. None comes twice before all ``len(MESSAGES) * len(SUBJECTS)`` have."""
    order = np.random.default_rng(seed).permutation(len(MESSAGES) * len(SUBJECTS))
    numbers = [divmod(int(order[place % len(order)]), len(SUBJECTS)) for place in range(first, first + count)]
    return [MESSAGES[form].format(SUBJECTS[subject]) for form, subject in numbers]


def write_round(
    decoder: Decoder, tokenizer: Tokenizer, rows: int, length: int, seed: int, round_number: int, first: int
) -> TextPool:
    """One batch of the teacher's text. A model without a chat template continues a random token instead.

    ``first`` is how many rows came before. Every second round is greedy, the others are sampled at ``WARM``; a model
    without a chat template always samples.
    """
    stops = tokenizer.stop_token_ids
    if tokenizer.has_chat_template:
        prompts = [
            tokenizer.encode_chat([{"role": "user", "content": one}])[: length - 1]
            for one in messages(rows, seed, first)
        ]
        temperature = WARM * (round_number % 2)
    else:
        bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        starts = np.random.default_rng((seed, round_number)).integers(0, tokenizer.vocab_size, rows)
        prompts, temperature = [[*bos, int(token)] for token in starts], 1.0
    sampling = SamplingParams(temperature=temperature, seed=seed * 1_000_003 + round_number)
    texts = [list(prompt) for prompt in prompts]
    for arrival in decoder.generate(
        prompts, max_new_tokens=length, max_len=length, sampling=sampling, stop_token_ids=stops
    ):
        for text, tokens in zip(texts, arrival.tokens, strict=True):
            text += tokens
    return pool_of(texts, [len(prompt) for prompt in prompts], length)


def save_pool(path: Path, pool: TextPool) -> None:
    """Write whole or not at all."""
    partial = path.with_name(f".{path.name}.partial.npz")
    np.savez(partial, tokens=pool.tokens, counted=pool.counted)
    partial.replace(path)


def load_pool(path: Path) -> TextPool:
    with np.load(path) as stored:
        return TextPool(stored["tokens"], stored["counted"])
