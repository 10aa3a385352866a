"""Where downloaded and derived files are kept between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """`$XDG_CACHE_HOME/shardstream`, or `~/.cache/shardstream`. Names the folder without making it.

    A relative XDG_CACHE_HOME is ignored, as the XDG Base Directory Specification asks. Raises RuntimeError
    when neither that variable nor a home folder is known.
    """
    stated = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(stated) if os.path.isabs(stated) else Path.home() / ".cache"
    return base / "shardstream"
