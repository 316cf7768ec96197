"""Batches, references and the rollout seam."""
