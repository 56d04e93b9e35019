"""Benchmarks: ``python -m benchmarks.<name> [--quick]``; the last line printed is one JSON object."""
