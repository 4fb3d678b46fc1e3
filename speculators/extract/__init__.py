"""From conversations to hidden states: regenerate, prepare, extract."""
