"""Tests that need a CUDA device; elsewhere they are collected and skipped, with that reason."""
