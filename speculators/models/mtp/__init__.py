"""Multi-token prediction: a verifier's own extra decoder layer, applied to its own output to draft further ahead."""
