"""Final answers: text, numbers, mathematics."""
