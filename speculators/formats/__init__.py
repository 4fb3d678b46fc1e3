"""What a speculator is on disk: its configuration, tensors, vocabulary map, and what engines make of them."""
