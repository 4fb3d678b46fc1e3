"""From stored hidden states to a trained speculator: recipes, stages, and one loop that knows no draft family."""
