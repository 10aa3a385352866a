"""Counts and places in sentences."""

from __future__ import annotations


def number_of(count: int, noun: str) -> str:
    """ "1 token", "2,048 tokens". noun: one that takes an s, with what stands before it ("prompt token")."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def prompt_at(row: int, count: int) -> str:
    """ "the prompt" where there is one, else "prompt 1 of 3". row: from 0."""
    return "the prompt" if count == 1 else f"prompt {row + 1:,} of {count:,}"
