"""MLPSpeculator: a small recurrence over the verifier's last state and the tokens drafted so far."""
