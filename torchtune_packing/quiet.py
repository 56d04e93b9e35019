"""Silences what dependencies print and nobody here can fix, once, before they are imported."""


def silence_dependencies() -> None:
    """Does nothing yet."""
