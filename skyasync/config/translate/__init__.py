"""Another system's recipe as our configuration: ``python -m skyasync translate FILE|FLAGS``.

Invariant: every key of the recipe ends in the result, as a setting or as a comment, and the result loads.
"""

from skyasync.config.translate.command import translate
from skyasync.config.translate.draft import Draft
from skyasync.config.translate.recipe import Recipe, detect, read_recipe
from skyasync.config.translate.write import translated

__all__ = ["Draft", "Recipe", "detect", "read_recipe", "translate", "translated"]
