"""Compile the native CPU kernels ahead of their first use: `python -m scripts.build_native`."""

from __future__ import annotations

import argparse
import sys

from kernels import native


def main(argv: list[str] | None = None) -> int:
    """Builds the library into the cache folder, prints where it is, and returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.build_native",
        description="Compile the native CPU kernels into the cache folder, where the first run would put them itself. "
        "Needs a C++17 compiler.",
    )
    parser.parse_args(argv)
    try:
        path = native.build()
    except native.BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
