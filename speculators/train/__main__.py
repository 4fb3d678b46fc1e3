"""`accelerate launch -m speculators.train RECIPE.py [stage ...] [key=value ...] [--plan]`."""

import runpy
import sys
from pathlib import Path

from speculators.errors import UsageError
from speculators.train.recipe import Recipe, run


def main() -> None:
    """Run the RECIPE of a file, as the file itself would as a script."""
    try:
        recipe = load_recipe(sys.argv[1:2])
    except UsageError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)
    run(recipe, sys.argv[2:])


def load_recipe(words: list[str]) -> Recipe:
    """The RECIPE in a file; UsageError where there is none."""
    if not words or not Path(words[0]).is_file():
        raise UsageError(f"{words[0] if words else 'nothing'} is no file; give a recipe, for example recipes/mine.py")
    recipe = runpy.run_path(words[0], run_name="recipe").get("RECIPE")
    if not isinstance(recipe, Recipe):
        raise UsageError(f"{words[0]} has no RECIPE of type Recipe; expected RECIPE = Recipe(...)")
    return recipe


if __name__ == "__main__":
    main()
