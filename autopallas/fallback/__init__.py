"""Recovery from failures: finds the replaced site at fault, and returns the call's result all the same."""
