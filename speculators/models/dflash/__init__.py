"""DFlash: a few decoder layers that fill a whole block of masked tokens in one pass, reading the verifier's states."""
