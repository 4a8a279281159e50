"""The corpus in the forms in which people run it: what is found in one form is found in every other."""

import pytest

from recognition.forms import CASES, found


@pytest.mark.parametrize("name", CASES)
def test_every_site_is_found_in_every_form(name):
    missing = [
        f"{form}: {op} {sites} of {wanted} ({'; '.join(reasons)})"
        for op, form, sites, wanted, reasons in found(CASES[name])
        if sites != wanted
    ]
    assert missing == []
