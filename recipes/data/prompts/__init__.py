"""Word lists, templates and the small grammar that the prompts of the shipped data set are written with."""
