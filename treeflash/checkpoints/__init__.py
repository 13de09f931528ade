"""Reading drafter checkpoints: files and sections, and what their configs say."""
