"""Proofs that a member lied: audits of its averages, and the evidence that spreads."""
