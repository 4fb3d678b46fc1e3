"""The table of draft families. Adding one means a folder here and a line in the table."""

from speculators.models.family import DraftFamily

FAMILIES: dict[str, DraftFamily] = {
    family.name: family for family in (DraftFamily("eagle3", "speculators.models.eagle3", "Eagle3"),)
}

# What is trained where nothing else is asked for.
DEFAULT_FAMILY = FAMILIES["eagle3"]
