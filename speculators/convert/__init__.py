"""From other projects' drafts to speculators and back, with every tensor accounted for."""
