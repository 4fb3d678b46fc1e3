"""DSpark: a DFlash backbone whose block is sampled left to right, each token biased by the one before it."""
