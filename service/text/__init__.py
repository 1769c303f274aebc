"""Text as the service sees it: token ids to text and back, chat templates, stop strings."""
