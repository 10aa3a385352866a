"""C++ forms of the operations that decode lives on, called by XLA:CPU in place: compiled on first use, then kept."""

from kernels.native.build import BuildError, build, problem

__all__ = ["BuildError", "build", "problem"]
