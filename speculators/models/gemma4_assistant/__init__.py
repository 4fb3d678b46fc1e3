"""The assistants of Gemma 4: drafts whose layers have queries alone, over their verifier's keys and values.

They are served and not trained, so that they are no family of speculators.
"""
