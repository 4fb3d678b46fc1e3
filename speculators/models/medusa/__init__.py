"""Medusa: heads on the verifier's last state, each of which predicts a token further ahead than the one before."""
