"""EAGLE: a decoder that continues the verifier's own last states, one token at a time (EAGLE-1, EAGLE-2, HASS)."""
