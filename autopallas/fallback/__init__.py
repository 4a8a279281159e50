"""What happens after a failure: which replaced site is at fault, and the call's result all the same."""
