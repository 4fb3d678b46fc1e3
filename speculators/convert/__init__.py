"""From other projects' drafts to speculators and back, with every tensor accounted for.

What the command line does is `run.convert`, `export.export` and `check.check` in Python; `sources.SOURCES` and
`targets.TARGETS` are the layouts that are read and written.
"""
