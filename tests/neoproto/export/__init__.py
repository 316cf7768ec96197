"""Tests of the entry point that makes a model folder of a checkpoint."""
