"""The table of draft families. Adding one means a folder here and a line in the table."""

from typing import TYPE_CHECKING

from speculators.models.family import DraftFamily

if TYPE_CHECKING:
    from speculators.formats.config import SpeculatorConfig

FAMILIES: dict[str, DraftFamily] = {
    family.name: family
    for family in (
        DraftFamily("eagle3", "speculators.models.eagle3", "Eagle3"),
        DraftFamily("peagle", "speculators.models.peagle", "PEagle"),
        DraftFamily("dflash", "speculators.models.dflash", "DFlash"),
        DraftFamily("dflash2", "speculators.models.dflash2", "DFlash2"),
        DraftFamily("dspark", "speculators.models.dspark", "DSpark", starts_from="dflash"),
        DraftFamily("eagle", "speculators.models.eagle", "Eagle", parity_depth=1),
        DraftFamily("medusa", "speculators.models.medusa", "Medusa"),
        DraftFamily("mlp_speculator", "speculators.models.mlp_speculator", "MlpSpeculator"),
        DraftFamily("mtp", "speculators.models.mtp", "Mtp", parity_depth=1),
    )
}

# What is trained where nothing else is asked for.
DEFAULT_FAMILY = FAMILIES["eagle3"]


def family_config(name: str) -> "type[SpeculatorConfig] | None":
    """The schema of the family's config.json, free of torch; None for a name that is not in the table."""
    return FAMILIES[name].config if name in FAMILIES else None
