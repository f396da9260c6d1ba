"""What is done with whole evaluations: several at once, two against each other, other formats."""
