"""Fixtures that several test folders share (test files cannot import each other)."""

from __future__ import annotations
