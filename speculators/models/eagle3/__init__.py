"""EAGLE-3: one decoder layer over fused verifier states, unrolled on its own outputs while training."""
