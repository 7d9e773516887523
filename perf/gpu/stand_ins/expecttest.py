"""The little of the package `expecttest` that torch's test modules need to be imported, for machines without it.

On PYTHONPATH only where the real one is missing. Expected texts are compared, never rewritten.
"""

from __future__ import annotations

import unittest

ACCEPT = False


class TestCase(unittest.TestCase):
    """What torch's own TestCase is made from."""

    longMessage = True

    def assertExpectedInline(self, actual: str, expect: str, skip: int = 0) -> None:
        """As the real one without acceptance."""
        assert expect == actual
