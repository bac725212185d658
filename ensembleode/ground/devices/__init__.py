"""The devices of this process: how many there are, what is on them, what each computes alone."""
