"""Every spelling of attention that must be found: the catalogue, filled."""

from support import layouts, programs, surroundings
from support.catalogue import EQUAL, ODD, SPELLINGS, Sizes, Spelling

__all__ = ["EQUAL", "ODD", "SPELLINGS", "Sizes", "Spelling", "layouts", "programs", "surroundings"]
