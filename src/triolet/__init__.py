"""Triolet: an LLM server on Trio, built for the way back."""

from __future__ import annotations

from importlib.metadata import version

__all__ = ["__version__"]

__version__ = version("triolet")
