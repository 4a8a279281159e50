"""The words that every stage uses: device, operation, site, index notation, elementwise program.  Imports no stage."""
