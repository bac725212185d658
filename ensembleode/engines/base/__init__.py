"""What an engine is, and what the engines share."""
