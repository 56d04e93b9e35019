"""Benchmarks: ``python -m benchmarks.<name> [--quick]``; the last line is one JSON object."""
