"""Tests of the entry point that measures a model."""
