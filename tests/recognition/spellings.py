"""Every spelling of attention that must be found: the catalogue, filled."""

from recognition import layouts, programs, surroundings
from recognition.catalogue import EQUAL, ODD, SPELLINGS, Sizes, Spelling

__all__ = ["EQUAL", "ODD", "SPELLINGS", "Sizes", "Spelling", "layouts", "programs", "surroundings"]
