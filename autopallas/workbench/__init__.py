"""Engine of ``autopallas tune``: sites to tune for, trials, rankings, and the log of trials."""
