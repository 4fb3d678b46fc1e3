"""P-EAGLE: an EAGLE-3 draft that makes all its tokens in one pass, from learned stand-ins for states it lacks."""
